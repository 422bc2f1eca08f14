"""Groups of positions that share a row."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ctxext.methods.group import Group


def test_a_whole_factor_repeats_each_row_as_often() -> None:
    table = np.random.default_rng(0).normal(size=(7, 3))
    indices, weights = Group(factor=4).rows(7, 28)
    found = np.einsum("ij,ijd->id", weights.numpy(), table[indices.numpy()])
    assert np.array_equal(found, np.repeat(table, 4, axis=0))


@pytest.mark.parametrize(("trained", "target"), [(5, 7), (512, 1000)])
def test_groups_differ_by_one_where_the_factor_is_not_whole(trained: int, target: int) -> None:
    indices, _ = Group(factor=target / trained).rows(trained, target)
    sizes = np.bincount(indices[:, 0].numpy(), minlength=trained)
    assert set(sizes) == {math.floor(target / trained), math.ceil(target / trained)}
    assert (indices[:, 0].diff() >= 0).all()
