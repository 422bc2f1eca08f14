"""How far a proportion that was seen in a few trials may be from the true one."""

from __future__ import annotations

import math

from ctxext.errors import InvalidParameterError

__all__ = ["wilson_interval"]


def wilson_interval(mean: float, trials: int, *, z: float = 1.96) -> tuple[float, float]:
    """Bounds of the true mean of outcomes from 0 to 1, after ``trials`` of them with this mean.

    For yes-or-no outcomes it is Wilson's score interval, which keeps its promise for few trials and at 0 and 1, where
    the textbook interval has no width. Outcomes in between vary less, so that for them it is wider than needed.

    Args:
        mean: of the outcomes seen, from 0 to 1.
        trials: at least 1.
        z: standard deviations of the normal distribution; 1.96 covers 95 percent.

    Raises:
        InvalidParameterError: an argument out of range.

    Source: Wilson, Journal of the American Statistical Association 22 (1927), 209-212.
    """
    if trials < 1 or not 0 <= mean <= 1:
        raise InvalidParameterError(
            f"An interval needs at least 1 trial and a mean from 0 to 1, found {trials} and {mean}."
        )
    weight = z**2 / trials
    centre = (mean + weight / 2) / (1 + weight)
    reach = z / (1 + weight) * math.sqrt(mean * (1 - mean) / trials + weight / (4 * trials))
    return max(0.0, centre - reach), min(1.0, centre + reach)
