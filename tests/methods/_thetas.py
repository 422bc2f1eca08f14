"""What the tests of the methods start from."""

from __future__ import annotations

import math

from ctxext.spec import RopeSpec


def thetas(rope: RopeSpec) -> list[float]:
    """Return the plain frequencies, one number at a time."""
    return [math.exp(-2 * i * math.log(rope.base) / rope.rotary_dim) for i in range(rope.rotary_dim // 2)]
