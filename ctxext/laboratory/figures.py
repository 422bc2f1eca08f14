"""Figures of the laboratory: loss by position over the trained length, and what was right by length."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from ctxext.evaluation.labels import label_of
from ctxext.evaluation.report.figures import BAND, COLOURS, INK, NOTE, Figure, draw_grid
from ctxext.laboratory.result import LabReading, LabResult, blocks_of, over_seeds
from ctxext.laboratory.subjects import ROPE
from ctxext.laboratory.tasks import MULTIPLES, REACH, TASKS, TEXT

CLASSIC = ("sinusoidal", "learned", "t5_bias", ROPE, "alibi", "nope")
"""The kinds that textbooks compare."""
# A hue, a dash and a mark each, so that no line is known by its hue alone: as many as can be told apart in a panel.
LOOKS: tuple[tuple[str, Any, str], ...] = (
    (COLOURS["unpatched"], "-", "o"),
    (COLOURS["yarn"], "-", "s"),
    (COLOURS["ntk"], (0, (5, 1.5)), "^"),
    (COLOURS["dynamic_ntk"], (0, (2, 1.2)), "D"),
    (COLOURS["dynamic_yarn"], (0, (6, 1.5, 1.5, 1.5)), "v"),
    (COLOURS["ntk_by_parts"], (0, (1, 1)), "P"),
    (COLOURS["truncated"], (0, (4, 1, 1, 1, 1, 1)), "X"),
)
FIRST = 2  # blocks at the very beginning, where no model knows anything, may leave the scale
# Drawn in every panel, to compare panels by.
GREY: dict[str, tuple[str, Any]] = {ROPE: (NOTE, "-"), "alibi": (NOTE, (0, (3, 2)))}

Panel = tuple[str, Sequence[LabReading], Sequence[LabReading]]
"""Title, readings in colour, and readings in grey to compare panels by."""
Curve = tuple[Sequence[float], Sequence[float], Sequence[float]]
"""Middles of blocks over the trained length, the mean loss there, and its standard error over seeds."""


def name_of(reading: LabReading) -> str:
    """Return the label of a reading's subject and of its extension."""
    return " + ".join(label_of(part) for part in reading.name.split(" + "))


def figures(result: LabResult) -> list[Figure]:
    """Return all figures of a result."""
    drawn = [_by_position(result)] if TEXT in result.tasks else []
    return [*drawn, *([_by_length(result)] if result.puzzles else [])]


