"""Position Interpolation by the current length."""

from __future__ import annotations

import pytest

from ctxext.methods.dynamic_pi import DynamicPI
from ctxext.spec import AlibiSpec, RopeSpec
from tests.methods._thetas import thetas


@pytest.mark.parametrize("ratio", [0.25, 1, 1.5, 6])
def test_the_last_position_never_leaves_the_trained_window(rope: RopeSpec, ratio: float) -> None:
    length = int(ratio * rope.trained_length)
    angles = DynamicPI(factor=4).frequencies(rope, length).inv_freq * length
    expected = [min(length, rope.trained_length) * theta for theta in thetas(rope)]
    assert angles.tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("length", "squeeze"), [(16, 1), (64, 1), (96, 1.5), (256, 4)])
def test_slopes_are_divided_alike(length: int, squeeze: float) -> None:
    slopes = DynamicPI(factor=4).slopes(AlibiSpec(2, 64, (0.75, 0.1)), length)
    assert slopes.tolist() == pytest.approx([0.75 / squeeze, 0.1 / squeeze], rel=1e-12)
