"""The contract of a picture: numbers for programs, and a drawing of these numbers alone."""

from __future__ import annotations

import abc
import math
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ctxext.evaluation.report.figures import INK, NOTE, Figure, draw_grid
from ctxext.methods import Method

# Hues of Okabe and Ito, told apart under every common colour blindness, by what they stand for in every picture.
BEFORE, AFTER, UNSEEN = "#E69F00", "#0072B2", "#F4F4F4"
GRADED = "cividis"  # made for colour-blind readers: dark to light, blue to yellow
DIVERGING = "PuOr"  # orange below zero, violet above, told apart under every common colour blindness
POINTS = 400  # distances that a curve is drawn through
SIGNIFICANT = 6  # digits of a number for programs


@dataclass(frozen=True, eq=False, kw_only=True)
class Picture(abc.ABC):
    """The numbers of one picture. A kind of picture adds its own as fields, each of which programs get.

    Class attributes of a kind:
        kind: what is drawn, in a word.
        caption: how to read it.
    """

    kind: ClassVar[str]
    caption: ClassVar[str]

    method: Method
    model: str = ""
    title: str = ""

    @property
    def sentence(self) -> str:
        """Title of the picture, which says what it shows to a reader who cannot see it."""
        return self.title

    @abc.abstractmethod
    def draw(self, figure: Any) -> None:
        """Draw on a matplotlib figure of ``size``."""

    @property
    def size(self) -> tuple[float, float]:
        """Width and height in inches."""
        return 9.6, 4.1

    @property
    def numbers(self) -> dict[str, Any]:
        """Numbers of the picture in plain values that JSON has."""
        names = [field.name for field in fields(self)[len(fields(Picture)) :]]
        shown = {name: as_numbers(getattr(self, name)) for name in names}
        return {"kind": self.kind, "method": self.method.to_dict(), **shown}

    def save(self, path: Path) -> None:
        """Write a PNG with the sentence as its title.

        Raises:
            InvalidParameterError: matplotlib is not installed.
        """
        title = textwrap.fill(self.sentence, int(self.size[0] * 9.7))
        Figure(name=self.kind, title=title, size=self.size, draw=self.draw).save(path)


def as_numbers(value: Any) -> Any:
    """Return dataclasses and tensors as plain values that JSON has; what is not a number becomes None."""
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


def mark_trained(axes: Any, trained_length: int, *, above: bool = True) -> None:
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


def tokens_axis(axes: Any, longest: int) -> None:
    """Give an axis distances from 1 token on, each octave as wide as the next, in plain numbers."""
    axes.set_xscale("log", base=2)
    axes.set_xlim(1, longest)
    octaves = longest.bit_length() - 1
    ticks = [2**power for power in range(octaves, -1, -1 if octaves <= 8 else -2)]
    axes.set_xticks(ticks, [f"{tick:,}" if tick < 10_000 else f"{tick // 1024}K" for tick in ticks])
    axes.minorticks_off()


def quiet(axes: Any, title: str, *, x: str, y: str, grid: str = "y") -> None:
    """Write the title and the names of the axes, as all pictures have them; an empty ``grid`` draws no lines."""
    draw_grid(axes, title, axis=grid or "both")
    if not grid:
        axes.grid(False)
    axes.set_xlabel(x, fontsize=9, color=INK)
    axes.set_ylabel(y, fontsize=9, color=INK)
    axes.tick_params(labelsize=8, length=2.5)


def colour_bar(figure: Any, image: Any, axes: Any, label: str = "", **placing: Any) -> Any:
    """Draw the scale of an image's colours beside one panel or several, without a frame."""
    bar = figure.colorbar(image, ax=axes, **({"aspect": 28, "pad": 0.015} | placing))
    bar.set_label(label, fontsize=8, color=NOTE)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=7, length=2, colors=NOTE)
    return bar


def number_cells(
    axes: Any,
    values: Float[Tensor, "query key"],
    places: list[int],
    text: Callable[[float], str],
    is_dark: Callable[[float], bool],
    size: float,
) -> None:
    """Write its number into each cell of a causal matrix, in an ink that is read on its colour."""
    for query, row in zip(places, values.tolist(), strict=True):
        for key, value in zip(places, row, strict=True):
            if key <= query and value == value:
                ink = "white" if is_dark(value) else "#222222"
                axes.text(key, query, text(value), ha="center", va="center", fontsize=size, color=ink)
