"""The spectrum of methods: what each does to every rotary frequency, as a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ctxext.errors import IncompatibleError
from ctxext.evaluation.report.style import saved_figure
from ctxext.laboratory.pictures.picture import wrapped
from ctxext.methods import METHODS, Method, RopeMethod
from ctxext.methods.formulas import index_that_turns, plain_inv_freq
from ctxext.methods.remap import RemapMethod
from ctxext.spec import RopeSpec

# Okabe and Ito's colours, told apart under every common colour blindness and in print.
COLOURS = {
    "kept": "#0072B2",
    "ramped": "#56B4E9",
    "interpolated": "#E69F00",
    "slowed further": "#D55E00",
    "stopped": "#999999",
}
GREY = "#555555"
COLUMNS = 4
RIM = 0.015
SAME = 0.01  # bands are told apart to one percent of a frequency


def shown_by_default(factor: float) -> list[Method]:
    """Every rotary method that its factor alone describes."""
    return [
        kind(factor=factor)
        for kind in METHODS.values()
        if issubclass(kind, RopeMethod)
        and not issubclass(kind, RemapMethod)
        and not kind.needs_training
        and all(field.default is not MISSING or field.default_factory is not MISSING for field in fields(kind))
    ]


def speed(method: Method, rope: RopeSpec) -> tuple[Float[Tensor, " half"], float]:
    """Each frequency as a share of the plain one, in a text of the target length, and the attention scale there.

    Raises:
        IncompatibleError: for a method that has no frequencies.
    """
    if not isinstance(method, RopeMethod):
        raise IncompatibleError(f"Method {method.name!r} has no frequencies to plot: it does not rotate.")
    if isinstance(method, RemapMethod):
        raise IncompatibleError(
            f"Method {method.name!r} leaves all frequencies as they are and gives tokens other positions: see "
            f"`ctxext plot positions -m {method.name}`."
        )
    frequencies = method.frequencies(rope, math.floor(rope.trained_length * method.factor))
    return frequencies.inv_freq / plain_inv_freq(rope), frequencies.attention_scale


def bands(shares: Float[Tensor, " half"], factor: float) -> list[str]:
    """Name what happens to each frequency: kept, ramped, interpolated (divided by the factor), slowed more, stopped."""
    names = []
    for share in shares.tolist():
        if share == 0:
            names.append("stopped")
        elif share > 1 - SAME:
            names.append("kept")
        elif share > (1 + SAME) / factor:
            names.append("ramped")
        else:
            names.append("interpolated" if share > (1 - SAME) / factor else "slowed further")
    return names


def plot_spectrum(methods: Sequence[Method], rope: RopeSpec, path: Path, *, name: str = "") -> None:
    """Draw one panel per method: a bar per frequency, as high as its share of the original, coloured by band.

    Args:
        methods: what to draw, in order.
        rope: the model's rotation.
        path: where to write; the ending chooses the format (png, svg, pdf).
        name: what the frequencies belong to, for the title.
    """
    alike = _alike(methods, rope)
    columns = min(COLUMNS, len(alike))
    rows = math.ceil(len(alike) / columns)
    size = (max(2.2 * columns, 5.0) + 0.6, 1.75 * rows + 1.0)
    factors = " and ".join(f"{factor:g}" for factor in sorted({method.factor for method in methods}))
    title = (
        f"{f'{name}: what' if name else 'What'} {rope.rotary_dim // 2} rotary frequencies become at {factors} times "
        f"{rope.trained_length:,} tokens"
    )
    with saved_figure(path, size, wrapped(title, size[0])) as figure:
        panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten()
        seen: set[str] = set()
        for panel, group in zip(panels, alike, strict=False):
            seen |= _draw(panel, group, rope)
        for index in range(len(alike), len(panels)):
            panels[index].set_axis_off()
            panels[index - columns].tick_params(labelbottom=True)
        _name_the_line(panels[0], rope)
        figure.supxlabel("frequency, fast to slow", x=0.05, ha="left", fontsize=8, color=GREY)
        figure.supylabel("share of the original", fontsize=8, color=GREY)
        _legend(figure, seen)


def _alike(methods: Sequence[Method], rope: RopeSpec) -> list[list[Method]]:
    """Methods grouped by what they do at their target length: a dynamic method often meets its static form there."""
    groups: list[list[Method]] = []
    for method in methods:
        like = next((group for group in groups if _same(method, group[0], rope)), None)
        groups.append([method]) if like is None else like.append(method)
    return groups


def _same(one: Method, other: Method, rope: RopeSpec) -> bool:
    """Whether both make the same of every frequency."""
    (shares, scale), (others, other_scale) = speed(one, rope), speed(other, rope)
    return one.factor == other.factor and abs(scale - other_scale) < SAME and torch.allclose(shares, others)


def _draw(panel: Any, group: list[Method], rope: RopeSpec) -> set[str]:
    method = group[0]
    shares, scale = speed(method, rope)
    names = bands(shares, method.factor)
    # What has stopped has no height of its own: a rim on the axis shows that it was not left out.
    heights = [share or RIM for share in shares.tolist()]
    panel.bar(range(len(names)), heights, width=0.82, color=[COLOURS[name] for name in names])
    panel.axhline(1 / method.factor, color=GREY, linewidth=0.6, linestyle=(0, (4, 2)))
    panel.axvline(_turning_once(rope), color=GREY, linewidth=0.6)
    panel.set_title(
        ", ".join(sorted((m.name for m in group), key=len)), fontsize=8.5, fontweight="bold", loc="left", pad=3
    )
    if abs(scale - 1) > 1e-6:
        white = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
        note = f"cos, sin\ntimes {scale:.3g}"
        panel.text(0.99, 0.68, note, transform=panel.transAxes, ha="right", fontsize=6.5, color=GREY, bbox=white)
    panel.set_yticks([0, 1 / method.factor, 1], ["0", f"1/{method.factor:g}", "1"])
    panel.set_ylim(0, 1.02)
    panel.margins(x=0.01)
    panel.tick_params(labelsize=7, length=2, colors=GREY)
    panel.xaxis.get_major_locator().set_params(integer=True)
    for side, spine in panel.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(GREY)
    return set(names)


def _name_the_line(panel: Any, rope: RopeSpec) -> None:
    position = _turning_once(rope)
    to_the_right = position < 0.7 * rope.rotary_dim / 2
    panel.annotate(
        f"one turn in\n{rope.trained_length:,} tokens",
        (position, 1.0),
        xytext=(3 if to_the_right else -3, 0),
        textcoords="offset points",
        ha="left" if to_the_right else "right",
        va="top",
        fontsize=6.5,
        color=GREY,
    )


def _turning_once(rope: RopeSpec) -> float:
    """Where on the axis a frequency would turn exactly once in the trained window."""
    return min(index_that_turns(rope, 1.0), rope.rotary_dim / 2 - 0.5)


def _legend(figure: Any, seen: set[str]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=colour, label=band) for band, colour in COLOURS.items() if band in seen]
    figure.legend(handles=handles, loc="outside lower right", ncols=len(handles), fontsize=7, frameon=False)
