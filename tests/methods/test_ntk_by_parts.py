"""NTK-by-parts interpolation."""

from __future__ import annotations

import math

import pytest

from ctxext.methods.ntk_by_parts import NTKByParts
from ctxext.spec import RopeSpec
from tests.methods._thetas import thetas


@pytest.mark.parametrize(("alpha", "beta"), [(1, 32), (0.25, 3)])
@pytest.mark.parametrize("factor", [1, 4, 32])
def test_the_papers_formula(rope: RopeSpec, factor: float, alpha: float, beta: float) -> None:
    expected = []
    for theta in thetas(rope):
        ratio = rope.trained_length / (2 * math.pi / theta)
        if ratio < alpha:
            gamma = 0.0
        elif ratio > beta:
            gamma = 1.0
        else:
            gamma = (ratio - alpha) / (beta - alpha)
        expected.append((1 - gamma) * theta / factor + gamma * theta)
    found = NTKByParts(factor=factor, alpha=alpha, beta=beta).frequencies(rope, 7)
    assert found.inv_freq.tolist() == pytest.approx(expected, rel=1e-12)
    assert found.attention_scale == 1
