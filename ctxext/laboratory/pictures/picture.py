"""A picture: numbers for programs, a sentence, and panels of lines, heat or bars that draw these numbers alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ctxext.evaluation.report.figures import INK, NOTE, Panel, Strokes, draw_grid, paneled

# Hues of Okabe and Ito, told apart under every common colour blindness, by their meaning in every picture.
BEFORE, AFTER, UNSEEN = "#E69F00", "#0072B2", "#F4F4F4"
GRADED = "cividis"  # made for colour-blind readers: dark to light, blue to yellow
DEEPER = "YlGnBu"  # light for none or near, dark for much or far
DIVERGING = "PuOr"  # orange below zero, violet above, told apart under every common colour blindness
POINTS = 400  # distances that a curve is drawn through
SIGNIFICANT = 6  # digits of a number for programs

Colour = str | float
"""Name of a colour, or its place from 0 to 1 among the graded ones."""
Numbers = dict[str, Any]
"""Numbers and tensors by name, which a picture shows."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Picture:
    """Numbers of a method, and the panels that draw them.

    Args:
        kind: Name of the drawn quantity, a word.
        sentence: Title, which says what the picture shows to a reader who cannot see it.
        caption: Way to read the panels.
        values: Numbers and tensors by name, for programs.
        across: Number of panels in a row.
    """

    kind: str
    sentence: str
    caption: str
    values: Mapping[str, Any]
    panels: Sequence[Panel]
    across: int = 3

    @property
    def numbers(self) -> dict[str, Any]:
        """Numbers of the picture in plain values that JSON has."""
        return {"kind": self.kind, **as_numbers(self.values)}

    def save(self, path: Path) -> None:
        """Write a PNG with the sentence as its title.

        Raises:
            InvalidParameterError: matplotlib is not installed.
        """
        paneled(self.kind, self.sentence, self.panels, across=self.across).save(path)


class Curve(NamedTuple):
    """Line of a panel, with keyword arguments of matplotlib for its look."""

    x: Sequence[float] | Tensor
    y: Float[Tensor, " points"]
    colour: Colour
    look: Mapping[str, Any] = {}


def as_numbers(value: Any) -> Any:
    """Return dataclasses and tensors as plain values that JSON has; NaN becomes None."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: as_numbers(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Tensor):
        return _rounded(value) if value.is_floating_point() else value.tolist()
    if isinstance(value, dict):
        return {key: as_numbers(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [as_numbers(part) for part in value]
    return value


def _rounded(values: Tensor) -> Any:
    """Return lists of numbers of a few digits: all rounded at once, since a matrix has many."""
    values = values.detach().cpu().double()
    size = values.abs().where(values.isfinite() & (values != 0), 1.0).log10().floor()
    scale = torch.tensor([10.0**digits for digits in range(21)], dtype=torch.float64)
    scale = scale[(SIGNIFICANT - 1 - size).nan_to_num().clamp(0, 20).long()]
    rounded = ((values * scale).round() / scale).tolist()
    return _without_nan(rounded) if bool(values.isnan().any()) else rounded


def _without_nan(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nan(part) for part in value]
    return None if value != value else value


def distances_to(length: int) -> Int[Tensor, " distances"]:
    """Return 0, 1 and on to ``length - 1``: every small distance, then each larger by the same ratio."""
    steps = torch.linspace(0, math.log(max(length - 1, 1)), POINTS, dtype=torch.float64)
    return torch.tensor([0, *dict.fromkeys(steps.exp().round().long().tolist())])


def lines(
    title: str,
    curves: Sequence[Curve],
    *,
    size: tuple[float, float],
    x: str = "tokens between query and key",
    y: str,
    grid: str = "y",
    longest: int | None = None,
    trained: int | None = None,
    legend: str = "",
    then: Strokes = lambda axes: None,
) -> Panel:
    """Return a panel of curves, over distances up to ``longest`` where that is given."""

    def draw(axes: Any) -> None:
        for curve in curves:
            axes.plot([*map(float, curve.x)], curve.y.tolist(), color=_hue(curve.colour), **curve.look)
        then(axes)
        if longest is not None:
            _tokens_axis(axes, longest)
        name_axes(axes, title, x=x, y=y, grid=grid)
        if trained is not None:
            _mark_trained(axes, trained, above="lower" in legend)
        if legend:
            axes.legend(fontsize=8.5, frameon=False, loc=legend)

    return Panel(draw, size=size)


def heat(
    title: str,
    values: Float[Tensor, "row column"],
    *,
    size: tuple[float, float],
    shades: str,
    scale: tuple[float, float],
    power: float = 1.0,
    beyond: str | None = None,
    x: str = "",
    y: str = "",
    bar: Mapping[str, Any] | None = None,
    panels: int = 1,
    cells: tuple[str, float, float] | None = None,
    then: Strokes = lambda axes: None,
    **image: Any,
) -> Panel:
    """Return a panel with a colour for each number of a matrix.

    Args:
        scale: Least and greatest number that have a colour.
        power: Exponent of the scale: below 1 small numbers are told apart better.
        beyond: Colour of greater numbers.
        bar: Label and look of the scale of colours; None where another panel has it.
        panels: Panels, this one the last, that share the scale of colours.
        cells: Format of the number in each cell, value above which its ink is white, and size of its letters.
    """

    def draw(axes: Any) -> None:
        from matplotlib import colormaps
        from matplotlib.colors import PowerNorm

        colours = colormaps[shades].with_extremes(over=beyond, bad=(0, 0, 0, 0))
        norm = PowerNorm(power, *scale)
        shown = axes.imshow(values.numpy(), cmap=colours, norm=norm, interpolation="nearest", **image)
        if cells is not None:
            _write_cells(axes, values, *cells)
        name_axes(axes, title, x=x, y=y, grid="")
        then(axes)
        if bar is not None:
            place = axes.figure.axes.index(axes) + 1
            colour_bar(axes.figure.axes[place - panels : place], shown, **bar)

    return Panel(draw, size=size)


def bars(
    title: str,
    heights: Float[Tensor, " bar"],
    colours: Sequence[Colour],
    *,
    size: tuple[float, float],
    x: str,
    y: str,
    then: Strokes,
) -> Panel:
    """Return a panel with a bar for each number; ``then`` has the last strokes on matplotlib's axes."""

    def draw(axes: Any) -> None:
        axes.bar(range(len(heights)), heights.tolist(), color=[*map(_hue, colours)], width=0.82)
        name_axes(axes, title, x=x, y=y)
        then(axes)

    return Panel(draw, size=size)


