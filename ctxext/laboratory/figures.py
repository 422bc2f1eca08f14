"""The pictures of the laboratory: loss by position over the trained length, and what was right by length."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ctxext.evaluation.labels import label_of
from ctxext.evaluation.report.style import BAND, COLOURS, INK, NOTE, Drawing, draw_grid
from ctxext.laboratory.result import LabReading, LabResult, blocks_of, over_seeds
from ctxext.laboratory.subjects import ROPE
from ctxext.laboratory.tasks import MULTIPLES, REACH, TEXT

CLASSIC = ("sinusoidal", "learned", "t5_bias", ROPE, "alibi", "nope")
"""The kinds that textbooks compare."""
LINES = 7  # in one panel: more cannot be told apart
# A hue, a dash and a mark each, so that no line is told by its hue alone.
LOOKS: tuple[tuple[str, Any, str], ...] = (
    (COLOURS["unpatched"], "-", "o"),
    (COLOURS["yarn"], "-", "s"),
    (COLOURS["ntk"], (0, (5, 1.5)), "^"),
    (COLOURS["dynamic_ntk"], (0, (2, 1.2)), "D"),
    (COLOURS["dynamic_yarn"], (0, (6, 1.5, 1.5, 1.5)), "v"),
    (COLOURS["ntk_by_parts"], (0, (1, 1)), "P"),
    (COLOURS["truncated"], (0, (4, 1, 1, 1, 1, 1)), "X"),
)
FIRST = 2  # blocks at the very beginning, where everybody knows nothing, may leave the scale
# Drawn in every panel, the same way, to compare panels by.
GREY: dict[str, tuple[str, Any]] = {ROPE: (NOTE, "-"), "alibi": (NOTE, (0, (3, 2)))}


def name_of(reading: LabReading) -> str:
    """As a reader knows it."""
    return " + ".join(label_of(part) for part in reading.name.split(" + "))


def drawings(result: LabResult) -> list[Drawing]:
    """All figures of a result."""
    found = [_by_position(result)] if TEXT in result.tasks else []
    return [*found, *([_by_length(result)] if result.puzzles else [])]


# Loss by position


@dataclass(frozen=True)
class Panel:
    """One part of a figure.

    Args:
        title: one line.
        references: in grey, to compare panels by.
        lines: who it is about.
    """

    title: str
    references: list[LabReading]
    lines: list[LabReading]


def _panels(result: LabResult) -> list[Panel]:
    """Who is drawn where: the classic kinds, extensions of rotation, other encodings, models that need none."""
    readings = result.of(TEXT)
    groups = {
        "What textbooks compare": [one for one in readings if one.name in CLASSIC],
        "RoPE, extended without training": [one for one in readings if one.subject == ROPE],
        "Newer encodings": [one for one in readings if one.kind == "encoding" and one.name not in CLASSIC],
        "Recurrent models, which need no positions": [one for one in readings if one.kind == "recurrent"],
    }
    same = [one for one in readings if one.name in GREY]
    return [
        Panel(title, [one for one in same if one not in part], part)
        for title, group in groups.items()
        if group
        for part in _parts(group)
    ]


def _parts(group: list[LabReading]) -> Iterator[list[LabReading]]:
    """A group in as many equal parts as panels hold."""
    count = math.ceil(len(group) / LINES)
    for place in range(count):
        yield group[place * len(group) // count : (place + 1) * len(group) // count]


def _by_position(result: LabResult) -> Drawing:
    panels = _panels(result)
    told = "; ".join(
        f"{name_of(one)} {result.at(one, 1).mean():.2f} and {result.at(one, REACH).mean():.2f}"
        for one in result.of(TEXT)
    )
    seeds = max(len(one.seeds) for one in result.of(TEXT))
    band = f" Bands: one standard error over {seeds} seeds." if seeds > 1 else ""
    rows = math.ceil(len(panels) / 2)
    return Drawing(
        name="loss-by-position",
        title="Loss by position over the trained length",
        caption=f"Nats per byte, by where a byte stands; the line marks the trained length, {result.trained} bytes."
        f"{band} RoPE and ALiBi in grey stand in every panel. What is off the scale is named with its last value.",
        alternative=f"Loss inside the trained length and at {REACH} times it, in nats per byte: {told}.",
        size=(10.4, 0.3 + 3.5 * rows),
        draw=lambda figure: _draw_positions(figure, result, panels),
    )


def _curve(result: LabResult, reading: LabReading) -> tuple[list[float], list[float], list[float]]:
    """Middles of the blocks over the trained length, the mean loss there and its standard error over seeds."""
    edges = blocks_of(result.trained)
    x = [math.sqrt(max(start, stop / 2) * stop) / result.trained for start, stop in itertools.pairwise(edges)]
    found = [over_seeds(reading.values[:, :, place]) for place in range(len(x))]
    return x, [mean for mean, _ in found], [error or 0.0 for _, error in found]


def _draw_positions(figure: Any, result: LabResult, panels: Sequence[Panel]) -> None:
    columns = min(2, len(panels))
    grid = figure.subplots(math.ceil(len(panels) / 2), columns, squeeze=False, sharex=True, sharey=True)
    low, high = _limits(result)
    named = max(math.ceil(len([*panel.lines, *panel.references]) / 3) for panel in panels)
    for axes, panel in zip(grid.flat, panels, strict=False):
        _draw_panel(axes, result, panel, (low, high), named)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_visible(False)
    ticks = [1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8]
    grid[0, 0].set_xticks(ticks, ["1/8", "1/4", "1/2", "1", "2", "4", "8"])
    grid[0, 0].set_ylim(low, high)
    for axes in grid[:, 0]:
        axes.set_ylabel("nats per byte")
    last = list(grid.flat)[max(0, len(panels) - columns) : len(panels)]
    for axes in last:
        axes.set_xlabel("position / trained length")
        axes.tick_params(labelbottom=True)


def _limits(result: LabResult) -> tuple[float, float]:
    """From the best to a little above what RoPE reaches beyond its window, so that a catastrophe hides nothing."""
    inside = [y for one in result.of(TEXT) for y in _curve(result, one)[1][FIRST:]]
    plain = [y for one in result.of(TEXT) if not one.extension for y in _curve(result, one)[1][2 * FIRST :]]
    low = min(inside)
    ordered = sorted(plain)
    high = ordered[int(0.97 * (len(ordered) - 1))]
    return low - 0.05 * (high - low), high + 0.08 * (high - low)


def _draw_panel(axes: Any, result: LabResult, panel: Panel, limits: tuple[float, float], named: int) -> None:
    """One panel; ``named`` lines of names fit between its title and its axes."""
    axes.set_xscale("log", base=2)
    axes.set_xlim(1 / 8, REACH)
    axes.axvspan(1 / 8, 1, color=BAND, lw=0, zorder=0)
    axes.axvline(1, color=INK, lw=1.1, zorder=2)
    axes.minorticks_off()
    for reading, (colour, dashes, mark) in zip(panel.lines, LOOKS, strict=False):
        x, y, error = _curve(result, reading)
        if any(error):
            spread = list(zip(y, error, strict=True))
            lower, upper = [mean - one for mean, one in spread], [mean + one for mean, one in spread]
            axes.fill_between(x, lower, upper, color=colour, alpha=0.16, lw=0, zorder=3)
        own = f"+ {label_of(reading.extension)}" if reading.extension else name_of(reading)
        label = own + (f" (up to {max(y[FIRST:]):.1f})" if max(y[FIRST:]) > limits[1] else "")
        axes.plot(x, y, color=colour, ls=dashes, lw=1.7, marker=mark, ms=4, markevery=(2, 3), label=label, zorder=4)
    for reading in panel.references:
        x, y, _ = _curve(result, reading)
        colour, dashes = GREY[reading.name]
        axes.plot(x, y, color=colour, ls=dashes, lw=1.1, label=name_of(reading), zorder=2.5)
    # Above the axes, where it hides no line; the title stands above it and makes the room for it.
    legend = axes.legend(
        frameon=False, fontsize=8.5, loc="lower left", bbox_to_anchor=(-0.01, 0.985), ncols=3, handlelength=3.2,
        columnspacing=1.0, labelspacing=0.25, borderpad=0.1,
    )  # fmt: skip
    legend.set_in_layout(False)
    draw_grid(axes)
    axes.set_title(panel.title, loc="left", fontsize=10.5, pad=5 + 13.2 * named)


# Accuracy by length


def _by_length(result: LabResult) -> Drawing:
    names = _ordered(result)
    readings = {name: [one for one in result.readings if one.task != TEXT and one.name == name] for name in names}
    told = "; ".join(
        f"{name_of(found[0])}: "
        + ", ".join(
            f"{one.task} {result.at(one, 1).mean():.0%} and {result.at(one, REACH).mean():.0%}" for one in found
        )
        for found in readings.values()
    )
    return Drawing(
        name="right-by-length",
        title="What is right, by length",
        caption="Percent of the answers, dark: all, light: as many as chance gives; the mean of all seeds. Left of the "
        "rule: lengths of training. The best in the mean over tasks and longer lengths stands first (mean reciprocal "
        "rank, in brackets).",
        alternative=f"Percent right at the trained length and at {REACH} times it. {told}.",
        size=(2.4 + 1.75 * len(result.puzzles), 1.15 + 0.215 * len(names)),
        draw=lambda figure: _draw_lengths(figure, result, names),
    )


def _ordered(result: LabResult) -> list[str]:
    """Who did puzzles, the best first."""
    names = dict.fromkeys(one.name for one in result.readings if one.task != TEXT)
    return sorted(names, key=lambda name: -result.reciprocal_rank(name))


def _draw_lengths(figure: Any, result: LabResult, names: Sequence[str]) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    from ctxext.laboratory.tasks import TASKS

    shades = LinearSegmentedColormap.from_list("right", ["#F7F4EC", "#9CC7E3", "#1B5A93"])
    grid = figure.subplots(1, len(result.puzzles), squeeze=False, sharey=True)[0]
    shown = [next(one for one in result.readings if one.task != TEXT and one.name == name) for name in names]
    for axes, task in zip(grid, result.puzzles, strict=True):
        for row, name in enumerate(names):
            reading = result.find(task, name)
            for column, multiple in enumerate(MULTIPLES if reading else ()):
                assert reading is not None
                share = result.at(reading, multiple).mean().item()
                above = max(0.0, (share - TASKS[task].chance) / (1 - TASKS[task].chance))
                _draw_cell(axes, column, row, share, above, shades)
        axes.axvline(1.5, color=INK, lw=1.4)
        axes.set_xlim(-0.5, len(MULTIPLES) - 0.5)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set_xticks(range(len(MULTIPLES)), [f"{one:g}" for one in MULTIPLES], fontsize=8.5)
        axes.xaxis.tick_top()
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_title(task, fontsize=10.5, loc="left", pad=6)
    labels = [f"{name_of(one)} ({result.reciprocal_rank(one.name):.2f})" for one in shown]
    grid[0].set_yticks(range(len(names)), labels, fontsize=9)
    figure.supxlabel("length / trained length", fontsize=9, color=NOTE)


def _draw_cell(axes: Any, column: int, row: int, share: float, above: float, shades: Any) -> None:
    """A cell with its own ground and number, which are the same in a light and in a dark theme."""
    axes.pcolormesh(
        [column - 0.5, column + 0.5], [row - 0.5, row + 0.5], [[above]], cmap=shades, vmin=0, vmax=1,
        edgecolors="white", linewidth=0.6,
    )  # fmt: skip
    ink = "#FDFDFD" if above > 0.75 else "#1A1A1A"
    axes.text(column, row, f"{100 * share:.0f}", ha="center", va="center", fontsize=8, color=ink)
