"""Tables of sinusoids: which formula a table was computed by, its rows at other frequencies, and how it goes on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ctxext.methods.formulas import plain_inv_freq
from ctxext.spec import RopeSpec

BASE = 10000.0
ANGLE = 2.0**-22  # radians per row by which a class that computes angles in float32 may be off
REMAKERS = ("make_weights", "make_weight")  # what fairseq's module, and all that came of it, computes its table anew by


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
        """What a method for rotations may know of it."""
        return RopeSpec(rotary_dim=self.width, base=self.base, trained_length=trained_length)

    def rows(
        self, start: int, stop: int, inv_freq: Float[Tensor, " half"] | None = None
    ) -> Float[Tensor, "rows width"]:
        """Rows from ``start`` to ``stop``, in float64.

        Args:
            start: the first of them.
            stop: the row behind the last.
            inv_freq: by how much each angle grows from token to token; None for the formula's own frequencies. The
                first token keeps the vector that it was trained with.
        """
        plain = plain_inv_freq(self.spec(1))
        moving = plain if inv_freq is None else inv_freq
        token = torch.arange(start - self.first, stop - self.first, dtype=torch.float64, device="cpu")
        angles = self.first * plain + token[:, None] * moving
        if self.interleaved:
            return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)
        return torch.cat([angles.sin(), angles.cos()], 1)


def sinusoid_of(table: Tensor, first: int) -> Sinusoid | None:
    """The formula that the rows of tokens were computed by; None where it is none of the published ones.

    Both spectra fall from 1 to 1/10000. That of the Transformer's paper would reach it one frequency after its last;
    fairseq's reaches it with the last one, which is the same series with a slightly larger base.

    Args:
        table: rows in any dtype, with memory.
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
            found = table.detach()[first:].to("cpu", torch.float64)
            if bool(((found - formula.rows(first, len(table))).abs() <= rounding[:, None]).all()):
                return formula
    return None


def remaker_of(module: nn.Module) -> str | None:
    """The name of the method that computes the module's table anew for a longer text; None where there is none."""
    return next((name for name in REMAKERS if callable(getattr(type(module), name, None))), None)


@dataclass
class Growing:
    """Stands in for the method by which a module computes its table anew when a text is longer: this one goes on.

    Args:
        module: the module.
        leaf: what it calls its table.
        formula: of the table.
        inv_freq: by how much angles grow from token to token.
    """

    module: nn.Module
    leaf: str
    formula: Sinusoid
    inv_freq: Tensor

    def __call__(self, rows: int, *_: Any) -> None:
        """Takes what the class's own method does: how many rows there shall be, and what else shapes a table."""
        old: Tensor = getattr(self.module, self.leaf)
        with torch.inference_mode(False), torch.no_grad():  # what is made here is kept, and may be trained with
            more = self.formula.rows(len(old), rows, self.inv_freq).to(old)
            longer = torch.cat([old.detach(), more])
            is_weight = isinstance(old, nn.Parameter)
            new = nn.Parameter(longer, requires_grad=old.requires_grad) if is_weight else longer
        setattr(self.module, self.leaf, new)
