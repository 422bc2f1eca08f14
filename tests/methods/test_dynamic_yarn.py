"""Dynamic YaRN."""

from __future__ import annotations

import math

import pytest
import torch

from ctxext.methods.dynamic_yarn import DynamicYaRN
from ctxext.methods.yarn import YaRN
from ctxext.spec import RopeSpec
from tests.methods._thetas import thetas


def test_plain_up_to_the_trained_length(rope: RopeSpec) -> None:
    for length in (1, rope.trained_length):
        found = DynamicYaRN(factor=8).frequencies(rope, length)
        assert found.inv_freq.tolist() == pytest.approx(thetas(rope), rel=1e-12)
        assert found.attention_scale == 1


@pytest.mark.parametrize("stretch", [2, 8, 16])
@pytest.mark.parametrize("variant", [{}, {"ramp": "turns"}, {"truncate": False, "beta_fast": 8, "beta_slow": 0.5}])
def test_beyond_it_is_yarn_with_the_stretch_of_the_text(rope: RopeSpec, stretch: int, variant: dict) -> None:
    found = DynamicYaRN(factor=8, **variant).frequencies(rope, stretch * rope.trained_length)
    expected = YaRN(factor=stretch, **variant).frequencies(rope, 7)
    assert torch.equal(found.inv_freq, expected.inv_freq)
    assert found.attention_scale == pytest.approx(1 + 0.1 * math.log(stretch), rel=1e-12)
