"""Recognise the formula of a sinusoid table, and compute its rows at other frequencies and beyond its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ctxext.methods.formulas import plain_inv_freq
from ctxext.spec import RopeSpec

BASE = 10000.0
ANGLE = 2.0**-22  # rounding error of angles in float32, in radians per row
REMAKERS = ("make_weights", "make_weight")  # methods by which fairseq's module and its descendants recompute the table


@dataclass(frozen=True)
class Sinusoid:
    """The formula of a table: row ``r`` holds the sine and the cosine of ``r`` times each of its frequencies.

    Args:
        width: columns; even.
        base: the frequencies are ``base^(-2i/width)``.
        interleaved: whether the sine and the cosine of a frequency stand side by side; else all sines come first.
        first: the row of the first token.
    """

    width: int
    base: float
    interleaved: bool
    first: int

    def spec(self, trained_length: int) -> RopeSpec:
        """Return the spec that a method for rotations takes for this table."""
        return RopeSpec(rotary_dim=self.width, base=self.base, trained_length=trained_length)

    def rows(
        self, start: int, stop: int, inv_freq: Float[Tensor, " half"] | None = None
    ) -> Float[Tensor, "rows width"]:
        """Compute rows from ``start`` to ``stop``, in float64.

        Args:
            start: the first row.
            stop: the row after the last.
            inv_freq: the growth of each angle from token to token, in radians; None for the formula's own frequencies.
                The first token keeps its trained vector.
        """
        plain = plain_inv_freq(self.spec(1))
        moving = plain if inv_freq is None else inv_freq
        token = torch.arange(start - self.first, stop - self.first, dtype=torch.float64, device="cpu")
        angles = self.first * plain + token[:, None] * moving
        if self.interleaved:
            return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)
        return torch.cat([angles.sin(), angles.cos()], 1)


def sinusoid_of(table: Tensor, first: int) -> Sinusoid | None:
    """Return the published formula that gives the rows of tokens; None if none does.

    Both published spectra fall from 1 to 1/10000. The spectrum of the Transformer's paper would reach 1/10000 one
    frequency after its last; fairseq's reaches it with the last one, as the same series with a slightly larger base.

    Args:
        table: rows in any dtype, not on the meta device.
        first: the row of the first token.

    Source: Vaswani et al., arXiv:1706.03762, section 3.5; facebookresearch/fairseq@05625e3,
        fairseq/modules/sinusoidal_positional_embedding.py, ``get_embedding``.
    """
    half, odd = divmod(table.shape[1], 2)
    if odd:
        return None
    for base in (BASE, BASE ** (half / (half - 1)) if half > 1 else BASE):
        for interleaved in (False, True):
            formula = Sinusoid(table.shape[1], base, interleaved, first)
            rounding = torch.finfo(table.dtype).eps + ANGLE * torch.arange(first, len(table)).double()
            rows = table.detach()[first:].to("cpu", torch.float64)
            if bool(((rows - formula.rows(first, len(table))).abs() <= rounding[:, None]).all()):
                return formula
    return None


def remaker_of(module: nn.Module) -> str | None:
    """Return the name of the method that recomputes the module's table for a longer text; None without one."""
    return next((name for name in REMAKERS if callable(getattr(type(module), name, None))), None)


@dataclass
class Growing:
    """Replacement of the method that recomputes a module's table for a longer text: it appends rows instead."""

    module: nn.Module
    leaf: str
    formula: Sinusoid
    inv_freq: Tensor

    def __call__(self, rows: int, *_: Any) -> None:
        """Lengthen the table to ``rows`` rows; further arguments of the class's method are ignored."""
        old: Tensor = getattr(self.module, self.leaf)
        with torch.inference_mode(False), torch.no_grad():  # the table is kept, and may be trained
            more = self.formula.rows(len(old), rows, self.inv_freq).to(old)
            longer = torch.cat([old.detach(), more])
            is_weight = isinstance(old, nn.Parameter)
            new = nn.Parameter(longer, requires_grad=old.requires_grad) if is_weight else longer
        setattr(self.module, self.leaf, new)
