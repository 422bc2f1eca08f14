"""Long-CLIP's stretch, by its authors' loop."""

from __future__ import annotations

import numpy as np
import pytest

from ctxext.methods.stretch import Stretch


def authors_table(table: np.ndarray, keep: int) -> np.ndarray:
    """What ``load_from_clip`` makes for a factor of 4: four new rows for each step between two old ones."""
    rows = list(table[:keep])
    steps = [*np.diff(table[keep:], axis=0), table[-1] - table[-2]]
    for row, step in zip(table[keep:], steps, strict=True):
        rows += [row + quarter / 4 * step for quarter in range(4)]
    return np.stack(rows)


@pytest.mark.parametrize(("trained", "keep"), [(77, 20), (12, 0), (9, 7)])
def test_rows_are_those_of_long_clip(trained: int, keep: int) -> None:
    table = np.random.default_rng(0).normal(size=(trained, 3))
    expected = authors_table(table, keep)
    indices, weights = Stretch(factor=4, keep=keep).rows(trained, len(expected))
    found = np.einsum("ij,ijd->id", weights.numpy(), table[indices.numpy()])
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)
    assert np.array_equal(found[:keep], table[:keep])