def _hue(colour: Colour) -> Any:
    from matplotlib import colormaps

    return colour if isinstance(colour, str) else colormaps[GRADED](colour)


def _mark_trained(axes: Any, trained_length: int, *, above: bool) -> None:
    """Draw a line where the trained length ends, and a shade over all that lies beyond."""
    low, high = axes.get_xlim()
    axes.axvspan(trained_length, max(high, trained_length), color=UNSEEN, zorder=-2, lw=0)
    axes.axvline(trained_length, color=NOTE, lw=0.9, zorder=-1)
    axes.set_xlim(low, high)
    axes.annotate(
        f"trained: {trained_length:,}",
        (trained_length, 1 if above else 0),
        xycoords=("data", "axes fraction"),
        xytext=(-4, -4 if above else 4),
        textcoords="offset points",
        ha="right",
        va="top" if above else "bottom",
        fontsize=8,
        color=NOTE,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.5},
    )


def _tokens_axis(axes: Any, longest: int) -> None:
    """Give an axis distances from 1 token on, each octave as wide as the next, in plain numbers."""
    axes.set_xscale("log", base=2)
    axes.set_xlim(1, longest)
    octaves = longest.bit_length() - 1
    ticks = [2**power for power in range(octaves, -1, -1 if octaves <= 8 else -2)]
    axes.set_xticks(ticks, [f"{tick:,}" if tick < 10_000 else f"{tick // 1024}K" for tick in ticks])
    axes.minorticks_off()


def name_axes(axes: Any, title: str, *, x: str, y: str, grid: str = "y") -> None:
    """Write the title and the names of the axes, as all pictures have them; an empty ``grid`` draws no lines."""
    draw_grid(axes, title, axis=grid or "both")
    if not grid:
        axes.grid(False)
    axes.set_xlabel(x, fontsize=9, color=INK)
    axes.set_ylabel(y, fontsize=9, color=INK)
    axes.tick_params(labelsize=8, length=2.5)


def colour_bar(panels: Sequence[Any], image: Any, label: str = "", **look: Any) -> Any:
    """Draw the scale of an image's colours next to one panel or several, without a frame."""
    bar = panels[0].figure.colorbar(image, ax=panels, **({"aspect": 28, "pad": 0.02} | look))
    bar.set_label(label, fontsize=8, color=NOTE)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=7, length=2, colors=NOTE)
    return bar


def _write_cells(axes: Any, values: Float[Tensor, "row column"], form: str, dark: float, size: float) -> None:
    """Write its number into each cell of a matrix, in an ink that is read on its colour."""
    for row, numbers in enumerate(values.tolist()):
        for column, value in enumerate(numbers):
            if value == value:
                ink = "white" if abs(value) > dark else "#222222"
                axes.text(column, row, format(value, form), ha="center", va="center", fontsize=size, color=ink)
