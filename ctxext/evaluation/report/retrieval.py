"""Passkeys and RULER in a terminal and as figures."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from ctxext.evaluation.labels import tokens_label
from ctxext.evaluation.passkey import PasskeyReport, PasskeyResult
from ctxext.evaluation.report.style import DASHED, INK, NOTE, plain_table, saved_figure, say
from ctxext.evaluation.ruler import RulerReport, RulerResult
from ctxext.evaluation.truncation import TRUNCATED

AVERAGE = "average"


def show_passkeys(report: PasskeyReport, console: Console) -> None:
    """Print what was found at each length, all depths together, and the sentences."""
    lengths = _lengths(report)
    console.print("\nKeys found of keys hidden (mean loss of the key's tokens, nats)\n")
    rows = [
        [one.label, *(_found_of_hidden(one.at(length)) if length in one.lengths else "-" for length in lengths)]
        for one in report.readings
    ]
    styles = {one.label: "dim" for one in report.readings if one.reading == TRUNCATED}
    console.print(plain_table(["", *map(tokens_label, lengths)], rows, styles))
    say(console, passkey_sentences(report))


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
    lengths = _lengths(report)
    for reading in report.readings:
        console.print(f"\n{reading.label}: score by task and tokens of prompt and reply, 0 to 100\n")
        names = (*reading.tasks, AVERAGE)
        shown = {(name, at): f"{one:.{1 if name == AVERAGE else 0}f}" for (name, at), one in _scores(reading).items()}
        rows = [[name, *(shown.get((name, length), "-") for length in lengths)] for name in names]
        console.print(plain_table(["", *map(tokens_label, lengths)], rows, {AVERAGE: "bold"}))
    say(console, ruler_sentences(report))


def ruler_sentences(report: RulerReport) -> list[str]:
    """The relative effective length of every reader, and what a reader of the table has to know."""
    told = [_effective(reading) for reading in report.readings]
    cells = [cell for reading in report.readings for cell in reading.cells]
    width = max(cell.interval[1] - cell.interval[0] for cell in cells) / 2
    told.append(
        "The relative effective length is the largest at which the average keeps 85 percent of its value at the "
        "shortest. It is not RULER's effective length, which asks for an average above 85.6."
    )
    told.append(
        f"{_samples(report)} prompts per task and length: a score may be off by {width:.0f} (95 percent)."
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


def _found_of_hidden(reading: PasskeyResult) -> str:
    return f"{sum(trial.correct for trial in reading.trials)}/{len(reading.trials)} ({reading.loss:.2f})"


# From vermilion (nothing found) over sand to blue (all found): told apart by colour-blind readers, and in grey by
# lightness on both sides of the middle.
SHADES = ("#C7522A", "#E5A583", "#F3E9D2", "#8DB8D6", "#1F6FA8")
CELL_WIDTH, CELL_HEIGHT = 0.74, 0.46
ACROSS = 4

# What stands in a cell of a heat map: its value from 0 to 1, a large line, and a small one below it.
Cell = tuple[float, str, str]


@dataclass(frozen=True, kw_only=True)
class HeatMaps:
    """A figure with one heat map per reading, lengths to the right.

    Args:
        title: one line.
        maps: of each reading its title, and its cells by row and length; what was not measured is missing.
        rows: their names, downwards, by what the cells know them by.
        rows_label: what the rows are; empty where their names say it.
        lengths: tokens.
        columns_label: what the lengths are of.
        trained_length: tokens; marked in the maps.
        note: below the maps.
        scale: names of the values 0, a half and 1.
        divider: rows above the wide line; None for no such line.
    """

    title: str
    maps: Sequence[tuple[str, Mapping[tuple[Any, int], Cell]]]
    rows: Mapping[Any, str]
    rows_label: str
    lengths: Sequence[int]
    columns_label: str
    trained_length: int
    note: str
    scale: tuple[str, str, str]
    divider: int | None = None


def save_passkey_figure(report: PasskeyReport, path: Path) -> None:
    """Draw one map per reading: depth of the key downwards, length to the right, and the answer's loss in each cell.

    Raises:
        InvalidParameterError: matplotlib is not installed.
    """
    maps = []
    for reading in report.readings:
        low, high = reading.interval
        cells = {
            (cell.depth, cell.length): (cell.accuracy, f"{cell.correct}/{cell.trials}", f"{cell.loss:.2f}")
            for cell in reading.cells
        }
        maps.append((f"{reading.label}: {reading.accuracy:.0%} found ({low:.0%} to {high:.0%})", cells))
    found = HeatMaps(
        title=f"Passkeys in {report.readings[0].haystack}: {report.provenance.checkpoint}",
        maps=maps,
        rows={
            depth: f"{100 * depth:.0f}%"
            for depth in sorted({depth for reading in report.readings for depth in reading.depths})
        },
        rows_label="depth of the key",
        lengths=_lengths(report),
        columns_label="tokens of prompt and answer",
        trained_length=report.trained_length,
        note="In each cell: keys found of keys hidden, and the mean loss of the key's tokens in nats.",
        scale=("none", "half", "all"),
    )
    _save(found, path)


def save_ruler_figure(report: RulerReport, path: Path) -> None:
    """Draw one map per reading: tasks and their average downwards, length to the right.

    Raises:
        InvalidParameterError: matplotlib is not installed.
    """
    tasks = report.readings[0].tasks
    maps = []
    for reading in report.readings:
        effective = reading.relative_effective_length
        reach = "0 at the shortest" if effective is None else f"keeps 85% to {tokens_label(effective)}"
        cells = {place: (score / 100, f"{score:.0f}", "") for place, score in _scores(reading).items()}
        maps.append((f"{reading.label}: {reach}", cells))
    found = HeatMaps(
        title=f"RULER: {report.provenance.checkpoint}",
        maps=maps,
        rows={name: name for name in (*tasks, AVERAGE)},
        rows_label="",
        lengths=_lengths(report),
        columns_label="tokens of prompt and reply",
        trained_length=report.trained_length,
        note=f"Scores from 0 to 100, {_samples(report)} prompts each"
        + (f"; hidden in {report.essay} in place of NVIDIA's essays." if report.essay else "."),
        scale=("0", "50", "100"),
        divider=len(tasks),
    )
    _save(found, path)


def _save(found: HeatMaps, path: Path) -> None:
    width = max(3.2, CELL_WIDTH * len(found.lengths))
    height = max(1.6, CELL_HEIGHT * len(found.rows))
    names = 0.085 * max(map(len, found.rows.values())) + (0.35 if found.rows_label else 0.1)
    across = min(ACROSS, len(found.maps))
    down = -(-len(found.maps) // across)
    size = (names + across * (width + 0.35) + 0.9, down * (height + 0.9) + 0.65)
    inside = sum(length <= found.trained_length for length in found.lengths)
    border = inside if inside < len(found.lengths) else 0  # 0 where there is none to draw
    with saved_figure(path, size, found.title) as figure:
        every = figure.subplots(down, across, squeeze=False, sharey=True)
        for axes, (title, cells) in zip(every.flat, found.maps, strict=False):
            image = _draw_cells(axes, found, cells)
            _draw_frame(axes, found, border)
            axes.set_title(title, loc="left", fontsize=10.5)
        for axes in every.flat[len(found.maps) :]:
            axes.axis("off")
        for axes in every[:, 0]:
            axes.set_ylabel(found.rows_label)
        bar = figure.colorbar(
            image, ax=list(every.flat), fraction=0.05, aspect=height / 0.15, pad=0.02, ticks=[0, 0.5, 1]
        )
        bar.ax.set_yticklabels(found.scale, fontsize=9)
        bar.outline.set_visible(False)
        bar.ax.tick_params(length=0)
        dashes = f" Dashed: the trained window ends, at {tokens_label(found.trained_length)}." if border else ""
        figure.supxlabel(found.note + dashes, x=0.012, ha="left", fontsize=8.5, color=NOTE)


def _draw_cells(axes: Any, found: HeatMaps, cells: Mapping[tuple[Any, int], Cell]) -> Any:
    import numpy as np
    from matplotlib.colors import LinearSegmentedColormap

    shades = LinearSegmentedColormap.from_list("found", SHADES).with_extremes(bad="#FAFAFA")
    values = np.full((len(found.rows), len(found.lengths)), np.nan)
    for (row, key), (column, length) in itertools.product(enumerate(found.rows), enumerate(found.lengths)):
        if (key, length) in cells:
            value, large, small = cells[key, length]
            values[row, column] = value
            text = {"ha": "center", "va": "center", "color": "white" if value < 0.15 or value > 0.85 else INK}
            axes.text(column, row - (0.14 if small else 0), large, fontsize=9.5, **text)
            axes.text(column, row + 0.25, small, fontsize=7.5, alpha=0.9, **text)
    return axes.imshow(values, cmap=shades, vmin=0, vmax=1, aspect="auto")


def _draw_frame(axes: Any, found: HeatMaps, border: int) -> None:
    axes.set_xticks(range(len(found.lengths)), [tokens_label(length) for length in found.lengths])
    axes.set_yticks(range(len(found.rows)), found.rows.values())
    axes.tick_params(length=0)
    axes.set_xlabel(found.columns_label)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
    for x in range(1, len(found.lengths)):
        axes.axvline(x - 0.5, color="white", lw=1.5)
    for y in range(1, len(found.rows)):
        axes.axhline(y - 0.5, color="white", lw=5.0 if y == found.divider else 1.5)
    if border:
        axes.axvline(border - 0.5, color=INK, lw=1.6, ls=DASHED)


def _lengths(report: PasskeyReport | RulerReport) -> list[int]:
    return sorted({length for reading in report.readings for length in reading.lengths})


def _samples(report: RulerReport) -> str:
    """How many prompts there are of each task and length."""
    samples = {cell.samples for reading in report.readings for cell in reading.cells}
    return " to ".join(str(number) for number in sorted({min(samples), max(samples)}))


def _scores(reading: RulerResult) -> dict[tuple[str, int], float]:
    """Scores by task, the tasks' average included, and length."""
    scores = {(cell.task, cell.length): cell.score for cell in reading.cells}
    return scores | {(AVERAGE, length): score for length, score in reading.averages.items()}
