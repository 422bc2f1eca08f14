"""Dynamic NTK scaling."""

from __future__ import annotations

import pytest
import torch

from ctxext.methods.dynamic_ntk import DynamicNTK
from ctxext.methods.ntk import NTK
from ctxext.spec import RopeSpec
from tests.methods._thetas import thetas


@pytest.mark.parametrize("factor", [1, 2, 4])
@pytest.mark.parametrize("ratio", [0.5, 1, 1.25, 4])
def test_stretch_follows_the_length(rope: RopeSpec, factor: float, ratio: float) -> None:
    length = int(rope.trained_length * ratio)
    stretch = max(1.0, 1 + factor * (length - rope.trained_length) / rope.trained_length)
    plain = thetas(rope)
    expected = [theta * stretch ** (-i / (len(plain) - 1)) for i, theta in enumerate(plain)]
    found = DynamicNTK(factor=factor).frequencies(rope, length)
    assert found.inv_freq.tolist() == pytest.approx(expected, rel=1e-12)
    assert found.attention_scale == 1


def test_the_papers_form_is_ntk_with_the_current_stretch(rope: RopeSpec) -> None:
    dynamic = DynamicNTK(factor=1, reach=8).frequencies(rope, 8 * rope.trained_length)
    torch.testing.assert_close(dynamic.inv_freq, NTK(factor=8).frequencies(rope, 1).inv_freq, rtol=1e-12, atol=0)


@pytest.mark.parametrize(("factor", "reach", "target"), [(1, None, 64), (2, None, 128), (1, 8, 512), (2, 1.5, 96)])
def test_reach_is_the_promise_and_defaults_to_the_factor(factor: float, reach: float | None, target: int) -> None:
    assert DynamicNTK(factor=factor, reach=reach).target_length(64) == target
