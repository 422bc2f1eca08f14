"""The spectrum of methods: what each does to every rotary frequency, as a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ctxext.errors import IncompatibleError
from ctxext.evaluation.report.figures import NOTE, Panel
from ctxext.laboratory.pictures.picture import Picture, bars
from ctxext.measuring.readings import name_for
from ctxext.methods import METHODS, Method, RopeMethod
from ctxext.methods.formulas import index_that_turns, plain_inv_freq
from ctxext.methods.remap import RemapMethod
from ctxext.spec import LLAMA, PerPair, RopeSpec

# Okabe and Ito's colours, told apart under every common colour blindness and in print.
COLOURS = {
    "kept": "#0072B2",
    "ramped": "#56B4E9",
    "interpolated": "#E69F00",
    "slowed further": "#D55E00",
    "stopped": "#999999",
}
COLUMNS = 4
RIM = 0.015
SAME = 0.01  # bands are told apart to one percent of a frequency


def spectrum_picture(methods: Sequence[Method], rope: RopeSpec, model: str = "") -> Picture:
    """Put the spectra of methods side by side. Methods that do the same at their target length share a panel.

    Raises:
        IncompatibleError: for a method that has no frequencies.
    """
    groups: list[list[Method]] = []
    for method in methods:
        shares, scale = speed(method, rope)
        for group in groups:
            others, other_scale = speed(group[0], rope)
            is_near = method.factor == group[0].factor and abs(scale - other_scale) < SAME
            if is_near and torch.allclose(shares, others):
                group.append(method)
                break
        else:
            groups.append([method])
    factors = " and ".join(f"{factor:g}" for factor in sorted({method.factor for method in methods}))
    what = f"{rope.rotary_dim // 2} rotary frequencies become at {factors} times {rope.trained_length:,} tokens"
    across = min(COLUMNS, len(groups))
    # The last panel has the legend of all, so the bands of every group are collected before any panel is drawn.
    legend = {name for group in groups for name in bands(speed(group[0], rope)[0], group[0].factor)}
    panels, names = [], [method.name for method in methods]
    for place, group in enumerate(groups):
        # A method that is drawn at several factors, or with other parameters, is named with these.
        shown = [name_for(method) if names.count(method.name) > 1 else method.name for method in group]
        title, is_last = ", ".join(sorted(shown, key=len)), place == len(groups) - 1
        look: dict[str, Any] = {
            "width": max(2.2, 5 / across),
            "legend": legend if is_last else None,
            "first": not place,
        }
        panels.append(_panel(title, group[0], rope, **look))
    return Picture(
        kind="frequencies",
        sentence=f"{f'{model}: what' if model else 'What'} {what}",
        caption="Each bar is a frequency, as high as its share of the original. Methods that do the same share a "
        "panel.",
        values={"rope": rope, "groups": groups},
        panels=panels,
        across=across,
    )


def _panel(title: str, method: Method, rope: RopeSpec, *, width: float, first: bool, legend: set[str] | None) -> Panel:
    """Return what a method does; the last panel of a picture has the legend of all bands."""
    shares, scale = speed(method, rope)
    factor = method.factor
    # Place of a frequency that would turn exactly once in the trained window.
    turning_once = min(index_that_turns(rope, 1.0), rope.rotary_dim / 2 - 0.5)
    is_left = turning_once < 0.7 * rope.rotary_dim / 2

    def then(axes: Any) -> None:
        from matplotlib.patches import Patch

        axes.axhline(1 / factor, color=NOTE, linewidth=0.6, linestyle=(0, (4, 2)))
        axes.axvline(turning_once, color=NOTE, linewidth=0.6)
        if abs(scale - 1) > 1e-6:
            white = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
            note = f"cos, sin\ntimes {scale:.3g}"
            axes.text(0.99, 0.68, note, transform=axes.transAxes, ha="right", fontsize=6.5, color=NOTE, bbox=white)
        # One panel names the line, on the side that has more room.
        if first:
            axes.annotate(
                f"one turn in\n{rope.trained_length:,} tokens",
                (turning_once, 1.0),
                xytext=(3 if is_left else -3, 0),
                textcoords="offset points",
                ha="left" if is_left else "right",
                va="top",
                fontsize=6.5,
                color=NOTE,
            )
        axes.set_yticks([0, 1 / factor, 1], ["0", f"1/{factor:g}", "1"])
        axes.set_ylim(0, 1.02)
        axes.margins(x=0.01)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(False)
        if legend is not None:
            handles = [Patch(color=colour, label=band) for band, colour in COLOURS.items() if band in legend]
            axes.figure.legend(
                handles=handles, loc="outside lower right", ncols=len(handles), fontsize=7, frameon=False
            )

    # A frequency that has stopped has no height: a rim on the axis shows that it was not left out.
    heights, colours = shares.where(shares > 0, RIM), [COLOURS[name] for name in bands(shares, factor)]
    return bars(
        title,
        heights,
        colours,
        size=(width, 1.9),
        x="frequency, fast to slow" if first else "",
        y="share of the original" if first else "",
        then=then,
    )


def shown_by_default(factor: float, rope: RopeSpec = LLAMA) -> list[Method]:
    """Return every rotary method that its factor alone describes, and that fits the model."""
    methods = [
        kind(factor=factor)
        for kind in METHODS.values()
        if issubclass(kind, RopeMethod)
        and not issubclass(kind, RemapMethod)
        and not (kind.needs_training or kind.required())
    ]
    return [method for method in methods if method.fits(rope)]


def speed(method: Method, rope: RopeSpec) -> tuple[PerPair, float]:
    """Return each frequency as a share of the plain one, in a text of the target length, and the attention scale there.

    Raises:
        IncompatibleError: for a method that has no frequencies.
    """
    if not isinstance(method, RopeMethod):
        raise IncompatibleError(f"Method {method.name!r} has no frequencies to plot: it does not rotate.")
    if isinstance(method, RemapMethod):
        raise IncompatibleError(
            f"Method {method.name!r} leaves all frequencies as they are and gives tokens other positions. See "
            f"`ctxext plot positions -m {method.name}`."
        )
    frequencies = method.frequencies(rope, math.floor(rope.trained_length * method.factor))
    return frequencies.inv_freq / plain_inv_freq(rope), frequencies.attention_scale


def bands(shares: PerPair, factor: float) -> list[str]:
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
