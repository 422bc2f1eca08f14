"""Rotation by numbers that gradients reach: how a search tries frequencies on a model without building it anew."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from ctxext.errors import IncompatibleError
from ctxext.methods.formulas import plain_inv_freq
from ctxext.surgery.edits import Edits
from ctxext.surgery.rotary import ProportionalSpec, RotarySite, takes_axes

# How the angle of a pair of dimensions is laid out: half a head apart (Llama), side by side (GPT-J), once for both.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "halves": lambda part: torch.cat((part, part), dim=-1),
    "pairs": lambda part: part.repeat_interleave(2, dim=-1),
    "once": lambda part: part,
}
# Positions at which a layout is recognised; and how far float32 may be from float64 there.
PROBED, AGREES = 7, 1e-3


@dataclass(eq=False)
class LearnedRotation:
    """What a model rotates by: its trained frequencies over ``exp(log_divisors)``, times ``exp(log_scale)``.

    Set new tensors between two passes; those that require a gradient get one. The modules compute in float64, so that a
    gradient is as exact as the model's own precision lets it be.

    Args:
        log_divisors: float64, one per rotated pair of dimensions.
        log_scale: float64; of cos and sin.
    """

    log_divisors: Float[Tensor, " half"]
    log_scale: Float[Tensor, ""]

    def angles(self, site: RotarySite, position_ids: Tensor) -> Tensor:
        """Radians, float64, with a last dimension of one per pair."""
        spec = site.spec
        inv_freq = plain_inv_freq(spec).to(self.log_divisors.device) * torch.exp(-self.log_divisors)
        if isinstance(spec, ProportionalSpec):
            turns = torch.arange(len(inv_freq), device=inv_freq.device) < spec.rotated
            inv_freq = torch.where(turns, inv_freq, 0.0)
        return position_ids[..., None].double() * inv_freq.to(position_ids.device)

    def scale(self, site: RotarySite) -> Tensor:
        """What multiplies cos and sin."""
        return self.log_scale.exp() * site.spec.attention_scale


@dataclass(frozen=True)
class Laid:
    """How a rotary module returns what it computes.

    Args:
        layout: one of ``LAYOUTS``.
        is_complex: as one complex tensor in the place of cos and sin.
        folds: three planes of positions into one (Qwen2-VL); a text has the same in all three.
    """

    layout: str
    is_complex: bool = False
    folds: bool = False

    def out(self, cos: Tensor, sin: Tensor, x: Tensor) -> Any:
        """Cos and sin as the module's class would return them for ``x``."""
        cos, sin = (LAYOUTS[self.layout](part).to(x.device) for part in (cos, sin))
        if self.is_complex:
            return torch.complex(cos.float(), sin.float())
        return cos.to(x.dtype), sin.to(x.dtype)


@dataclass(eq=False)
class LearnedForward:
    """Stands in for ``rotary.forward``, which stock transformers runs without gradients.

    Args:
        rotary: the module; what is not searched it computes as before.
        rotation: what it rotates by.
        sites: its frequencies that are searched, by layer type.
        laid: how each of them returns its cos and sin.
    """

    rotary: nn.Module
    rotation: LearnedRotation
    sites: dict[str | None, RotarySite] = field(default_factory=dict)
    laid: dict[str | None, Laid] = field(default_factory=dict)

    def __call__(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        """Cos and sin as the class lays them out, for ``position_ids`` of shape [batch, seq] or [3, batch, seq]."""
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
    """Let a model rotate by ``rotation`` until ``edits`` is undone.

    Args:
        model: which computes the frequencies of ``rotation`` now, however it came to them.
        sites: its frequencies that are searched.
        rotation: as the model has it now.
        edits: that remembers what was there.

    Raises:
        IncompatibleError: a module lays its angles out in no way that is known here.
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
    """How a module returns what it computes, seen on what it computes now."""
    device = getattr(rotary, f"{site.prefix}inv_freq").device
    # Not the first ones alone: at position 0 all layouts are the same.
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
        mine = [lay(part) for part in (angle.cos() * scale, angle.sin() * scale)]
        if all(
            a.shape == b.shape and torch.allclose(a.double(), b, atol=AGREES, rtol=0)
            for a, b in zip((cos, sin), mine, strict=True)
        ):
            return Laid(name, is_complex, folds)
    raise IncompatibleError(
        f"{type(rotary).__name__} lays out the angles of its rotation in a way that is not known here (cos of shape "
        f"{list(cos.shape)} for {site.spec.rotary_dim // 2} frequencies), so its frequencies cannot be searched. "
        f"Choose without --search."
    )


def turns(site: RotarySite, tokens: int) -> Float[Tensor, " half"]:
    """How often each trained frequency turns in so many tokens, float64."""
    return plain_inv_freq(site.spec) * tokens / (2 * math.pi)
