"""The reports on passkeys, on RULER and on questions with a choice of answers."""

from __future__ import annotations

from collections.abc import Iterable

from ctxext.evaluation.passkey import PasskeyReport, PasskeyResult
from ctxext.evaluation.report.figures import Line, Panel, heat_panel, lines_panel, paneled
from ctxext.evaluation.report.page import NONE, Page, TextTable, provenance_table
from ctxext.evaluation.retrieval.choices import RetrievalReport, RetrievalResult
from ctxext.evaluation.ruler import RulerReport, RulerResult
from ctxext.measuring.labels import tokens_label
from ctxext.measuring.truncation import TRUNCATED, UNPATCHED

AVERAGE = "average"
DASHED_LINE = "A dashed line marks where the trained window ends."
KEYS = (
    "By depth of the key (0%: at the start), and tokens of prompt and answer: keys found of keys hidden, and the mean "
    f"loss of the tokens of the key in nats. Blue: all found. {DASHED_LINE}"
)


def passkey_page(report: PasskeyReport) -> Page:
    """Return what was found at each length, all depths together, the sentences and a map of each reading."""
    lengths = _lengths(report)
    rows, maps = [], []
    for reading in report.readings:
        cells = {length: reading.at(length) for length in reading.lengths}
        found = {length: f"{cell.correct}/{len(cell.trials)} ({cell.loss:.2f})" for length, cell in cells.items()}
        rows.append([reading.label, *(found.get(length, "-") for length in lengths)])
        low, high = reading.interval
        title = f"{reading.label}: {reading.accuracy:.0%} found ({low:.0%} to {high:.0%})"
        keys = [
            (depth, length, cell.correct, len(cell.trials), cell.loss)
            for (length, depth), cell in reading.cells.items()
        ]
        maps.append(passkey_panel(title, keys, report.trained_length))
    table = TextTable(
        header=["", *map(tokens_label, lengths)],
        rows=rows,
        title="Keys found of keys hidden (mean loss of the key's tokens, nats)",
        styles={reading.label: "reference" for reading in report.readings if reading.reading == TRUNCATED},
    )
    title = f"Passkeys in {report.readings[0].haystack}: {report.provenance.checkpoint}"
    figure = paneled("passkeys", title, maps, caption=KEYS)
    details = [provenance_table(report.to_dict()["provenance"])]
    return Page(title, [table, *passkey_sentences(report), figure], details)


def passkey_panel(title: str, keys: Iterable[tuple[float, int, int, int, float]], trained_length: int) -> Panel:
    """Return the heat map of one reading, from depth, tokens, keys found, keys hidden and loss in nats of its keys."""
    cells = {
        (f"{depth:.0%}", length): (found / hidden, f"{found}/{hidden}\n{loss:.2f}")
        for depth, length, found, hidden, loss in sorted(keys)
    }
    return heat_panel(title, cells, trained_length=trained_length)


def passkey_sentences(report: PasskeyReport) -> list[str]:
    """Return what every reading found beyond the trained window, or inside it where nothing goes beyond."""
    longest = max(length for reading in report.readings for length in reading.lengths)
    beyond = longest > report.trained_length
    span = (report.trained_length + 1, longest) if beyond else (0, longest)
    readings = [reading.between(*span) for reading in report.readings]
    where = "Beyond" if beyond else "Within"
    counted = "; ".join(_share(reading) for reading in readings if reading.trials)
    return [f"{where} the trained {tokens_label(report.trained_length)} tokens, found: {counted}."]


def ruler_page(report: RulerReport) -> Page:
    """Return scores by task and length for every reading, the sentences and a map of each reading."""
    lengths, tables, maps = _lengths(report), [], []
    for reading in report.readings:
        names, scores = (*reading.tasks, AVERAGE), _scores(reading)
        texts = {(name, at): f"{score:.{1 if name == AVERAGE else 0}f}" for (name, at), score in scores.items()}
        tables.append(
            TextTable(
                header=["", *map(tokens_label, lengths)],
                rows=[[name, *(texts.get((name, length), "-") for length in lengths)] for name in names],
                title=f"{reading.label}: score by task and tokens of prompt and reply, 0 to 100",
                styles={AVERAGE: "best"},
            )
        )
        effective = reading.relative_effective_length
        reach = "0 at the shortest" if effective is None else f"keeps 85% to {tokens_label(effective)}"
        cells = {
            (name, at): (scores[name, at] / 100, f"{scores[name, at]:.0f}")
            for name in names
            for at in lengths
            if (name, at) in scores
        }
        maps.append(
            heat_panel(
                f"{reading.label}: {reach}",
                cells,
                trained_length=report.trained_length,
                divider=len(reading.tasks),
            )
        )
    caption = f"Scores from 0 to 100 by tokens of prompt and reply, {_samples(report)} prompts each"
    caption += f"; hidden in {report.essay} in place of NVIDIA's essays. " if report.essay else ". "
    title = f"RULER: {report.provenance.checkpoint}"
    figure = paneled("ruler", title, maps, caption=caption + DASHED_LINE)
    details = [provenance_table(report.to_dict()["provenance"])]
    return Page(title, [*tables, *ruler_sentences(report), figure], details)


