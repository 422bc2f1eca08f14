"""What every picture of a method is: the numbers, for programs, and how they are drawn."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from ctxext.evaluation.report.style import INK, NOTE, Drawing, draw_grid

# Hues of Okabe and Ito, told apart under every common colour blindness, by what they stand for in every picture.
BEFORE, AFTER, UNSEEN = "#E69F00", "#0072B2", "#F4F4F4"
GRADED = "cividis"  # made for colour-blind readers: dark to light, blue to yellow
POINTS = 400  # distances that a curve is drawn through
SIGNIFICANT = 6  # digits of a number for programs


@dataclass(frozen=True, eq=False)
class Picture:
    """One picture.

    Args:
        numbers: what it shows, in plain values that JSON has.
        drawing: of these numbers.
    """

    numbers: dict[str, Any]
    drawing: Drawing

    @classmethod
    def of(
        cls,
        found: Any,
        kind: str,
        *,
        saved: dict[str, Any],
        said: str,
        caption: str,
        size: tuple[float, float],
        draw: Callable[[Any], None],
        **more: Any,
    ) -> Picture:
        """The picture of one method.

        Args:
            found: a dataclass with the numbers that are drawn.
            kind: what is drawn, in a word.
            saved: the method's saved form.
            said: the title, and what is said where the picture cannot be seen.
            caption: how to read it.
            size: width and height, inches.
            draw: on a figure of this size.
            more: numbers beside those of ``found``.
        """
        name = f"show-{saved['method']}" + ("-attention" if kind == "attention" else "")
        drawing = Drawing(name, title=wrapped(said, size[0]), caption=caption, alternative=said, size=size, draw=draw)
        return cls({"kind": kind, "method": saved, **as_numbers(found), **more}, drawing)


def as_numbers(value: Any) -> Any:
    """Dataclasses and tensors as plain values that JSON has; what is not a number becomes None."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: as_numbers(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Tensor):
        return _rounded(value) if value.is_floating_point() else value.tolist()
    if isinstance(value, dict):
        return {key: as_numbers(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [as_numbers(one) for one in value]
    return value


def _rounded(values: Tensor) -> Any:
    """As lists, in a few digits: all at once, since a matrix has many numbers."""
    values = values.detach().cpu().double()
    size = values.abs().where(values.isfinite() & (values != 0), 1.0).log10().floor()
    scale = torch.tensor([10.0**digits for digits in range(21)], dtype=torch.float64)
    scale = scale[(SIGNIFICANT - 1 - size).nan_to_num().clamp(0, 20).long()]
    found = ((values * scale).round() / scale).tolist()
    return _without_nan(found) if bool(values.isnan().any()) else found


def _without_nan(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nan(one) for one in value]
    return None if value != value else value


def distances_to(length: int) -> Int[Tensor, " distances"]:
    """0, 1 and on to ``length - 1``, all of the small ones and then each as much larger as the one before it was."""
    steps = torch.linspace(0, math.log(max(length - 1, 1)), POINTS, dtype=torch.float64)
    return torch.tensor([0, *dict.fromkeys(steps.exp().round().long().tolist())])


def wrapped(sentence: str, inches: float) -> str:
    """A title in lines that fit a figure of this width."""
    return textwrap.fill(sentence, int(inches * 9.7))


def mark_trained(axes: Any, trained_length: int, *, above: bool = True) -> None:
    """A line where the trained length ends, and a shade over all that lies beyond."""
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
    """Distances from 1 token on, each octave as wide as the next, in plain numbers."""
    axes.set_xscale("log", base=2)
    axes.set_xlim(1, longest)
    octaves = longest.bit_length() - 1
    ticks = [2**power for power in range(octaves, -1, -1 if octaves <= 8 else -2)]
    axes.set_xticks(ticks, [f"{tick:,}" if tick < 10_000 else f"{tick // 1024}K" for tick in ticks])
    axes.minorticks_off()


def quiet(axes: Any, title: str, *, x: str, y: str, grid: str = "y") -> None:
    """Titles and names of the axes, as all pictures have them."""
    draw_grid(axes, title, axis=grid or "both")
    if not grid:
        axes.grid(False)
    axes.set_xlabel(x, fontsize=9, color=INK)
    axes.set_ylabel(y, fontsize=9, color=INK)
    axes.tick_params(labelsize=8, length=2.5)
