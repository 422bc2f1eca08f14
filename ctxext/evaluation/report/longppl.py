"""The report on a LongPPL measurement."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ctxext.evaluation.labels import few_of, tokens_label
from ctxext.evaluation.longppl import LongPplResult, LongPplScore
from ctxext.evaluation.report.figures import Figure, Line, colours_for, draw_lines
from ctxext.evaluation.report.page import Page, Part, TextTable, provenance_table
from ctxext.evaluation.truncation import TRUNCATED, window_of

AGAINST = "Loss minus the best truncation's, nats per token ± standard error"


def longppl_page(result: LongPplResult) -> Page:
    """Return LongPPL beside plain perplexity, the differences to truncation, the sentences and the figure."""
    tables = [
        _table("LongPPL: perplexity over the key tokens", result, lambda score: f"{score.longppl:.2f}"),
        _table("Perplexity over all tokens at the same place", result, lambda score: f"{score.perplexity:.2f}"),
        _table(f"{AGAINST}, over key tokens", result, lambda score: str(score.versus_truncation or "")),
        _table(f"{AGAINST}, over all tokens", result, lambda score: str(score.versus_truncation_all or "")),
    ]
    title = f"{result.provenance.checkpoint}: {few_of(result.provenance.documents)}"
    figure = Figure(name="longppl", title=title, size=(11.0, 4.3), draw=lambda figure: _draw(figure, result))
    parts: list[Part] = [*(table for table in tables if table.rows), *_sentences(result), figure]
    return Page(title, parts, [provenance_table(result.to_dict()["provenance"])])


def _sentences(result: LongPplResult) -> list[str]:
    """Return how many key tokens there are, how the best extension predicts them, and what the numbers cannot say."""
    keys = result.keys
    searched = keys.searched * len(keys.passages)
    sentences = [
        f"{keys.tokens:,} of {searched:,} tokens are key tokens: {keys.evaluator}, unextended, predicts each better by "
        f"more than {keys.alpha:g} nats after {keys.window:,} tokens than after {keys.short:,}."
    ]
    best = min(result.extensions, key=lambda reading: reading.scores[-1].key_loss)
    score = best.scores[-1]
    if score.versus_truncation is not None:
        difference = score.versus_truncation
        beats = {"better": "yes", "worse": "no", "no difference": "undecided"}[
            difference.verdict_of_best(len(result.extensions))
        ]
        window = result.find(TRUNCATED).scores[0].window
        sentences.append(
            f"Best at {tokens_label(score.length)}: {best.label}. Does it beat the best truncation on the key tokens "
            f"(to the last {tokens_label(window or 0)})? {beats}{difference.scope(len(keys.passages))}: {difference} "
            f"nats per token, over {difference.over}."
        )
    sentences.append(
        "Key tokens are those that the unextended model predicts well in its window, which favours it and truncation a "
        "little; differences between extensions, and between lengths of one, are free of that."
    )
    return sentences


def _table(title: str, result: LongPplResult, cell: Callable[[LongPplScore], str]) -> TextTable:
    """Return one row for each reading that has a cell, and one column for each length."""
    lengths = _lengths(result)
    rows = []
    for reading in result.readings:
        cells = {score.length: cell(score) for score in reading.scores}
        if reading.name == TRUNCATED or window_of(reading.name) is not None:  # the same at every length
            cells = dict.fromkeys(lengths, cell(reading.scores[0]))
        if any(cells.values()):
            rows.append([reading.label, *(cells.get(length, "-") for length in lengths)])
    return TextTable(header=["", *map(tokens_label, lengths)], rows=rows, title=title)


def _draw(figure: Any, result: LongPplResult) -> None:
    """Draw LongPPL by length on the left, perplexity over all tokens at the same place on the right."""
    left, right = figure.subplots(1, 2)
    _draw_panel(left, result, "LongPPL (key tokens)", lambda score: score.longppl)
    _draw_panel(right, result, "Perplexity (all tokens at the same place)", lambda score: score.perplexity)


def _draw_panel(axes: Any, result: LongPplResult, title: str, value: Callable[[LongPplScore], float]) -> None:
    readings = [reading for reading in result.readings if window_of(reading.name) is None]
    colours = colours_for({reading.name: reading.name.split()[0] for reading in readings})
    lengths, lines = _lengths(result), []
    for reading in readings:
        x, y = [score.length for score in reading.scores], [value(score) for score in reading.scores]
        is_baseline = reading.name == TRUNCATED
        if is_baseline:  # the same at every length
            x, y = lengths, y[:1] * len(lengths)
        lines.append(Line(label=reading.label, colour=colours[reading.name], x=x, y=y, dashed=is_baseline))
    draw_lines(axes, lines, title=title, x_label="tokens that the model may see", ticks=lengths, log=False)


def _lengths(result: LongPplResult) -> list[int]:
    return sorted({score.length for reading in result.extensions for score in reading.scores})
