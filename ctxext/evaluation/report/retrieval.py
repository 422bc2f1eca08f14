"""Retrieval in a terminal."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from ctxext.evaluation.labels import tokens_label
from ctxext.evaluation.passkey import PasskeyReport, PasskeyResult
from ctxext.evaluation.report.style import INK, STYLE, require_matplotlib
from ctxext.evaluation.ruler import RulerReport, RulerResult
from ctxext.evaluation.truncation import TRUNCATED

__all__ = [
    "passkey_sentences",
    "plain_table",
    "ruler_sentences",
    "save_passkey_figure",
    "save_ruler_figure",
    "show_passkeys",
    "show_ruler",
]


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


# From vermilion (nothing found) over sand to blue (all found): told apart by colour-blind readers, and in grey by
# lightness on both sides of the middle.
SHADES = ("#C7522A", "#E5A583", "#F3E9D2", "#8DB8D6", "#1F6FA8")
CELL_WIDTH, CELL_HEIGHT = 0.74, 0.46
ACROSS = 4


@dataclass(frozen=True)
class Map:
    """One map.

    Args:
        title: above it.
        values: 0 to 1 by row and column, None where nothing was measured.
        labels: what is written into each cell: a large and a small line.
    """

    title: str
    values: list[list[float | None]]
    labels: list[list[tuple[str, str]]]


def save_passkey_figure(report: PasskeyReport, path: Path) -> None:
    """Draw one map per reading: depth of the key downwards, length to the right, and the answer's loss in each cell.

    Raises:
        InvalidParameterError: matplotlib is not installed.
    """
    lengths = sorted({length for reading in report.readings for length in reading.lengths})
    depths = sorted({depth for reading in report.readings for depth in reading.depths})
    _save(
        [_passkey_panel(reading, lengths, depths) for reading in report.readings],
        path,
        title=f"Passkeys in {report.readings[0].haystack}: {report.provenance.checkpoint}",
        rows=[f"{100 * depth:.0f}%" for depth in depths],
        rows_label="depth of the key",
        lengths=lengths,
        columns_label="tokens of prompt and answer",
        trained_length=report.trained_length,
        note="In each cell: keys found of keys hidden, and the mean loss of the key's tokens in nats.",
        scale=("none", "half", "all"),
    )


def save_ruler_figure(report: RulerReport, path: Path) -> None:
    """Draw one map per reading: tasks and their average downwards, length to the right.

    Raises:
        InvalidParameterError: matplotlib is not installed.
    """
    lengths = sorted({length for reading in report.readings for length in reading.lengths})
    tasks = report.readings[0].tasks
    samples = {cell.samples for reading in report.readings for cell in reading.cells}
    several = f"{min(samples)}" if len(samples) == 1 else f"{min(samples)} to {max(samples)}"
    _save(
        [_ruler_panel(reading, lengths, tasks) for reading in report.readings],
        path,
        title=f"RULER: {report.provenance.checkpoint}",
        rows=[*tasks, "average"],
        rows_label="",
        lengths=lengths,
        columns_label="tokens of prompt and reply",
        trained_length=report.trained_length,
        note=f"Scores from 0 to 100, {several} prompts each"
        + (f"; hidden in {report.essay} in place of NVIDIA's essays." if report.essay else "."),
        scale=("0", "50", "100"),
        divider=len(tasks),
    )


def _passkey_panel(reading: PasskeyResult, lengths: Sequence[int], depths: Sequence[float]) -> Map:
    cells = {(cell.length, cell.depth): cell for cell in reading.cells}
    grid = [[cells.get((length, depth)) for length in lengths] for depth in depths]
    low, high = reading.interval
    return Map(
        f"{reading.label}: {reading.accuracy:.0%} found ({low:.0%} to {high:.0%})",
        [[cell.accuracy if cell else None for cell in row] for row in grid],
        [[(f"{cell.correct}/{cell.trials}", f"{cell.loss:.2f}") if cell else ("", "") for cell in row] for row in grid],
    )


def _ruler_panel(reading: RulerResult, lengths: Sequence[int], tasks: Sequence[str]) -> Map:
    scores = {(cell.task, cell.length): cell.score for cell in reading.cells}
    scores |= {("average", length): score for length, score in reading.averages.items()}
    grid = [[scores.get((task, length)) for length in lengths] for task in (*tasks, "average")]
    effective = reading.relative_effective_length
    reach = "0 at the shortest" if effective is None else f"keeps 85% to {tokens_label(effective)}"
    return Map(
        f"{reading.label}: {reach}",
        [[None if score is None else score / 100 for score in row] for row in grid],
        [[("", "") if score is None else (f"{score:.0f}", "") for score in row] for row in grid],
    )


def _save(
    panels: Sequence[Map],
    path: Path,
    *,
    title: str,
    rows: Sequence[str],
    rows_label: str,
    lengths: Sequence[int],
    columns_label: str,
    trained_length: int,
    note: str,
    scale: tuple[str, str, str],
    divider: int | None = None,
) -> None:
    require_matplotlib()
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    width = max(3.2, CELL_WIDTH * len(lengths))
    height = max(1.6, CELL_HEIGHT * len(rows))
    names = 0.085 * max(len(row) for row in rows) + (0.35 if rows_label else 0.1)
    across = min(ACROSS, len(panels))
    down = -(-len(panels) // across)
    with matplotlib.rc_context(STYLE):
        size = (names + across * (width + 0.35) + 0.9, down * (height + 0.9) + 0.65)
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        every = figure.subplots(down, across, squeeze=False, sharey=True)
        figure.suptitle(title, x=0.012, ha="left", fontsize=12, fontweight="bold")
        for axes, panel in zip(every.flat, panels, strict=False):
            image = _draw(axes, panel)
            _frame(axes, rows, lengths, columns_label, trained_length, divider)
            axes.set_title(panel.title, loc="left", fontsize=10.5)
        for axes in every.flat[len(panels) :]:
            axes.axis("off")
        for axes in every[:, 0]:
            axes.set_ylabel(rows_label)
        bar = figure.colorbar(
            image, ax=list(every.flat), fraction=0.05, aspect=height / 0.15, pad=0.02, ticks=[0, 0.5, 1]
        )
        bar.ax.set_yticklabels(scale, fontsize=9)
        bar.outline.set_visible(False)
        bar.ax.tick_params(length=0)
        figure.supxlabel(
            note + _window_note(lengths, trained_length), x=0.012, ha="left", fontsize=8.5, color="#777777"
        )
        figure.savefig(path, dpi=160)


def _draw(axes: Any, panel: Map) -> Any:
    import numpy as np
    from matplotlib.colors import LinearSegmentedColormap

    shades = LinearSegmentedColormap.from_list("found", SHADES).with_extremes(bad="#FAFAFA")
    values = np.array([[np.nan if value is None else value for value in row] for row in panel.values], dtype=float)
    image = axes.imshow(values, cmap=shades, vmin=0, vmax=1, aspect="auto")
    for row, column in itertools.product(*map(range, values.shape)):
        value = values[row, column]
        colour = "white" if value < 0.15 or value > 0.85 else INK
        large, small = panel.labels[row][column]
        axes.text(column, row - (0.14 if small else 0), large, ha="center", va="center", fontsize=9.5, color=colour)
        axes.text(column, row + 0.25, small, ha="center", va="center", fontsize=7.5, color=colour, alpha=0.9)
    return image


def _frame(
    axes: Any,
    rows: Sequence[str],
    lengths: Sequence[int],
    columns_label: str,
    trained_length: int,
    divider: int | None,
) -> None:
    axes.set_xticks(range(len(lengths)), [tokens_label(length) for length in lengths])
    axes.set_yticks(range(len(rows)), rows)
    axes.tick_params(length=0)
    axes.set_xlabel(columns_label)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
    for x in range(1, len(lengths)):
        axes.axvline(x - 0.5, color="white", lw=1.5)
    for y in range(1, len(rows)):
        axes.axhline(y - 0.5, color="white", lw=5.0 if y == divider else 1.5)
    if inside := _inside(lengths, trained_length):
        axes.axvline(inside - 0.5, color=INK, lw=1.6, ls=(0, (3, 1.5)))


def _inside(lengths: Sequence[int], trained_length: int) -> int:
    """How many of the lengths the trained window holds; 0 where there is no border to draw."""
    inside = sum(length <= trained_length for length in lengths)
    return inside if inside < len(lengths) else 0


def _window_note(lengths: Sequence[int], trained_length: int) -> str:
    if not _inside(lengths, trained_length):
        return ""
    return f" Dashed: the trained window ends, at {tokens_label(trained_length)}."
