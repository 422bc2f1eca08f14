"""NTK-aware scaling."""

from __future__ import annotations

import pytest

from ctxext.methods.ntk import NTK
from ctxext.spec import RopeSpec
from tests.methods._thetas import thetas


@pytest.mark.parametrize("factor", [1, 2, 8.5])
def test_stretch_grows_geometrically_from_one_to_the_factor(rope: RopeSpec, factor: float) -> None:
    plain = thetas(rope)
    last = len(plain) - 1
    expected = [theta / factor ** (i / last) for i, theta in enumerate(plain)]
    found = NTK(factor=factor).frequencies(rope, 7)
    assert found.inv_freq.tolist() == pytest.approx(expected, rel=1e-12)
    assert found.attention_scale == 1


def test_the_base_of_the_papers_factor_two() -> None:
    assert NTK(factor=2).rope_parameters(RopeSpec(128, 1e4, 4096))["rope_theta"] == pytest.approx(20_221, abs=1)
