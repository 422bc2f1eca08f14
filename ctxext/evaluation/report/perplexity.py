"""The report on a perplexity measurement."""

from __future__ import annotations

import math
from collections.abc import Callable

from ctxext.evaluation.perplexity_result import LENGTH, POSITIONS, PerplexityReading, PerplexityResult, PerplexityScore
from ctxext.evaluation.report.figures import COLOURS, Figure, Line, differences_panel, lines_panel, paneled
from ctxext.evaluation.report.page import Headline, Page, Part, TextTable, provenance_table
from ctxext.measuring.labels import few_of, label_of, perplexity_label, tokens_label
from ctxext.measuring.truncation import TRUNCATED, UNPATCHED, is_reference, window_name, window_of

TITLES = {
    "position": "Perplexity up to a length",
    "sliding": "Sliding-window perplexity by window",
    "yarn": "YaRN's perplexity by window",
    "longlora": "LongLoRA's perplexity by window",
}
BY_POSITION = "Perplexity by position"
AGAINST = "Loss minus the best truncation's, nats per token"


def perplexity_page(result: PerplexityResult) -> Page:
    """Return the tables, the notes, the answer and the figure of a result."""
    kind = POSITIONS if result.mode == "position" else LENGTH
    titles = {POSITIONS: BY_POSITION, LENGTH: TITLES[result.mode]}
    parts: list[Part] = [
        _table(result, shown, titles[shown], _perplexity, "-") for shown in dict.fromkeys((kind, LENGTH))
    ]
    if any(score.versus_truncation for reading in result.readings for score in reading.at(kind)):
        parts.append(_table(result, kind, f"{AGAINST} ± standard error", _difference, ""))
    extension = result.extension
    if extension is not None and extension.in_window is not None:
        inside = extension.in_window
        parts.append(
            f"Inside the trained window, {label_of(extension.name)} minus unpatched: {inside} nats per token, "
            f"perplexity x{math.exp(inside.mean):.3f}."
        )
    title = f"{result.provenance.checkpoint}: {few_of(result.provenance.documents)}"
    parts += [*result.notes, Headline(result.sentence()), _figure(result, kind, title, titles[kind])]
    return Page(title, parts, [provenance_table(result.to_dict()["provenance"])])


def _table(
    result: PerplexityResult,
    kind: str,
    title: str,
    cell: Callable[[PerplexityReading, PerplexityScore], str],
    missing: str,
) -> TextTable:
    """Return one row for each reading that has a cell, and one column for each span or length."""
    columns = [_span(score) for score in result.readings[-1].at(kind)]
    rows: list[list[str]] = []
    for reading in result.readings:
        cells = {_span(score): text for score in reading.at(kind) if (text := cell(reading, score))}
        if cells:
            rows.append([label_of(reading.name), *(cells.get(column, missing) for column in columns)])
    references = [
        label_of(reading.name)
        for reading in result.readings
        if reading.name != UNPATCHED and is_reference(reading.name)
    ]
    return TextTable(header=["", *columns], rows=rows, title=title, styles=dict.fromkeys(references, "reference"))


def _perplexity(reading: PerplexityReading, score: PerplexityScore) -> str:
    """Return a number, for the best truncation with the window that it has there."""
    number = perplexity_label(score.perplexity)
    window = score.window if reading.name == TRUNCATED else None
    return number if window is None else f"{number}\n({label_of(window_name(window))})"


def _difference(reading: PerplexityReading, score: PerplexityScore) -> str:
    return str(score.versus_truncation or "").replace(" ± ", "\n± ")


def _span(score: PerplexityScore) -> str:
    start = f"{tokens_label(score.start)}-" if score.kind == POSITIONS else ""
    return f"{start}{tokens_label(score.stop)}"


def _figure(result: PerplexityResult, kind: str, title: str, panel: str) -> Figure:
    """Return perplexity by position (or by length), and on the right the difference to the best truncation."""
    axis = "position in the text, tokens" if kind == POSITIONS else "tokens in a window"
    lines = [
        Line(
            _method(reading),
            label_of(reading.name),
            [((s.start + s.stop) / 2 if kind == POSITIONS else s.stop, s.perplexity) for s in reading.at(kind)],
        )
        for reading in result.readings
        if window_of(reading.name) is None
    ]
    step = 2 ** max(0, math.ceil(math.log2(result.lengths[-1] / 8)))
    ticks = range(0, result.lengths[-1] + 1, step)
    panels = [lines_panel(lines, title=panel, x_label=axis, ticks=ticks, trained_length=result.trained_length)]
    measured = result.extension or result.find(UNPATCHED)
    differences = [(score, d) for score in (measured.at(kind) if measured else ()) if (d := score.versus_truncation)]
    if measured and differences:
        columns = [_span(score) for score, _ in differences]
        group = (_method(measured), label_of(measured.name), [difference for _, difference in differences])
        panels.append(differences_panel(columns, [group], title=AGAINST, x_label=axis))
    return paneled("perplexity", title, panels)


def _method(reading: PerplexityReading) -> str:
    """Return the name that decides a reading's colour."""
    return reading.name if reading.name in COLOURS else "yarn"
