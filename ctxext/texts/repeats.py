"""Measure, without a model, the share of a text that a longer window could predict better: repeats from afar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ctxext.errors import InvalidParameterError

STRING = 6
"""Tokens of a string that is looked for in the far part of a text."""
KEPT = 3, 4
"""The share of a window that a truncation holds before every token that it predicts; see ``tail_windows``."""


class Likeness(NamedTuple):
    """A class of texts that repeat about as much.

    Args:
        below: Upper bound of the share of repeats, above the bound of the class before.
        texts: Number of texts of docs/evidence/need.csv that it rests on.
        gain: Nats per token that twice the window gains on 95 percent of such texts, by their mean and deviation.
        said: Words for what such a text has to gain.
    """

    below: float
    texts: int
    gain: tuple[float, float]
    said: str


CLASSES = (
    Likeness(0.05, 27, (-0.06, 0.05), "little to gain"),
    Likeness(0.2, 14, (-0.21, 0.44), "may gain"),
    Likeness(1.0, 10, (-0.06, 1.13), "likely to gain"),
)


def likeness_of(share: float) -> Likeness:
    """Return the class of texts with this share of repeats."""
    return next((each for each in CLASSES if share < each.below), CLASSES[-1])


class Repeats(NamedTuple):
    """Tokens of a text beyond the window of a model, and the share of them that repeats from afar.

    Args:
        beyond: Tokens behind the first window.
        share: Share of these tokens that repeats from afar, 0 to 1; 0 where no token is beyond.
    """

    name: str
    tokens: int
    beyond: int
    share: float

    @property
    def verdict(self) -> str:
        """The answer to whether a longer window pays, with the reason."""
        return f"{likeness_of(self.share).said} ({100 * self.share:.1f} % repeat from afar)"


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
    """Return the repeats of a text in the tokens beyond a window: what a truncation to it would not hold."""
    beyond = max(0, len(ids) - window)
    return Repeats(name, len(ids), beyond, far_repeats(ids, kept(window), beyond) if beyond else 0.0)


def kept(window: int) -> int:
    """Return the tokens that a truncation to a window holds before every token that it predicts."""
    return max(1, window * KEPT[0] // KEPT[1])
