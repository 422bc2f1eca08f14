"""Adjusted base frequency."""

from __future__ import annotations

import math

import pytest

from ctxext.methods.abf import ABF
from ctxext.spec import RopeSpec
from tests.methods._thetas import thetas


@pytest.mark.parametrize("factor", [1, 2, 16])
def test_one_turn_in_the_trained_window_becomes_one_in_the_target(rope: RopeSpec, factor: float) -> None:
    base = ABF(factor=factor).rope_parameters(rope)["rope_theta"]
    # The (fractional) pair whose wavelength is the trained window has the target window as its wavelength afterwards.
    pair = rope.rotary_dim / 2 * math.log(rope.trained_length / (2 * math.pi), rope.base)
    assert 2 * math.pi * base ** (2 * pair / rope.rotary_dim) == pytest.approx(rope.trained_length * factor, rel=1e-9)


def test_the_critical_base_of_llama_2_at_16k() -> None:
    # The number that Liu et al. give for 16K.
    assert ABF(factor=4).rope_parameters(RopeSpec(128, 1e4, 4096))["rope_theta"] == pytest.approx(71_738, abs=1)


def test_a_given_base_is_used(rope: RopeSpec) -> None:
    found = ABF(factor=4, base=2_000_000).frequencies(rope, 7)
    turns = [theta * (rope.base / 2e6) ** (2 * i / rope.rotary_dim) for i, theta in enumerate(thetas(rope))]
    assert found.inv_freq.tolist() == pytest.approx(turns, rel=1e-12)
    assert found.attention_scale == 1
