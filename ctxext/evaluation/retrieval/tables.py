"""Retrieval in a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from ctxext.evaluation._plots import tokens_label
from ctxext.evaluation.passkey import PasskeyReport, PasskeyResult
from ctxext.evaluation.ruler import RulerReport, RulerResult
from ctxext.evaluation.truncation import TRUNCATED

__all__ = ["passkey_sentences", "plain_table", "ruler_sentences", "show_passkeys", "show_ruler"]


def show_passkeys(report: PasskeyReport, console: Console) -> None:
    """Print what was found at each length, all depths together, and the sentences."""
    lengths = sorted({length for reading in report.readings for length in reading.lengths})
    console.print("\nKeys found of keys hidden (mean loss of the key's tokens, nats)\n")
    rows = [
        [one.label, *(_cell(one.at(length)) if length in one.lengths else "-" for length in lengths)]
        for one in report.readings
    ]
    last = next((one.label for one in report.readings if one.reading == TRUNCATED), "")
    console.print(plain_table(["", *map(tokens_label, lengths)], rows, {last: "dim"}))
    _say(console, passkey_sentences(report))


def passkey_sentences(report: PasskeyReport) -> list[str]:
    """What every reader found beyond the trained window, or inside it where nothing goes beyond."""
    longest = max(length for reading in report.readings for length in reading.lengths)
    beyond = longest > report.trained_length
    span = (report.trained_length + 1, longest) if beyond else (0, longest)
    found = [reading.between(*span) for reading in report.readings]
    where = "Beyond" if beyond else "Within"
    counted = "; ".join(_share(reading) for reading in found if reading.trials)
    return [f"{where} the trained {tokens_label(report.trained_length)} tokens, found: {counted}."]


def show_ruler(report: RulerReport, console: Console) -> None:
    """Print scores by task and length for every reader, and the sentences."""
    lengths = sorted({length for reading in report.readings for length in reading.lengths})
    for reading in report.readings:
        console.print(f"\n{reading.label}: score by task and tokens of prompt and reply, 0 to 100\n", markup=False)
        scores = {(cell.task, cell.length): f"{cell.score:.0f}" for cell in reading.cells}
        scores |= {("average", length): f"{score:.1f}" for length, score in reading.averages.items()}
        rows = [
            [task, *(scores.get((task, length), "-") for length in lengths)] for task in (*reading.tasks, "average")
        ]
        console.print(plain_table(["", *map(tokens_label, lengths)], rows, {"average": "bold"}))
    _say(console, ruler_sentences(report))


def ruler_sentences(report: RulerReport) -> list[str]:
    """The relative effective length of every reader, and what a reader of the table has to know."""
    told = [_effective(reading) for reading in report.readings]
    cells = [cell for reading in report.readings for cell in reading.cells]
    samples = sorted({cell.samples for cell in cells})
    width = max(cell.interval[1] - cell.interval[0] for cell in cells) / 2
    told.append(
        "The relative effective length is the largest at which the average keeps 85 percent of its value at the "
        "shortest. It is not RULER's effective length, which asks for an average above 85.6."
    )
    told.append(
        f"{' to '.join(map(str, sorted({samples[0], samples[-1]})))} prompts per task and length: a score may be off "
        f"by {width:.0f} (95 percent)."
        + (f" Things are hidden in {report.essay}, where NVIDIA uses one author's essays." if report.essay else "")
    )
    empty = sum(cell.empty for cell in cells)
    if empty:
        told.append(f"{empty} of {sum(cell.samples for cell in cells)} replies are empty.")
    told += [f"Not measured: {task}: {reason}." for task, reason in report.left_out.items()]
    return told


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
    correct = sum(trial.correct for trial in reading.trials)
    low, high = reading.interval
    return f"{reading.label} {correct} of {len(reading.trials)} ({low:.0%} to {high:.0%})"


def _cell(reading: PasskeyResult) -> str:
    return f"{sum(trial.correct for trial in reading.trials)}/{len(reading.trials)} ({reading.loss:.2f})"


def plain_table(header: Sequence[str], rows: Sequence[Sequence[str]], styles: Mapping[str, str] | None = None) -> Table:
    """A table whose first column is text and whose others are numbers.

    Args:
        header: above the columns.
        rows: cells.
        styles: of rows, by their first cell.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 0, 0, 1))
    for index, name in enumerate(header):
        table.add_column(name, justify="right" if index else "left", overflow="fold")
    for row in rows:
        table.add_row(*row, style=(styles or {}).get(row[0]))
    return table


def _say(console: Console, sentences: Sequence[str]) -> None:
    console.print()
    for sentence in sentences:
        console.print(Padding(f"- {sentence}", (0, 0, 0, 2), expand=False), markup=False)
