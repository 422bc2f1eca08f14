"""The scaling of Llama 3.1."""

from __future__ import annotations

import math

import pytest

from ctxext.methods.llama3 import Llama3
from ctxext.spec import RopeSpec
from tests.methods._thetas import thetas


@pytest.mark.parametrize(("low", "high"), [(1, 4), (0.5, 16)])
def test_long_waves_are_divided_short_ones_kept_and_the_rest_smoothed(rope: RopeSpec, low: float, high: float) -> None:
    found = Llama3(factor=8, low_freq_factor=low, high_freq_factor=high).frequencies(rope, 7)
    assert found.attention_scale == 1
    for theta, scaled in zip(thetas(rope), found.inv_freq.tolist(), strict=True):
        wavelength = 2 * math.pi / theta
        if wavelength < rope.trained_length / high:
            assert scaled == pytest.approx(theta, rel=1e-12)
        elif wavelength > rope.trained_length / low:
            assert scaled == pytest.approx(theta / 8, rel=1e-12)
        else:
            smooth = (rope.trained_length / wavelength - low) / (high - low)
            assert scaled == pytest.approx((1 - smooth) * theta / 8 + smooth * theta, rel=1e-12)
