"""Any frequencies, given as numbers."""

from __future__ import annotations

import math

from ctxext.methods.table import Table
from ctxext.methods.yarn import YaRN
from ctxext.spec import RopeSpec


def test_the_numbers_come_back(rope: RopeSpec) -> None:
    given = tuple(0.9 / (1 + i) for i in range(rope.rotary_dim // 2))
    for length in (1, 4 * rope.trained_length):
        found = Table(inv_freq=given, attention_scale=1.25).frequencies(rope, length)
        assert found.inv_freq.tolist() == list(given)
        assert found.attention_scale == 1.25


def test_another_method_written_out_is_that_method(rope: RopeSpec) -> None:
    yarn = YaRN(factor=4, ramp="turns")
    found = yarn.frequencies(rope, 7)
    table = Table(factor=4, inv_freq=found.inv_freq.tolist(), attention_scale=found.attention_scale)
    assert table.rope_parameters(rope) == yarn.rope_parameters(rope)


def test_a_pair_that_does_not_turn_is_stored_with_a_divisor_that_stops_it(rope: RopeSpec) -> None:
    half = rope.rotary_dim // 2
    stored = Table(inv_freq=(*(0.5 for _ in range(half - 1)), 0.0)).rope_parameters(rope)
    assert stored["long_factor"][-1] == stored["short_factor"][-1] == 1e30
    assert 0 < max(stored["long_factor"][:-1]) < 1e9
    assert math.cos(1e12 * 1.0 / stored["long_factor"][-1]) == 1.0
