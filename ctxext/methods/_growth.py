"""Methods whose positions follow the length of the sequence, and how closely they follow it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ctxext.methods.base import Method, require

__all__ = ["GrowingMethod"]

CHOICES = ("exact", "doubling")


@dataclass(frozen=True, kw_only=True)
class GrowingMethod(Method):
    """A method that stretches a sequence beyond the trained window by as much as it needs.

    Args:
        growth: "exact" follows every token, as the papers do, and a cache must be recomputed at every step beyond the
            window; "doubling" rounds the length up to trained_length times a power of two, so that this is rare.
    """

    growth: str = "exact"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.growth in CHOICES, "growth", self.growth, "'exact' or 'doubling'")

    @property
    def dynamic(self) -> bool:
        return True

    def regime(self, trained_length: int, length: int) -> int:
        if length <= trained_length:
            return trained_length
        if self.growth == "exact":
            return length
        return int(trained_length * 2 ** math.ceil(math.log2(length / trained_length)))
