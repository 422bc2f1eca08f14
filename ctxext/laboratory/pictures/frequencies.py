"""The spectrum of methods: what each does to every rotary frequency, as a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ctxext.errors import IncompatibleError
from ctxext.evaluation.report.figures import NOTE
from ctxext.laboratory.pictures.picture import Picture
from ctxext.methods import METHODS, Method, RopeMethod
from ctxext.methods.formulas import index_that_turns, plain_inv_freq
from ctxext.methods.remap import RemapMethod
from ctxext.spec import LLAMA, RopeSpec

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


@dataclass(frozen=True, eq=False, kw_only=True)
class SpectrumPicture(Picture):
    """One panel per method: a bar per frequency, as high as its share of the original, coloured by band.

    Args:
        groups: methods that do the same at their target length, in order; a dynamic method often meets its static form.
    """

    kind = "frequencies"
    caption = "Each bar is a frequency, as high as its share of the original. Methods that do the same share a panel."

    rope: RopeSpec
    groups: list[list[Method]]

    @classmethod
    def of(cls, methods: Sequence[Method], rope: RopeSpec, model: str = "") -> SpectrumPicture:
        """Put the spectra of methods beside each other.

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
        return cls(method=methods[0], model=model, rope=rope, groups=groups)

    @property
    def columns(self) -> int:
        """Number of panels beside each other."""
        return min(COLUMNS, len(self.groups))

    @property
    def size(self) -> tuple[float, float]:
        return max(2.2 * self.columns, 5.0) + 0.6, 1.75 * math.ceil(len(self.groups) / self.columns) + 1.0

    @property
    def sentence(self) -> str:
        factors = sorted({method.factor for group in self.groups for method in group})
        return (
            f"{f'{self.model}: what' if self.model else 'What'} {self.rope.rotary_dim // 2} rotary frequencies become "
            f"at {' and '.join(f'{factor:g}' for factor in factors)} times {self.rope.trained_length:,} tokens"
        )

    def draw(self, figure: Any) -> None:
        from matplotlib.patches import Patch

        shape = math.ceil(len(self.groups) / self.columns), self.columns
        panels = figure.subplots(*shape, sharex=True, sharey=True, squeeze=False).flatten()
        seen = {band for panel, group in zip(panels, self.groups, strict=False) for band in self._draw(panel, group)}
        for index in range(len(self.groups), len(panels)):
            panels[index].set_axis_off()
            panels[index - self.columns].tick_params(labelbottom=True)
        is_left = self._turning_once < 0.7 * self.rope.rotary_dim / 2
        panels[0].annotate(
            f"one turn in\n{self.rope.trained_length:,} tokens",
            (self._turning_once, 1.0),
            xytext=(3 if is_left else -3, 0),
            textcoords="offset points",
            ha="left" if is_left else "right",
            va="top",
            fontsize=6.5,
            color=NOTE,
        )
        figure.supxlabel("frequency, fast to slow", x=0.05, ha="left", fontsize=8, color=NOTE)
        figure.supylabel("share of the original", fontsize=8, color=NOTE)
        handles = [Patch(color=colour, label=band) for band, colour in COLOURS.items() if band in seen]
        figure.legend(handles=handles, loc="outside lower right", ncols=len(handles), fontsize=7, frameon=False)

    @property
    def _turning_once(self) -> float:
        """Place on the axis of a frequency that would turn exactly once in the trained window."""
        return min(index_that_turns(self.rope, 1.0), self.rope.rotary_dim / 2 - 0.5)

    def _draw(self, panel: Any, group: list[Method]) -> list[str]:
        """Draw what the methods of a group do; return the band of each frequency."""
        method = group[0]
        shares, scale = speed(method, self.rope)
        names = bands(shares, method.factor)
        # What has stopped has no height of its own: a rim on the axis shows that it was not left out.
        heights = [share or RIM for share in shares.tolist()]
        panel.bar(range(len(names)), heights, width=0.82, color=[COLOURS[name] for name in names])
        panel.axhline(1 / method.factor, color=NOTE, linewidth=0.6, linestyle=(0, (4, 2)))
        panel.axvline(self._turning_once, color=NOTE, linewidth=0.6)
        title = ", ".join(sorted((method.name for method in group), key=len))
        panel.set_title(title, fontsize=8.5, fontweight="bold", loc="left", pad=3)
        if abs(scale - 1) > 1e-6:
            white = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
            note = f"cos, sin\ntimes {scale:.3g}"
            panel.text(0.99, 0.68, note, transform=panel.transAxes, ha="right", fontsize=6.5, color=NOTE, bbox=white)
        panel.set_yticks([0, 1 / method.factor, 1], ["0", f"1/{method.factor:g}", "1"])
        panel.set_ylim(0, 1.02)
        panel.margins(x=0.01)
        panel.tick_params(labelsize=7, length=2, colors=NOTE)
        panel.xaxis.get_major_locator().set_params(integer=True)
        for side, spine in panel.spines.items():
            spine.set_visible(side == "bottom")
            spine.set_color(NOTE)
        return names


def shown_by_default(factor: float, rope: RopeSpec = LLAMA) -> list[Method]:
    """Return every rotary method that its factor alone describes, and that fits the model."""
    methods = [
        kind(factor=factor)
        for kind in METHODS.values()
        if issubclass(kind, RopeMethod)
        and not issubclass(kind, RemapMethod)
        and not kind.needs_training
        and all(field.default is not MISSING or field.default_factory is not MISSING for field in fields(kind))
    ]
    return [method for method in methods if method.fits(rope)]


def speed(method: Method, rope: RopeSpec) -> tuple[Float[Tensor, " half"], float]:
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
