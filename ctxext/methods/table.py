"""Any frequencies, given as numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch

from ctxext.methods.base import RopeMethod
from ctxext.methods.formulas import EXACT, plain_inv_freq
from ctxext.methods.parameters import Positive, Range, require
from ctxext.spec import Frequencies, RopeSpec


@dataclass(frozen=True, kw_only=True)
class Table(RopeMethod):
    """Use the given frequencies, whatever their origin.

    Pick it for frequencies that no other method here produces: searched, learned, or copied from another code base.

    Args:
        factor: target_length / trained_length; says only which length the model is for. Dimensionless, at least 1.
        inv_freq: radians per token, one per rotated pair (rotary_dim / 2), in the model's order. At least 0; a
            pair with 0 does not turn.
        attention_scale: multiplies cos and sin. Dimensionless, above 0.

    Raises:
        InvalidParameterError: from ``frequencies``, if the model has another number of frequencies.

    Source: Su et al., arXiv:2104.09864, section 3.4.2, which fixes nothing about the frequencies but their number.
    """

    name = "table"
    summary = "the frequencies that you give"
    source = "arXiv:2104.09864"

    inv_freq: Annotated[tuple[float, ...], Range(least=0)]
    attention_scale: Annotated[float, Positive] = 1.0

    def frequencies(self, rope: RopeSpec, length: int) -> Frequencies:
        expected = f"{rope.rotary_dim // 2} (rotary_dim / 2)"
        require(len(self.inv_freq) == rope.rotary_dim // 2, "the length of inv_freq", len(self.inv_freq), expected)
        return Frequencies(torch.tensor(self.inv_freq, **EXACT), self.attention_scale)

    def rope_parameters(self, rope: RopeSpec) -> dict[str, Any]:
        return self.as_longrope(rope)

    @classmethod
    def example(cls, rope: RopeSpec) -> Table:
        return cls(factor=4.0, inv_freq=tuple((plain_inv_freq(rope) / 4).tolist()), attention_scale=1.1)
