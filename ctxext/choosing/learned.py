"""Rotate by differentiable frequencies, so that a search can try them on a model without rebuilding it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from ctxext.core.edits import Edits
from ctxext.core.rotary import ProportionalSpec, RotarySite, takes_axes
from ctxext.errors import IncompatibleError
from ctxext.methods.formulas import plain_inv_freq

# Arrangements of a pair's angle: half a head apart (Llama), side by side (GPT-J), once for both.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "halves": lambda part: torch.cat((part, part), dim=-1),
    "pairs": lambda part: part.repeat_interleave(2, dim=-1),
    "once": lambda part: part,
}
# Number of positions at which a layout is recognised, and the tolerance of float32 there.
PROBED, AGREES = 7, 1e-3


@dataclass(eq=False)
class LearnedRotation:
    """Trainable rotation: trained frequencies divided by ``exp(log_divisors)``; cos and sin times ``exp(log_scale)``.

    Set new tensors between two passes; those that require a gradient get one. The modules compute in float64, so that
    only the precision of the model limits that of a gradient.

    Args:
        log_divisors: float64, one per rotated pair of dimensions.
        log_scale: float64 logarithm of the scale of cos and sin.
    """

    log_divisors: Float[Tensor, " half"]
    log_scale: Float[Tensor, ""]

    def angles(self, site: RotarySite, position_ids: Tensor) -> Tensor:
        """Return angles in radians, float64, whose last dimension counts pairs."""
        spec = site.spec
        inv_freq = plain_inv_freq(spec).to(self.log_divisors.device) * torch.exp(-self.log_divisors)
        if isinstance(spec, ProportionalSpec):
            turns = torch.arange(len(inv_freq), device=inv_freq.device) < spec.rotated
            inv_freq = torch.where(turns, inv_freq, 0.0)
        return position_ids[..., None].double() * inv_freq.to(position_ids.device)

    def scale(self, site: RotarySite) -> Tensor:
        """Return the factor of cos and sin."""
        return self.log_scale.exp() * site.spec.attention_scale


@dataclass(frozen=True)
class Laid:
    """The arrangement of a rotary module's output.

    Args:
        is_complex: whether the output is one complex tensor instead of cos and sin.
        folds: whether the module folds three planes of positions into one (Qwen2-VL); they agree in a text.
    """

    layout: str
    is_complex: bool = False
    folds: bool = False

    def out(self, cos: Tensor, sin: Tensor, x: Tensor) -> Any:
        """Return cos and sin in the arrangement and dtype of the module's class."""
        cos, sin = (LAYOUTS[self.layout](part).to(x.device) for part in (cos, sin))
        if self.is_complex:
            return torch.complex(cos.float(), sin.float())
        return cos.to(x.dtype), sin.to(x.dtype)


@dataclass(eq=False)
class LearnedForward:
    """Replacement of ``rotary.forward``, which transformers runs without gradients."""

    rotary: nn.Module
    rotation: LearnedRotation
    sites: dict[str | None, RotarySite] = field(default_factory=dict)
    laid: dict[str | None, Laid] = field(default_factory=dict)

    def __call__(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        """Return cos and sin as the class arranges them; ``position_ids`` is [batch, seq] or [3, batch, seq]."""
        site = self.sites.get(layer_type)
        if site is None:
            forward: Callable[..., Any] = type(self.rotary).forward
            return forward(self.rotary, x, position_ids, **({} if layer_type is None else {"layer_type": layer_type}))
        laid = self.laid[layer_type]
        if laid.folds and position_ids.dim() == 3:
            position_ids = position_ids[0]
        angle, scale = self.rotation.angles(site, position_ids), self.rotation.scale(site).to(position_ids.device)
        return laid.out(angle.cos() * scale, angle.sin() * scale, x)


def learn_rotation(
    model: PreTrainedModel, sites: Sequence[RotarySite], rotation: LearnedRotation, edits: Edits
) -> None:
    """Make a model rotate by ``rotation`` until ``edits`` is undone.

    Raises:
        IncompatibleError: if a module arranges its angles in an unknown way.
    """
    stand_ins: dict[str, LearnedForward] = {}
    for site in sites:
        rotary = model.get_submodule(site.path)
        stand_in = stand_ins.setdefault(site.path, LearnedForward(rotary, rotation))
        stand_in.sites[site.layer_type], stand_in.laid[site.layer_type] = site, _layout(rotary, site, rotation)
    for path, stand_in in stand_ins.items():
        edits.set(model.get_submodule(path), "forward", stand_in)


@torch.no_grad()
def _layout(rotary: nn.Module, site: RotarySite, rotation: LearnedRotation) -> Laid:
    """Return the arrangement of a module's output, recognised from its present output."""
    device = getattr(rotary, f"{site.prefix}inv_freq").device
    # Start at 1: at position 0 all layouts agree.
    position_ids = torch.arange(1, PROBED + 1, device=device)[None]
    planes = takes_axes(rotary)
    given = position_ids[None].expand(3, -1, -1) if planes else position_ids
    x = torch.zeros(1, PROBED, 1, device=device)
    out = rotary.forward(x, given, **site.arguments)
    is_complex = isinstance(out, Tensor)
    cos, sin = (out.real, out.imag) if isinstance(out, Tensor) else out
    folds = planes and cos.dim() == 3
    angle, scale = rotation.angles(site, given[0] if folds else given), rotation.scale(site).to(device)
    for name, lay in LAYOUTS.items():
        expected = [lay(part) for part in (angle.cos() * scale, angle.sin() * scale)]
        if all(
            actual.shape == wanted.shape and torch.allclose(actual.double(), wanted, atol=AGREES, rtol=0)
            for actual, wanted in zip((cos, sin), expected, strict=True)
        ):
            return Laid(name, is_complex, folds)
    raise IncompatibleError(
        f"{type(rotary).__name__} arranges its angles in an unknown way (cos of shape {list(cos.shape)} for "
        f"{site.spec.rotary_dim // 2} frequencies), so its frequencies cannot be searched. Choose without --search."
    )


def turns(site: RotarySite, tokens: int) -> Float[Tensor, " half"]:
    """Return the number of turns of each trained frequency in so many tokens, float64."""
    return plain_inv_freq(site.spec) * tokens / (2 * math.pi)
