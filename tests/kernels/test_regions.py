"""Rectangles hold each pair of a region once and no other, and cost what plain causal attention costs."""

from __future__ import annotations

import random

import pytest
import torch

from ctxext.errors import InvalidParameterError
from ctxext.kernels.regions import CAUSAL, FULL, Rectangle, rectangles, tiles
from ctxext.methods.dual_chunk import DualChunk
from ctxext.methods.remap import Ahead, Band, Chunks, Region, Sinks
from ctxext.methods.rerope import ReRoPE
from ctxext.methods.self_extend import SelfExtend
from ctxext.methods.streaming import Streaming
from ctxext.spec import RopeSpec


def _pairs(found: Rectangle) -> torch.Tensor:
    """Which pairs of its queries and keys belong to a rectangle: ``[query, key]``."""
    rows, columns = found.query[1] - found.query[0], found.key[1] - found.key[0]
    whole = torch.ones(rows, columns, dtype=torch.long)
    if found.kind == CAUSAL:
        last = torch.arange(columns - rows, columns)[:, None] - torch.arange(columns)  # behind the newest that is seen
        return whole * ((last >= 0) & (last < (found.window or columns)))
    assert found.kind == FULL or rows == columns, "a fading staircase is a square"
    return whole if found.kind == FULL else whole.triu()


def _count(found: Rectangle) -> int:
    """How many pairs ``_pairs`` has where there is no window."""
    rows, columns = found.query[1] - found.query[0], found.key[1] - found.key[0]
    return rows * columns if found.kind == FULL else rows * (rows + 1) // 2 + (columns - rows) * rows


def _check(regions: list[Region], first: int, stop: int, size: int) -> None:
    """Of tokens that see the past, by kernels with bands too, and of tokens that see both ways."""
    _check_one_way(regions, first, stop, size)
    _check_one_way(regions, first, stop, size, bands=True)
    ahead: list[Region] = [Ahead(region) for region in regions if isinstance(region, Band | Chunks)]
    _check_one_way([*regions, *ahead], first, stop, size)


def _check_one_way(regions: list[Region], first: int, stop: int, size: int, *, bands: bool = False) -> None:
    at = first
    for start, end in tiles(regions, first, stop, size, bands=bands):
        assert start == at < end
        at = end
    assert at == stop
    for region in regions:
        seen = torch.zeros(stop - first, stop, dtype=torch.long)
        for start, end in tiles(regions, first, stop, size, bands=bands):
            for found in rectangles(region, start, end, stop, bands=bands):
                assert start <= found.query[0] < found.query[1] <= end
                seen[found.query[0] - first : found.query[1] - first, slice(*found.key)] += _pairs(found)
        held = region.holds(torch.arange(first, stop)[:, None], torch.arange(stop)[None])
        assert torch.equal(seen, held.long()), (region, first, stop, size)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(8))
def test_each_pair_of_a_region_is_in_one_rectangle(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(50):
        stop = draw.randint(1, 70)
        first, size = draw.randint(0, stop - 1), draw.randint(1, 30)
        window, chunk, middle = draw.randint(1, 80), draw.randint(1, 30), draw.randint(1, 20)
        _check([Band(0, window), Band(window)], first, stop, size)
        border = draw.randint(1, 60)
        _check([Band(0, window, border), Band(window, None, border)], first, stop, size)
        _check([Band(0, window), Sinks(draw.randint(1, 8), window)], first, stop, size)
        skip = draw.randint(0, 8)
        regions = [Band(0, window, border), Sinks(skip, window, border), Band(window, None, border, skip)]
        _check(regions, first, stop, size)
        _check([Band(0, middle), Sinks(skip, middle), Band(middle, middle + window, 0, skip)], first, stop, size)
        _check([Chunks(chunk, 0), Chunks(chunk, 1), Chunks(chunk, 2, older=True)], first, stop, size)
        _check([Band(0, middle), Band(middle, middle + window), Band(middle + window)], first, stop, size)


@pytest.mark.parametrize("longer", [2, 4, 8])
@pytest.mark.parametrize("cls", [SelfExtend, ReRoPE, DualChunk])
def test_kernels_see_as_many_scores_as_plain_causal_attention(cls: type[SelfExtend], longer: int) -> None:
    rope, length = RopeSpec(64, 1e5, 8192), 8192 * longer
    regions = [piece.region for piece in cls(factor=longer).pieces(rope, length)]
    scores = sum(
        _count(found)
        for start, stop in tiles(regions, 0, length, 1024)
        for region in regions
        for found in rectangles(region, start, stop)
    )
    assert scores == length * (length + 1) // 2


def test_streaming_sees_a_constant_number_of_keys() -> None:
    rope = RopeSpec(64, 1e5, 8192)
    regions = [piece.region for piece in Streaming(factor=8).pieces(rope, 65536)]
    for at in (20_000, 60_000):
        assert sum(_count(found) for region in regions for found in rectangles(region, at, at + 1)) == 8192


def test_what_stands_before_the_first_far_key_is_one_plain_square() -> None:
    """So that a text inside the window is computed by the very call that stock attention makes."""
    late: list[Region] = [Band(0, 6000, 8192), Band(6000, None, 8192)]
    assert next(tiles(late, 0, 16384, 1024)) == (0, 8192)
    assert [list(rectangles(region, 0, 8192)) for region in late] == [[Rectangle((0, 8192), (0, 8192), CAUSAL)], []]
    regions: list[Region] = [Band(0, 6000), Band(6000)]
    assert next(tiles(regions, 0, 16384, 1024)) == (0, 6000)
    assert list(rectangles(regions[0], 0, 6000)) == [Rectangle((0, 6000), (0, 6000), CAUSAL)]


class Odd(Region):
    """A region that nobody knows how to cut."""

    def holds(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return key <= query


def test_a_tile_that_is_too_long_and_a_strange_region_are_refused() -> None:
    with pytest.raises(InvalidParameterError, match="A tile of 20 queries is longer than the 10 tokens of its band"):
        list(rectangles(Band(0, 10), 50, 70))
    with pytest.raises(InvalidParameterError, match="must be a Band, Chunks or Sinks, found Odd"):
        list(rectangles(Odd(), 0, 1))
