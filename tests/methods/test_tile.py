"""Copies of the learned rows, end to end."""

from __future__ import annotations

import numpy as np
import pytest

from ctxext.methods.tile import Tiling


@pytest.mark.parametrize(("trained", "target"), [(8, 32), (5, 7), (512, 4096)])
def test_rows_are_copies_end_to_end(trained: int, target: int) -> None:
    table = np.random.default_rng(0).normal(size=(trained, 3))
    indices, weights = Tiling(factor=target / trained).rows(trained, target)
    found = np.einsum("ij,ijd->id", weights.numpy(), table[indices.numpy()])
    assert np.array_equal(found, np.concatenate([table] * (target // trained + 1))[:target])
