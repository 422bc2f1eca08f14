"""Cut regions of the causal triangle into rectangles that a kernel computes without a mask: full, or one causal half.

A text is cut into tiles of queries. In one tile a band has a staircase of keys that come into sight, a staircase of
keys that go out of sight, and between the two a rectangle that every query of the tile sees::

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
    """Queries and keys by their positions, as (start, stop), and the kind of pairs that belong to the rectangle.

    ``kind`` is ``FULL`` for all pairs; ``CAUSAL``, in a square, for key t and query t or later (counted inside it);
    ``FADING`` for query t and key t or later.
    """

    query: tuple[int, int]
    key: tuple[int, int]
    kind: str

    @property
    def pairs(self) -> int:
        """Number of pairs of a query and a key in the rectangle."""
        rows, columns = self.query[1] - self.query[0], self.key[1] - self.key[0]
        return rows * columns if self.kind == FULL else rows * (rows + 1) // 2


def tiles(regions: list[Region], first: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    """Cut queries ``first .. stop`` (positions) into tiles in which every region has the form above.

    A tile ends at the end of a chunk, and is no longer than the narrowest band. Queries before the first far key are
    one tile of any length, in which all regions except one are empty: attention is plain there.

    Args:
        regions: the regions of a method's pieces.
        first: position of the first query.
        stop: position after the last query.
        size: largest number of queries in a tile; at least 1.
    """
    plain = min((_first_far(region) for region in regions), default=0)
    borders = {region.plain_before for region in regions if isinstance(region, Band | Sinks)}
    chunks = {region.size for region in regions if isinstance(region, Chunks)}
    bands = [region.stop - region.start for region in regions if isinstance(region, Band) and region.stop is not None]
    start = first
    while start < stop:
        end = min(stop, start + min([size, *bands])) if start >= plain else min(stop, plain)
        end = min([end, *(border for border in borders if border > start)])
        for chunk in chunks:
            end = min(end, (start // chunk + 1) * chunk)
        yield start, end
        start = end


def _first_far(region: Region) -> int:
    """Return the first query for which this region differs from plain causal attention."""
    if isinstance(region, Band):
        is_near = region.start == 0 and region.stop is not None
        return max(region.stop or 0, region.plain_before) if is_near else 1 << 62
    return region.size if isinstance(region, Chunks) else 1 << 62


def rectangles(region: Region, first: int, stop: int) -> Iterator[Rectangle]:
    """Yield the rectangles of a region for one tile of queries, ``first .. stop`` (positions), over keys from 0.

    Raises:
        InvalidParameterError: if the region's kind is unknown, or the tile is longer than a band is wide.
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
    """Yield rectangles of keys ``low .. high`` that queries ``first .. stop`` see from ``back`` tokens behind on."""
    # Every query sees the keys before ``middle``. The key that has just come into sight of the first query begins the
    # causal square; a single query needs no square.
    middle = min(max(low, first - back + (stop - first == 1)), high)
    last = max(min(high, stop - back), middle)  # no query sees the keys from here on
    yield from _some(Rectangle((first, stop), (low, middle), FULL))
    yield from _some(Rectangle((middle + back, last + back), (middle, last), CAUSAL))
    yield from _some(Rectangle((last + back, stop), (middle, last), FULL))


def _going(first: int, stop: int, high: int, back: int, skip: int) -> Iterator[Rectangle]:
    """Yield rectangles of keys ``skip .. high`` that queries ``first .. stop`` see less than ``back`` tokens behind."""
    low = max(skip, first - back + 1)  # the first key that the first query sees
    turning = low + back - 1  # the last query that sees this key
    yield from _some(Rectangle((first, turning), (low, high), FULL))
    yield from _some(Rectangle((turning, high + back - 1), (low, high), FADING))


def _some(rectangle: Rectangle) -> Iterator[Rectangle]:
    """Yield the rectangle, unless it is empty."""
    if rectangle.query[0] < rectangle.query[1] and rectangle.key[0] < rectangle.key[1]:
        yield rectangle
