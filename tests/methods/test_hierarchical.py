"""Su's positions of two digits, by the formula of his post."""

from __future__ import annotations

import numpy as np
import pytest

from ctxext.methods.hierarchical import Hierarchical


def posts_formula(table: np.ndarray, alpha: float, target: int) -> np.ndarray:
    """``q_(i, j) = alpha u_i + (1 - alpha) u_j`` with ``u = (p - alpha p_0) / (1 - alpha)``, row by row."""
    basis = (table - alpha * table[0]) / (1 - alpha)
    pairs = [alpha * high + (1 - alpha) * low for high in basis for low in basis]
    return np.stack(pairs[:target])


@pytest.mark.parametrize("alpha", [0.4, 0.1, 0.7])
@pytest.mark.parametrize(("trained", "target"), [(8, 64), (5, 7), (20, 113)])
def test_rows_are_those_of_the_post(alpha: float, trained: int, target: int) -> None:
    table = np.random.default_rng(0).normal(size=(trained, 3))
    indices, weights = Hierarchical(factor=target / trained, alpha=alpha).rows(trained, target)
    found = np.einsum("ij,ijd->id", weights.numpy(), table[indices.numpy()])
    np.testing.assert_allclose(found, posts_formula(table, alpha, target), rtol=1e-12, atol=1e-12)
    assert np.array_equal(found[:trained], table), "the learned rows stay bit for bit"


def test_rows_are_all_different() -> None:
    table = np.random.default_rng(0).normal(size=(6, 4))
    indices, weights = Hierarchical(factor=6).rows(6, 36)
    found = np.einsum("ij,ijd->id", weights.numpy(), table[indices.numpy()])
    assert len(np.unique(found.round(9), axis=0)) == 36
