"""Cut regions of pairs of tokens into rectangles that a kernel computes without a mask: full, or one causal half.

A text is cut into tiles of queries. In one tile a band has a staircase of keys that come into sight, a staircase of
keys that go out of sight, and between the two a rectangle that every query of the tile sees::

            going out        seen by all         coming in
    query a   . # # #   # # # # # # # # # # #   # . . .
            . . # #   # # # # # # # # # # #   # # . .
    query b   . . . #   # # # # # # # # # # #   # # # #

Staircases are squares: ``CAUSAL`` where the first query sees one key and the last sees all, ``FADING`` where the first
sees all and the last one. Together they hold each pair of the region once, and no other. Keys after their query lie a
negative number of tokens behind it, and form the same staircases.

A kernel that takes a window, and aligns causal attention to the last key, computes a whole band by one call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ctxext.errors import InvalidParameterError
from ctxext.kernels.spans import Extent
from ctxext.methods.remap import Ahead, Band, Chunks, Region, Sinks

FULL, CAUSAL, FADING = "full", "causal", "fading"

HIDDEN = 255
"""Number of no region, for pairs that none serves in a step of decoding."""

MOST_PIECES = 6
"""Regions that the kernel of a step knows."""


class Rectangle(NamedTuple):
    """Queries and keys by their positions, as (start, stop), and the kind of pairs that belong to the rectangle.

    ``kind`` is ``FULL`` for all pairs; ``CAUSAL`` where the last query sees all keys, and each query before it one key
    fewer; ``FADING``, in a square, for query t and key t or later (counted inside it). With a ``window``, each query of
    a causal rectangle sees at most its last ``window`` keys.
    """

    query: Extent
    key: Extent
    kind: str
    window: int | None = None


def tiles(regions: Sequence[Region], first: int, stop: int, size: int, *, bands: bool = False) -> Iterator[Extent]:
    """Cut queries ``first .. stop`` (positions) into tiles in which every region has the form above.

    A tile ends at the end of a chunk, and never exceeds the narrowest band. Queries before the first far key are
    one tile of any length, in which all regions except one are empty: attention is plain there. Where tokens see both
    ways, the first queries have far keys ahead, unless the whole text ends before the first far key.

    The last query, before ``stop``, is the last token of the text. A tile has at most ``size`` queries; at least 1.
    With ``bands``, for kernels that compute these whole, only plain queries and chunks end a tile.
    """
    behind = [region.of if isinstance(region, Ahead) else region for region in regions]
    plain = min((_first_far(region) for region in behind), default=0)
    if stop > plain and any(isinstance(region, Ahead) for region in regions):
        plain = 0
    borders = {region.plain_before for region in behind if isinstance(region, Band | Sinks)}
    chunks = {region.size for region in behind if isinstance(region, Chunks)}
    widths = [max(1, width) for region in regions if (width := _width(region)) is not None]
    start = first
    while start < stop:
        end = stop
        if not bands:
            end = min(stop, start + min([size, *widths])) if start >= plain else min(stop, plain)
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


def _width(region: Region) -> int | None:
    """Return the number of keys that a query sees in a band; None for other regions, and without an end."""
    band, nearest = (region.of, 1) if isinstance(region, Ahead) else (region, 0)
    return band.stop - max(band.start, nearest) if isinstance(band, Band) and band.stop is not None else None


def rectangles(
    region: Region, first: int, stop: int, length: int | None = None, *, bands: bool = False
) -> Iterator[Rectangle]:
    """Yield the rectangles of a region for one tile of queries, ``first .. stop`` (positions), over keys from 0.

    There are ``length`` keys; with None they end with the last query. With ``bands``, a band is one rectangle.

    Raises:
        InvalidParameterError: if the region's kind is unknown, or the tile is longer than a band is wide.
    """
    length = stop if length is None else length
    cut = _whole if bands else _between
    if isinstance(region, Ahead) and isinstance(region.of, Band | Chunks):
        yield from _ahead(region.of, first, stop, length)
    elif isinstance(region, Chunks):
        chunk = first // region.size - region.back
        low = 0 if region.older else max(0, chunk * region.size)
        yield from cut(first, stop, low, min(stop, (chunk + 1) * region.size), near=0, far=None)
    elif isinstance(region, Sinks):
        if first >= region.plain_before:
            yield from cut(first, stop, 0, region.count, near=region.start, far=None)
    elif isinstance(region, Band) and first < region.plain_before:
        if region.start == 0:
            yield from cut(first, stop, 0, stop, near=0, far=None)
    elif isinstance(region, Band):
        yield from cut(first, stop, region.skip, stop, near=region.start, far=region.stop)
    else:
        raise InvalidParameterError(f"A region must be a Band, Chunks or Sinks, found {type(region).__name__}.")


def _ahead(region: Band | Chunks, first: int, stop: int, length: int) -> Iterator[Rectangle]:
    """Yield the rectangles of ``Ahead(region)`` for one tile of queries."""
    if isinstance(region, Chunks):
        low = (first // region.size + region.back) * region.size
        high = length if region.older else min(length, low + region.size)
        yield from _between(first, stop, low, high, near=None, far=0)
        return
    plain = region.plain_before
    if region.start == 0 and first < plain:
        yield from _between(first, stop, 0, min(plain, length), near=None, far=0)
    near = None if region.stop is None else 1 - region.stop
    yield from _between(first, stop, plain, length, near=near, far=1 - max(1, region.start))


def _between(first: int, stop: int, low: int, high: int, *, near: int | None, far: int | None) -> Iterator[Rectangle]:
    """Yield rectangles of keys ``low .. high`` that lie ``near`` or more, and less than ``far``, tokens behind.

    None means without a bound, and a negative number of tokens behind means ahead.
    """
    if far is not None and low < (seen_by_all := min(high, stop - far)):
        if near is not None and seen_by_all > first + 1 - near and far > near:
            raise InvalidParameterError(
                f"A tile of {stop - first} queries is longer than the {far - near} tokens of its band. Cut it by "
                f"tiles()."
            )
        if near is None or far > near:
            yield from _going(first, seen_by_all, far, low)
        low = seen_by_all
    if near is None:
        yield from _some(Rectangle((first, stop), (low, high), FULL))
    else:
        yield from _coming(first, stop, low, min(high, stop - near), near)


def _whole(first: int, stop: int, low: int, high: int, *, near: int, far: int | None) -> Iterator[Rectangle]:
    """Yield the rectangles of ``_between`` for kernels with windows and aligned causal attention, of keys behind."""
    low = low if far is None else max(low, first - far + 1)
    first = max(first, low + near)  # the first query that sees a key
    last = max(first, min(stop, high + near))  # queries from here on see all keys
    window = None if far is None or far - near >= last - near - low else far - near
    causal = Rectangle((first, last), (low, last - near), FULL if last - first == 1 else CAUSAL, window)
    yield from _some(causal)
    yield from _some(Rectangle((last, stop), (low, high), FULL))


def _coming(first: int, stop: int, low: int, high: int, back: int) -> Iterator[Rectangle]:
    """Yield rectangles of keys ``low .. high`` that queries ``first .. stop`` see from ``back`` tokens behind on."""
    # Every query sees the keys before ``middle``. The key that has just come into sight of the first query begins the
    # causal square; a single query needs no square.
    middle = min(max(low, first - back + (stop - first == 1)), high)
    last = max(min(high, stop - back), middle)  # no query sees the keys from here on
    yield from _some(Rectangle((first, stop), (low, middle), FULL))
    yield from _some(Rectangle((middle + back, last + back), (middle, last), CAUSAL))
    yield from _some(Rectangle((last + back, stop), (middle, last), FULL))


def _going(first: int, high: int, back: int, skip: int) -> Iterator[Rectangle]:
    """Yield rectangles of keys ``skip .. high`` that queries from ``first`` on see less than ``back`` tokens behind."""
    low = max(skip, first - back + 1)  # the first key that the first query sees
    turning = low + back - 1  # the last query that sees this key
    yield from _some(Rectangle((first, turning), (low, high), FULL))
    yield from _some(Rectangle((turning, high + back - 1), (low, high), FADING))


def _some(rectangle: Rectangle) -> Iterator[Rectangle]:
    """Yield the rectangle, unless it is empty."""
    if rectangle.query[0] < rectangle.query[1] and rectangle.key[0] < rectangle.key[1]:
        yield rectangle
