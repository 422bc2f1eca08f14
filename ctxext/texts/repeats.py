"""Measure, without a model, the share of a text that a longer window could predict better: repeats from afar."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ctxext.errors import InvalidParameterError

STRING = 6
"""Tokens of a string that is looked for in the far part of a text."""
FEW = 0.05
"""The share of repeats below which most texts gained nothing."""
# Least squares over the texts of docs/evidence/need.csv: the gain of Self-Extend by the share of repeats, its mean,
# the sum of squares about that, and the deviation of the rest times Student's quantile of 95 percent.
TEXTS, START, SLOPE, MEAN, SQUARES, WIDTH = 51, 0.02658, 1.31801, 0.08198, 0.93894, 0.33121


class Repeats(NamedTuple):
    """Tokens of a text beyond the window of a model, and the share of them that repeats from afar.

    Args:
        beyond: Tokens behind the first window.
        share: Share of those that repeats from afar, 0 to 1; 0 where no token is beyond.
    """

    name: str
    tokens: int
    beyond: int
    share: float

    @property
    def gain(self) -> tuple[float, float, float]:
        """The nats per token that twice the window is predicted to gain, and the interval of 95 percent of texts."""
        expected = START + SLOPE * self.share
        width = WIDTH * math.sqrt(1 + 1 / TEXTS + (self.share - MEAN) ** 2 / SQUARES)
        return expected, expected - width, expected + width

    @property
    def verdict(self) -> str:
        """The answer to whether a longer window pays, with the reason."""
        said = f"{100 * self.share:.1f} % repeat from beyond the window"
        if self.share < FEW:
            return f"little to gain ({said}, below {100 * FEW:.0f} %)"
        return f"{'likely to gain' if self.gain[1] > 0 else 'may gain'} ({said})"


def repeats_from_afar(ids: Sequence[int], window: int, last: int) -> list[bool]:
    """Tell which of the last tokens are in strings that stand more than ``window`` before, and nowhere nearer.

    Raises:
        InvalidParameterError: a number outside its range.
    """
    if window < 1 or not 1 <= last <= len(ids):
        raise InvalidParameterError(f"Need window >= 1 and 1 <= last <= {len(ids)}, found {window} and {last}.")
    seen: dict[tuple[int, ...], int] = {}
    covered = [False] * len(ids)
    for start in range(len(ids) - STRING + 1):
        string = tuple(ids[start : start + STRING])
        if start >= len(ids) - last and start - seen.get(string, start) > window:
            covered[start : start + STRING] = [True] * STRING
        seen[string] = start
    return covered[-last:]


def far_repeats(ids: Sequence[int], window: int, last: int) -> float:
    """Return the share of the last tokens that repeat from afar, see ``repeats_from_afar``."""
    return sum(repeats_from_afar(ids, window, last)) / last


def repeats_of(name: str, ids: Sequence[int], window: int) -> Repeats:
    """Return the repeats of a text beyond a window of ``window`` tokens, see ``far_repeats``."""
    beyond = max(0, len(ids) - window)
    return Repeats(name, len(ids), beyond, far_repeats(ids, window, beyond) if beyond else 0.0)