def ruler_sentences(report: RulerReport) -> list[str]:
    """Return the relative effective length of every reading, and what one has to know to read the table."""
    sentences = [_effective(reading) for reading in report.readings]
    cells = [cell for reading in report.readings for cell in reading.cells.values()]
    width = max(cell.interval[1] - cell.interval[0] for cell in cells) / 2
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


def retrieval_page(report: RetrievalReport) -> Page:
    """Return right choices and margins by task, effective lengths, the sentences and a figure with a panel per task."""
    lengths, tasks = _lengths(report), report.readings[0].tasks
    styles = {reading.label: "reference" for reading in report.readings if reading.reading == TRUNCATED}
    tables = [
        TextTable(
            header=["", *map(tokens_label, lengths)],
            rows=[
                [reading.label, *(_choices(reading.only(task=task, length=length)) for length in lengths)]
                for reading in report.readings
            ],
            title=f"{task}: right choices, percent, and the mean margin in nats",
            styles=styles,
        )
        for task in tasks
    ]
    kept = [
        [
            reading.label,
            *(
                _kept(part.effective_length(report.base))
                for part in (*(reading.only(task=task) for task in tasks), reading)
            ),
        ]
        for reading in report.readings
    ]
    effective = TextTable(
        header=["", *tasks, "all"],
        rows=kept,
        title="Effective length, tokens",
        caption=f"The longest length that keeps 85 percent of the accuracy above chance at {tokens_label(report.base)} "
        f"tokens. {NONE}: no more than chance there.",
        styles=styles,
    )
    title = f"Questions answered by choice: {report.provenance.checkpoint}"
    figure = paneled("retrieval", title, [_choice_panel(report, task) for task in tasks], across=2)
    details = [provenance_table(report.to_dict()["provenance"])]
    return Page(title, [*tables, effective, *retrieval_sentences(report), figure], details)


def retrieval_sentences(report: RetrievalReport) -> list[str]:
    """Return what each extension chooses at its greatest length beside the truncation, and how to read the tables."""
    truncated = next((reading for reading in report.readings if reading.reading == TRUNCATED), None)
    sentences = []
    for reading in report.readings:
        if truncated is None or reading.reading in (TRUNCATED, UNPATCHED):
            continue
        last = reading.only(length=reading.lengths[-1])
        other = truncated.only(length=reading.lengths[-1])
        points, margin = last.beyond(other), last.beyond(other, margin=True)
        if points is None or margin is None:
            continue
        sentences.append(
            f"{reading.label} at {tokens_label(reading.lengths[-1])} tokens: {last.score:.0f}% right, "
            f"{truncated.label} {other.score:.0f}%; difference {points.mean:+.0f} ± {points.standard_error:.0f} "
            f"points, and {margin} nats of margin, over the same texts."
        )
    whole = report.readings[0]
    texts, choices = len(whole.only(task=whole.tasks[0], length=whole.lengths[0]).trials), len(whole.trials[0].answers)
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


def _choices(cell: RetrievalResult) -> str:
    return f"{cell.score:.0f}%\n{cell.margin}" if cell.trials else NONE


def _kept(length: int | None) -> str:
    return NONE if length is None else tokens_label(length)


def _choice_panel(report: RetrievalReport, task: str) -> Panel:
    """Return the margin of right answers by length, one line per reading, within one standard error over texts."""
    lines = []
    for reading in report.readings:
        cells = [reading.only(task=task, length=length) for length in reading.lengths]
        margins = [cell.margin for cell in cells]
        points = [(cell.trials[0].length, margin.mean) for cell, margin in zip(cells, margins, strict=True)]
        band = [(each.mean - each.standard_error, each.mean + each.standard_error) for each in margins]
        lines.append(Line(reading.reading.split()[0], reading.label, points, band))
    lengths = _lengths(report)
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


def _share(reading: PasskeyResult) -> str:
    low, high = reading.interval
    return f"{reading.label} {reading.correct} of {len(reading.trials)} ({low:.0%} to {high:.0%})"


def _lengths(report: PasskeyReport | RulerReport | RetrievalReport) -> list[int]:
    return sorted({length for reading in report.readings for length in reading.lengths})


def _samples(report: RulerReport) -> str:
    """Return how many prompts there are of each task and length."""
    samples = {len(cell.trials) for reading in report.readings for cell in reading.cells.values()}
    return " to ".join(str(number) for number in sorted({min(samples), max(samples)}))


def _scores(reading: RulerResult) -> dict[tuple[str, int], float]:
    """Return scores by task, the average of the tasks included, and length."""
    scores = {place: cell.score for place, cell in reading.cells.items()}
    return scores | {(AVERAGE, length): score for length, score in reading.averages.items()}
