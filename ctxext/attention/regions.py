"""Regions of the causal triangle as rectangles that a kernel computes without a mask: all pairs, or one causal half.

This is the only place that knows how. A text is cut into tiles of queries. In one tile a band has a staircase where
keys come into sight, one where they go out of it, and between the two a rectangle that every query of the tile sees::

            going out        seen by all         coming in
    query a   . # # #   # # # # # # # # # # #   # . . .
            . . # #   # # # # # # # # # # #   # # . .
    query b   . . . #   # # # # # # # # # # #   # # # #

Staircases are squares: ``CAUSAL`` where the first query sees one key and the last sees all, ``FADING`` where the first
sees all and the last one. Together they hold each pair of the region once, and no other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ctxext.errors import InvalidParameterError
from ctxext.spec import Band, Chunks, Region, Sinks

FULL, CAUSAL, FADING = "full", "causal", "fading"


class Rectangle(NamedTuple):
    """Queries and keys by their positions, as (start, stop), and which of their pairs belong to it.

    ``kind`` is ``FULL`` for all, ``CAUSAL`` in a square for key t and query t or later (counted inside it), ``FADING``
    for query t and key t or later.
    """

    query: tuple[int, int]
    key: tuple[int, int]
    kind: str

    @property
    def pairs(self) -> int:
        """How many pairs of a query and a key belong to it."""
        rows, columns = self.query[1] - self.query[0], self.key[1] - self.key[0]
        return rows * columns if self.kind == FULL else rows * (rows + 1) // 2


def tiles(regions: list[Region], first: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    """Cut queries ``first .. stop`` (positions) into tiles in which every region has the form above.

    A tile ends where a chunk does, and is no longer than the narrowest band. What stands before the first far key is
    one tile of any length, in which all regions but one are empty: there, attention is plain.

    Args:
        regions: of the pieces of a method.
        first: position of the first query.
        stop: position after the last.
        size: queries of a tile, at most; at least 1.
    """
    plain = min((_first_far(region) for region in regions), default=0)
    borders = {region.plain_before for region in regions if isinstance(region, Band | Sinks)}
    chunks = {region.size for region in regions if isinstance(region, Chunks)}
    bands = [region.stop - region.start for region in regions if isinstance(region, Band) and region.stop is not None]
    at = first
    while at < stop:
        end = min(stop, at + min([size, *bands])) if at >= plain else min(stop, plain)
        end = min([end, *(border for border in borders if border > at)])
        for chunk in chunks:
            end = min(end, (at // chunk + 1) * chunk)
        yield at, end
        at = end


def _first_far(region: Region) -> int:
    """The first query that is not treated as in plain causal attention, as far as this region knows."""
    if isinstance(region, Band):
        is_near = region.start == 0 and region.stop is not None
        return max(region.stop or 0, region.plain_before) if is_near else 1 << 62
    return region.size if isinstance(region, Chunks) else 1 << 62


def rectangles(region: Region, first: int, stop: int) -> Iterator[Rectangle]:
    """The rectangles of a region for one tile of queries, ``first .. stop`` (positions), over keys from position 0.

    Raises:
        InvalidParameterError: for a region of an unknown kind, or a tile that is longer than a band is wide.
    """
    if isinstance(region, Chunks):
        chunk = first // region.size - region.back
        low = 0 if region.older else max(0, chunk * region.size)
        if region.back == 0:
            yield from _coming(first, stop, low, stop, 0)
        elif chunk >= 0:
            yield from _some(Rectangle((first, stop), (low, (chunk + 1) * region.size), FULL))
    elif isinstance(region, Sinks):
        if first >= region.plain_before:
            yield from _coming(first, stop, 0, region.count, region.start)
    elif isinstance(region, Band) and first < region.plain_before:
        if region.start == 0:
            yield from _coming(first, stop, 0, stop, 0)
    elif isinstance(region, Band):
        low = region.skip if region.stop is None else max(region.skip, stop - region.stop)
        if region.stop is not None and low > region.skip:
            if stop - first > region.stop - region.start:
                raise InvalidParameterError(
                    f"A tile of {stop - first} queries is longer than the {region.stop - region.start} tokens of its "
                    f"band. Cut it by tiles()."
                )
            yield from _going(first, stop, low, region.stop, region.skip)
        yield from _coming(first, stop, low, stop - region.start, region.start)
    else:
        raise InvalidParameterError(f"A region must be a Band, Chunks or Sinks, found {type(region).__name__}.")


def _coming(first: int, stop: int, low: int, high: int, back: int) -> Iterator[Rectangle]:
    """Keys ``low .. high`` that queries ``first .. stop`` see once they lie ``back`` tokens behind."""
    # Keys before it are seen by every query. The one that has just come into sight of the first query begins the
    # square; a single query has no use for one.
    middle = min(max(low, first - back + (stop - first == 1)), high)
    last = max(min(high, stop - back), middle)  # keys from it on are seen by none
    yield from _some(Rectangle((first, stop), (low, middle), FULL))
    yield from _some(Rectangle((middle + back, last + back), (middle, last), CAUSAL))
    yield from _some(Rectangle((last + back, stop), (middle, last), FULL))


def _going(first: int, stop: int, high: int, back: int, skip: int) -> Iterator[Rectangle]:
    """Keys ``skip .. high`` that queries ``first .. stop`` see as long as they lie less than ``back`` tokens behind."""
    low = max(skip, first - back + 1)  # the first key that the first query sees
    turning = low + back - 1  # the last query that sees it
    yield from _some(Rectangle((first, turning), (low, high), FULL))
    yield from _some(Rectangle((turning, high + back - 1), (low, high), FADING))


def _some(found: Rectangle) -> Iterator[Rectangle]:
    """The rectangle, unless it is empty."""
    if found.query[0] < found.query[1] and found.key[0] < found.key[1]:
        yield found
