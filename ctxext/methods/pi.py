"""Position Interpolation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ctxext.methods._math import plain_inv_freq
from ctxext.methods.base import RopeMethod
from ctxext.spec import Frequencies, RopeSpec

__all__ = ["PI"]


@dataclass(frozen=True, kw_only=True)
class PI(RopeMethod):
    """Squeeze all positions evenly into the trained window.

    Pick it when you will fine-tune (a few hundred steps): it then matches YaRN inside the window. Without
    training it degrades every position, short ones included.

    Args:
        factor: target_length / trained_length. Dimensionless, at least 1.

    Source: Chen et al., arXiv:2306.15595, section 2.3.
        Authors' code: none published; jquesnelle/yarn@995db5b, scaled_rope/LlamaLinearScaledRotaryEmbedding.py.
    """

    name: ClassVar[str] = "pi"
    summary: ClassVar[str] = "divide every frequency by the factor"
    source: ClassVar[str] = "arXiv:2306.15595"

    def frequencies(self, rope: RopeSpec, length: int) -> Frequencies:
        return Frequencies(plain_inv_freq(rope) / self.factor)

    def rope_parameters(self, rope: RopeSpec) -> dict[str, Any]:
        return {"rope_type": "linear", "rope_theta": rope.base, "factor": self.factor}