def _panels(result: LabResult) -> list[Panel]:
    """Sort readings on text into panels: classic kinds, extensions of rotation, other encodings, recurrent models."""
    readings = result.of(TEXT)
    groups = {
        "What textbooks compare": [reading for reading in readings if reading.name in CLASSIC],
        "RoPE, extended without training": [reading for reading in readings if reading.subject == ROPE],
        "Newer encodings": [
            reading for reading in readings if reading.kind == "encoding" and reading.name not in CLASSIC
        ],
        "Recurrent models, which need no positions": [reading for reading in readings if reading.kind == "recurrent"],
    }
    panels: list[Panel] = []
    for title, group in groups.items():
        count = math.ceil(len(group) / len(LOOKS))
        for place in range(count):
            part = group[place * len(group) // count : (place + 1) * len(group) // count]
            panels.append(
                (title, part, [reading for reading in readings if reading.name in GREY and reading not in part])
            )
    return panels


def _by_position(result: LabResult) -> Figure:
    panels, readings = _panels(result), result.of(TEXT)
    ends = "; ".join(
        f"{name_of(reading)} {result.at(reading, 1).mean():.2f} and {result.at(reading, REACH).mean():.2f}"
        for reading in readings
    )
    seeds = max(len(reading.seeds) for reading in readings)
    band = f" Bands: one standard error over {seeds} seeds." if seeds > 1 else ""
    return Figure(
        name="loss-by-position",
        title="Loss by position over the trained length",
        caption=f"Nats per byte, by where a byte stands; the line marks the trained length, {result.trained} bytes."
        f"{band} RoPE and ALiBi in grey stand in every panel. What is off the scale is named with its last value.",
        alternative=f"Loss inside the trained length and at {REACH} times it, in nats per byte: {ends}.",
        size=(10.4, 0.3 + 3.5 * math.ceil(len(panels) / 2)),
        draw=lambda figure: _draw_positions(
            figure, panels, {reading.name: _curve(result, reading) for reading in readings}
        ),
    )


def _curve(result: LabResult, reading: LabReading) -> Curve:
    edges = blocks_of(result.trained)
    x = [math.sqrt(max(start, stop / 2) * stop) / result.trained for start, stop in itertools.pairwise(edges)]
    means = [over_seeds(reading.values[:, :, place]) for place in range(len(x))]
    return x, [mean for mean, _ in means], [error or 0.0 for _, error in means]


def _draw_positions(figure: Any, panels: Sequence[Panel], curves: dict[str, Curve]) -> None:
    columns = min(2, len(panels))
    grid = figure.subplots(math.ceil(len(panels) / 2), columns, squeeze=False, sharex=True, sharey=True)
    # From the best to a little above what RoPE reaches beyond its window, so that a catastrophe hides nothing.
    low = min(y for _, losses, _ in curves.values() for y in losses[FIRST:])
    plain = sorted(y for name, curve in curves.items() if " + " not in name for y in curve[1][2 * FIRST :])
    high = plain[int(0.97 * (len(plain) - 1))]
    low, high = low - 0.05 * (high - low), high + 0.08 * (high - low)
    named = max(math.ceil(len([*lines, *references]) / 3) for _, lines, references in panels)
    for axes, panel in zip(grid.flat, panels, strict=False):
        _draw_panel(axes, panel, curves, high, named)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_visible(False)
    grid[0, 0].set_xticks([1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8], ["1/8", "1/4", "1/2", "1", "2", "4", "8"])
    grid[0, 0].set_ylim(low, high)
    for axes in grid[:, 0]:
        axes.set_ylabel("nats per byte")
    for axes in list(grid.flat)[max(0, len(panels) - columns) : len(panels)]:
        axes.set_xlabel("position / trained length")
        axes.tick_params(labelbottom=True)


def _draw_panel(axes: Any, panel: Panel, curves: dict[str, Curve], high: float, named: int) -> None:
    """Draw one panel; ``named`` lines of names fit between its title and its axes."""
    title, lines, references = panel
    axes.set_xscale("log", base=2)
    axes.set_xlim(1 / 8, REACH)
    axes.axvspan(1 / 8, 1, color=BAND, lw=0, zorder=0)
    axes.axvline(1, color=INK, lw=1.1, zorder=2)
    axes.minorticks_off()
    for reading, (colour, dashes, mark) in zip(lines, LOOKS, strict=False):
        x, y, error = curves[reading.name]
        if any(error):
            lower, upper = ([mean + side * e for mean, e in zip(y, error, strict=True)] for side in (-1, 1))
            axes.fill_between(x, lower, upper, color=colour, alpha=0.16, lw=0, zorder=3)
        name = f"+ {label_of(reading.extension)}" if reading.extension else name_of(reading)
        label = name + (f" (up to {max(y[FIRST:]):.1f})" if max(y[FIRST:]) > high else "")
        axes.plot(x, y, color=colour, ls=dashes, lw=1.7, marker=mark, ms=4, markevery=(2, 3), label=label, zorder=4)
    for reading in references:
        x, y, _ = curves[reading.name]
        colour, dashes = GREY[reading.name]
        axes.plot(x, y, color=colour, ls=dashes, lw=1.1, label=name_of(reading), zorder=2.5)
    # Above the axes, where it hides no line; the title stands above it and makes the room for it.
    legend = axes.legend(
        frameon=False, fontsize=8.5, loc="lower left", bbox_to_anchor=(-0.01, 0.985), ncols=3, handlelength=3.2,
        columnspacing=1.0, labelspacing=0.25, borderpad=0.1,
    )  # fmt: skip
    legend.set_in_layout(False)
    draw_grid(axes)
    axes.set_title(title, loc="left", fontsize=10.5, pad=5 + 13.2 * named)


def _by_length(result: LabResult) -> Figure:
    readings: dict[str, list[LabReading]] = {}
    for reading in result.readings:
        if reading.task != TEXT:
            readings.setdefault(reading.name, []).append(reading)
    names = sorted(readings, key=lambda name: -result.reciprocal_rank(name))  # the best first
    shares = "; ".join(
        f"{name_of(readings[name][0])}: "
        + ", ".join(
            f"{reading.task} {result.at(reading, 1).mean():.0%} and {result.at(reading, REACH).mean():.0%}"
            for reading in readings[name]
        )
        for name in names
    )
    return Figure(
        name="right-by-length",
        title="What is right, by length",
        caption="Percent of the answers, dark: all, light: as many as chance gives; the mean of all seeds. Left of the "
        "rule: lengths of training. The best in the mean over tasks and longer lengths stands first (mean reciprocal "
        "rank, in brackets).",
        alternative=f"Percent right at the trained length and at {REACH} times it. {shares}.",
        size=(2.4 + 1.75 * len(result.puzzles), 1.15 + 0.215 * len(names)),
        draw=lambda figure: _draw_lengths(figure, result, [readings[name][0] for name in names]),
    )


def _draw_lengths(figure: Any, result: LabResult, rows: Sequence[LabReading]) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    shades = LinearSegmentedColormap.from_list("right", ["#F7F4EC", "#9CC7E3", "#1B5A93"])
    grid = figure.subplots(1, len(result.puzzles), squeeze=False, sharey=True)[0]
    for axes, task in zip(grid, result.puzzles, strict=True):
        chance = TASKS[task].chance
        above = [[math.nan] * len(MULTIPLES) for _ in rows]
        for row, subject in enumerate(rows):
            reading = result.find(task, subject.name)
            if reading is None:
                continue
            for column, multiple in enumerate(MULTIPLES):
                share = result.at(reading, multiple).mean().item()
                above[row][column] = max(0.0, (share - chance) / (1 - chance))
                ink = "#FDFDFD" if above[row][column] > 0.75 else "#1A1A1A"
                axes.text(column, row, f"{100 * share:.0f}", ha="center", va="center", fontsize=8, color=ink)
        axes.imshow(above, cmap=shades, vmin=0, vmax=1, aspect="auto")
        axes.axvline(1.5, color=INK, lw=1.4)
        axes.set_xticks(range(len(MULTIPLES)), [f"{multiple:g}" for multiple in MULTIPLES], fontsize=8.5)
        axes.xaxis.tick_top()
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_title(task, fontsize=10.5, loc="left", pad=6)
    labels = [f"{name_of(reading)} ({result.reciprocal_rank(reading.name):.2f})" for reading in rows]
    grid[0].set_yticks(range(len(rows)), labels, fontsize=9)
    figure.supxlabel("length / trained length", fontsize=9, color=NOTE)
