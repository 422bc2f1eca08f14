"""T5's buckets of distances, reaching further: the numbers."""

from __future__ import annotations

import math

import pytest
import torch

from ctxext.methods.stretch_buckets import StretchBuckets
from ctxext.models.buckets import buckets_of
from ctxext.spec import BucketSpec

SPEC = BucketSpec(buckets=32, max_distance=128, trained_length=512)


@pytest.mark.parametrize(("factor", "expected"), [(1, 128), (1.5, 192), (4, 512), (2.003, 256)])
def test_the_last_bucket_begins_factor_times_further_back(factor: float, expected: int) -> None:
    found = StretchBuckets(factor=factor).max_distance(SPEC)
    assert (found, type(found)) == (expected, int)


def paper(distance: int, *, buckets: int, max_distance: int, both_ways: bool) -> float:
    """The bucket of one distance, one number at a time, from the words of the paper and the authors' code."""
    first, each = (buckets // 2 if both_ways and distance > 0 else 0), buckets // (2 if both_ways else 1)
    back = abs(distance) if both_ways else max(-distance, 0)
    if back < each // 2:
        return first + back
    share = math.log(2 * back / each) / math.log(2 * max_distance / each)
    return first + min(each // 2 * (1 + share), each - 1)


@pytest.mark.parametrize("both_ways", [True, False])
@pytest.mark.parametrize("max_distance", [128, 512, 200])
def test_buckets_are_those_of_the_paper(max_distance: int, both_ways: bool) -> None:
    given = {"buckets": 32, "max_distance": max_distance, "both_ways": both_ways}
    distances = range(-max_distance - 5, max_distance + 6)
    found = buckets_of(torch.tensor(distances, dtype=torch.float64), **given)  # type: ignore[arg-type]
    assert found.tolist() == pytest.approx([paper(distance, **given) for distance in distances], rel=1e-12)  # type: ignore[arg-type]


@pytest.mark.parametrize(("both_ways", "exact"), [(True, 8), (False, 16)])
def test_near_distances_keep_their_buckets_and_far_ones_are_told_apart(both_ways: bool, exact: int) -> None:
    back = -torch.arange(4 * 128, dtype=torch.float64)
    before, after = (
        buckets_of(back, buckets=32, max_distance=reach, both_ways=both_ways).floor().tolist() for reach in (128, 512)
    )
    assert before[: exact + 1] == after[: exact + 1]
    assert len(set(before[128:])) == 1
    assert len(set(after[128:])) > 2
    assert after == sorted(after)
