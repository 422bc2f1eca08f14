"""How many units fit a number of tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable

__all__ = ["largest_fit"]

GUESSES = 8


def largest_fit(
    tokens: Callable[[int], int], least: int, room: int, *, most: int | None = None, near: int | None = None
) -> int:
    """The size whose text fits ``room`` tokens while that of the next size does not.

    A text is almost, but not exactly, proportional to its size, since words are drawn anew for every size. So the next
    size to try is interpolated, and what is returned has been counted: it fits, and one unit more does not.

    Args:
        tokens: tokens of the text of a size.
        least: a size that is known to fit.
        room: tokens.
        most: the largest size there is; returned if it fits.
        near: a size that is probably near to the one wanted; saves time where counting tokens takes long.
    """
    low, at_low, step = least, tokens(least), max(1, least if near is None else near - least)
    while True:
        high = low + step if most is None else min(low + step, most)
        if high == low:
            return low
        at_high = tokens(high)
        if at_high > room:
            break
        per_token = (high - low) / max(1, at_high - at_low)
        step = min(round(1.02 * (room - at_high) * per_token) + step // 8 + 1, 8 * high)
        low, at_low = high, at_high
    for attempt in itertools.count():
        if high - low == 1:
            return low
        part = (room - at_low) / (at_high - at_low) if attempt < GUESSES else 0.5
        size = min(max(low + int(part * (high - low)), low + 1), high - 1)
        found = tokens(size)
        if found > room:
            high, at_high = size, found
        else:
            low, at_low = size, found
    raise AssertionError  # the count has no end
