"""Student's distribution: how many standard errors a difference must exceed when few units stand behind the error."""

from __future__ import annotations

import functools
import math

from ctxext.errors import InvalidParameterError

__all__ = ["CHANCE", "students_quantile"]

# Of calling a difference a finding where there is none.
CHANCE = 0.05


@functools.lru_cache(maxsize=1024)
def students_quantile(chance: float, degrees: int) -> float:
    """The t that Student's distribution exceeds, to either side, with probability ``chance``.

    Args:
        chance: two-sided, above 0 and below 1.
        degrees: of freedom, at least 1: the number of independent units minus one.

    Raises:
        InvalidParameterError: an argument out of range.

    Source: the finite sums for whole degrees of freedom, Abramowitz & Stegun, 26.7.3 and 26.7.4, inverted by bisection
        over the angle, to machine precision.
    """
    if not 0 < chance < 1 or degrees < 1:
        raise InvalidParameterError(
            f"chance must be between 0 and 1 and degrees at least 1, found {chance}, {degrees}."
        )
    low, high = 0.0, math.pi / 2
    while True:
        middle = (low + high) / 2
        if middle in (low, high):
            return math.tan(middle) * math.sqrt(degrees)
        if _within(middle, degrees) < 1 - chance:
            low = middle
        else:
            high = middle


def _within(angle: float, degrees: int) -> float:
    """The probability that |t| is below ``tan(angle) * sqrt(degrees)``."""
    sine, square = math.sin(angle), math.cos(angle) ** 2
    odd = degrees % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for k in range(1 + odd, degrees, 2):
        total += term
        term *= square * k / (k + 1)
        if term < 1e-18 * total:
            break
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
