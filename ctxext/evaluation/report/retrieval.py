"""The reports on passkeys, on RULER and on questions with a choice of answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ctxext.evaluation.passkey import PasskeyReport, PasskeyResult
from ctxext.evaluation.report.figures import Line, Panel, heat_panel, lines_panel, paneled
from ctxext.evaluation.report.page import NONE, Page, Part, TextTable, provenance_table
from ctxext.evaluation.retrieval.choices import RetrievalReport, RetrievalResult
from ctxext.evaluation.ruler.run import RulerReport, RulerResult
from ctxext.evaluation.trials import TrialReport
from ctxext.measuring.labels import tokens_label
from ctxext.measuring.truncation import TRUNCATED, UNPATCHED

AVERAGE = "average"
DASHED_LINE = "A dashed line marks where the trained window ends."
KEYS = (
    "By depth of the key (0%: at the start), and tokens of prompt and answer: keys found of keys hidden, and the mean "
    f"loss of the tokens of the key in nats. Blue: all found. {DASHED_LINE}"
)


def _page(
    report: TrialReport, name: str, title: str, parts: Sequence[Part], panels: Sequence[Panel], **drawn: Any
) -> Page:
    """Return a page of parts, one figure of panels, and the provenance."""
    title = f"{title}: {report.provenance.checkpoint}"
    details = [provenance_table(report.to_dict()["provenance"])]
    return Page(title, [*parts, paneled(name, title, panels, **drawn)], details)


def _by_length(report: TrialReport, title: str, shown: Callable[[Any], str], row: Any = None) -> TextTable:
    """Return a table with a line for each reading; ``shown`` writes the cell of its trials of a row at a length."""
    readings = [reading.only(row=row) for reading in report.readings]
    cells = [[reading.only(length=length) for length in report.lengths] for reading in readings]
    return TextTable(
        header=["", *map(tokens_label, report.lengths)],
        rows=[
            [reading.label, *(shown(cell) if cell.trials else NONE for cell in of_reading)]
            for reading, of_reading in zip(readings, cells, strict=True)
        ],
        title=title,
        styles=_styles(report),
    )


def _styles(report: TrialReport) -> dict[str, str]:
    return {reading.label: "reference" for reading in report.readings if reading.reading == TRUNCATED}


def passkey_page(report: PasskeyReport) -> Page:
    """Return what was found at each length, all depths together, the sentences and a map of each reading."""

    def panel(reading: PasskeyResult) -> Panel:
        low, high = reading.interval
        title = f"{reading.label}: {reading.accuracy:.0%} found ({low:.0f}% to {high:.0f}%)"
        keys = [(*place, cell.correct, len(cell.trials), cell.loss) for place, cell in reading.cells.items()]
        return passkey_panel(title, keys, report.trained_length)

    table = _by_length(
        report,
        "Keys found of keys hidden (mean loss of the key's tokens, nats)",
        lambda cell: f"{cell.correct}/{len(cell.trials)} ({cell.loss:.2f})",
    )
    title = f"Passkeys in {report.readings[0].haystack}"
    parts: list[Part] = [table, *passkey_sentences(report)]
    return _page(report, "passkeys", title, parts, list(map(panel, report.readings)), caption=KEYS)


def passkey_panel(title: str, keys: Iterable[tuple[float, int, int, int, float]], trained_length: int) -> Panel:
    """Return the heat map of one reading, from depth, tokens, keys found, keys hidden and loss in nats of its keys."""
    cells = {
        (f"{100 * depth:g}%", length): (found / hidden, f"{found}/{hidden}\n{loss:.2f}")
        for depth, length, found, hidden, loss in sorted(keys)
    }
    return heat_panel(title, cells, trained_length=trained_length)


def passkey_sentences(report: PasskeyReport) -> list[str]:
    """Return what every reading found beyond the trained window, or inside it where nothing goes beyond."""
    trained = report.trained_length
    is_beyond = report.lengths[-1] > trained
    readings = [reading.longer_than(trained) if is_beyond else reading for reading in report.readings]
    counted = "; ".join(_share(reading) for reading in readings if reading.trials)
    return [f"{'Beyond' if is_beyond else 'Within'} the trained {tokens_label(trained)} tokens, found: {counted}."]


def _share(reading: PasskeyResult) -> str:
    low, high = reading.interval
    return f"{reading.label} {reading.correct} of {len(reading.trials)} ({low:.0f}% to {high:.0f}%)"


def ruler_page(report: RulerReport) -> Page:
    """Return scores by task and length for every reading, the sentences and a map of each reading."""
    tables, maps = [], []
    for reading in report.readings:
        scores = {place: cell.score for place, cell in reading.cells.items()}
        scores |= {(AVERAGE, length): score for length, score in reading.averages.items()}
        names = (*reading.rows, AVERAGE)
        texts = {(name, at): f"{score:.{1 if name == AVERAGE else 0}f}" for (name, at), score in scores.items()}
        tables.append(
            TextTable(
                header=["", *map(tokens_label, report.lengths)],
                rows=[[name, *(texts.get((name, length), NONE) for length in report.lengths)] for name in names],
                title=f"{reading.label}: score by task and tokens of prompt and reply, 0 to 100",
                styles={AVERAGE: "best"},
            )
        )
        effective = reading.relative_effective_length
        reach = "0 at the shortest" if effective is None else f"keeps 85% to {tokens_label(effective)}"
        # A reading has no cell at a length that it was not asked at.
        cells = {
            (name, at): (scores[name, at] / 100, f"{scores[name, at]:.0f}")
            for name in names
            for at in report.lengths
            if (name, at) in scores
        }
        title, divider = f"{reading.label}: {reach}", len(reading.rows)
        maps.append(heat_panel(title, cells, trained_length=report.trained_length, divider=divider))
    hidden = f"; hidden in {report.essay} and not in NVIDIA's essays. " if report.essay else ". "
    caption = f"Scores from 0 to 100 by tokens of prompt and reply, {_samples(report)} prompts each"
    return _page(
        report, "ruler", "RULER", [*tables, *ruler_sentences(report)], maps, caption=caption + hidden + DASHED_LINE
    )


def ruler_sentences(report: RulerReport) -> list[str]:
    """Return the relative effective length of every reading, and what one has to know to read the table."""
    sentences = [_effective(reading) for reading in report.readings]
    cells = [cell for reading in report.readings for cell in reading.cells.values()]
    # The interval of a score near 0 or 100 lies to one side of it.
    width = max(abs(bound - cell.score) for cell in cells for bound in cell.interval)
    sentences.append(
        "The relative effective length is the largest at which the average keeps 85 percent of its value at the "
        "shortest. It is not RULER's effective length, which asks for an average above 85.6."
    )
    sentences.append(
        f"{_samples(report)} prompts per task and length: a score may be off by {width:.0f} (95 percent)."
        + (f" Things are hidden in {report.essay}, where NVIDIA uses one author's essays." if report.essay else "")
    )
    empty = sum(reading.empty for reading in report.readings)
    if empty:
        sentences.append(f"{empty} of {sum(len(reading.trials) for reading in report.readings)} replies are empty.")
    sentences += [f"Not measured: {task}: {reason}." for task, reason in report.left_out.items()]
    return sentences


def _effective(reading: RulerResult) -> str:
    averages = reading.averages
    effective = reading.relative_effective_length
    if effective is None:
        return f"{reading.label}: no relative effective length, since the shortest length scores 0."
    shortest = min(averages)
    return (
        f"{reading.label}: relative effective length {tokens_label(effective)} "
        f"({averages[effective]:.1f} there, {averages[shortest]:.1f} at {tokens_label(shortest)})."
    )


def _samples(report: RulerReport) -> str:
    """Return the number of prompts of each task and length."""
    samples = {len(cell.trials) for reading in report.readings for cell in reading.cells.values()}
    return " to ".join(str(number) for number in sorted({min(samples), max(samples)}))


def retrieval_page(report: RetrievalReport) -> Page:
    """Return right choices and margins by task, effective lengths, the sentences and a figure with a panel per task."""
    tasks = report.readings[0].rows
    tables = [
        _by_length(
            report,
            f"{task}: right choices, percent, and the mean margin in nats",
            lambda cell: f"{cell.score:.0f}%\n{cell.margin}",
            task,
        )
        for task in tasks
    ]
    # Without a row, all tasks count together: the last column.
    kept = [
        [reading.label, *(_kept(reading.only(row=task), report.base) for task in (*tasks, None))]
        for reading in report.readings
    ]
    effective = TextTable(
        header=["", *tasks, "all"],
        rows=kept,
        title="Effective length, tokens",
        caption=f"The longest length that keeps 85 percent of the accuracy above chance at {tokens_label(report.base)} "
        f"tokens. {NONE}: no more than chance there, or not asked there.",
        styles=_styles(report),
    )
    parts: list[Part] = [*tables, effective, *retrieval_sentences(report)]
    panels = [_choice_panel(report, task) for task in tasks]
    return _page(report, "retrieval", "Questions answered by choice", parts, panels, across=2)


def retrieval_sentences(report: RetrievalReport) -> list[str]:
    """Compare each extension's choices at its greatest length with the truncation's, and explain the tables."""
    truncated = next((reading for reading in report.readings if reading.reading == TRUNCATED), None)
    sentences = []
    for reading in report.readings:
        if truncated is None or reading.reading in (TRUNCATED, UNPATCHED):
            continue
        last = reading.only(length=reading.lengths[-1])
        other = truncated.only(length=reading.lengths[-1])
        points, margin = last.beyond(other), last.beyond(other, margin=True)
        if points is None or margin is None:  # other texts, which cannot be paired
            continue
        sentences.append(
            f"{reading.label} at {tokens_label(reading.lengths[-1])} tokens: {last.score:.0f}% right, "
            f"{truncated.label} {other.score:.0f}%; difference {points.mean:+.0f} ± {points.standard_error:.0f} "
            f"points, and {margin} nats of margin, over the same texts."
        )
    whole = report.readings[0]
    texts, choices = len(whole.only(row=whole.rows[0], length=whole.lengths[0]).trials), len(whole.trials[0].answers)
    written = "; ".join(
        f"{reading.label} {reading.writes} of {choices * len(reading.trials)}" for reading in report.readings
    )
    sentences.append(f"Greedy decoding would write the right answer: {written}.")
    sentences.append(
        f"{texts} texts per task and length, things hidden in {report.haystack}, {choices} questions about each: "
        f"guessing is right in {whole.chance:.0%}. The margin is what the right answer's loss lies below the wrong "
        f"ones', each held against its mean over the questions: 0 where nothing is known. ± is one standard error over "
        f"texts."
    )
    return sentences


def _kept(reading: RetrievalResult, base: int) -> str:
    length = reading.effective_length(base)
    return NONE if length is None else tokens_label(length)


def _choice_panel(report: RetrievalReport, task: str) -> Panel:
    """Return the margin of right answers by length, one line per reading, within one standard error over texts."""
    lines = []
    for reading in report.readings:
        cells = [reading.only(row=task, length=length) for length in reading.lengths]
        margins = [cell.margin for cell in cells]
        points = [(cell.trials[0].length, margin.mean) for cell, margin in zip(cells, margins, strict=True)]
        band = [(each.mean - each.standard_error, each.mean + each.standard_error) for each in margins]
        lines.append(Line(reading.reading.split()[0], reading.label, points, band))
    lengths = report.lengths
    return lines_panel(
        lines,
        title=f"{task}: margin of the right answer (guessing: 0)",
        x_label="tokens of prompt and answer",
        y_label="nats, within one standard error",
        ticks=lengths,
        doubling=lengths[-1] >= 2 * lengths[0],
        log=False,
        trained_length=report.trained_length if lengths[0] < report.trained_length < lengths[-1] else None,
    )
