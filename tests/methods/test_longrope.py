"""LongRoPE."""

from __future__ import annotations

import pytest

from ctxext.methods.longrope import LongRoPE
from ctxext.spec import RopeSpec
from tests.methods._thetas import thetas

SPEC = RopeSpec(rotary_dim=8, base=1e4, trained_length=64)
SHORT, LONG = (1.0, 1.0, 1.05, 1.1), (1.0, 2.0, 3.5, 6.0)


@pytest.mark.parametrize(("length", "divisors"), [(1, SHORT), (64, SHORT), (65, LONG), (512, LONG)])
def test_long_factors_start_after_the_trained_length(length: int, divisors: tuple[float, ...]) -> None:
    found = LongRoPE(factor=8, short_factor=SHORT, long_factor=LONG).frequencies(SPEC, length)
    expected = [theta / divisor for theta, divisor in zip(thetas(SPEC), divisors, strict=True)]
    assert found.inv_freq.tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("factor", "trained_length", "scale"),
    [(4, 4096, 1.0801), (4, 8192, 1.0742), (8, 4096, 1.1180), (32, 4096, 1.1902), (1, 4096, 1)],
)
def test_attention_scale_of_the_published_models(factor: float, trained_length: int, scale: float) -> None:
    method = LongRoPE(factor=factor, short_factor=SHORT, long_factor=LONG)
    found = method.frequencies(RopeSpec(8, 1e4, trained_length), 7).attention_scale
    assert found == pytest.approx(scale, abs=5e-5)
    assert trained_length ** (found**2 - 1) == pytest.approx(factor, rel=1e-12)


def test_a_given_attention_factor_replaces_the_default() -> None:
    method = LongRoPE(factor=8, short_factor=SHORT, long_factor=LONG, attention_factor=2)
    assert method.frequencies(SPEC, 65).attention_scale == 2
    assert method.rope_parameters(SPEC)["attention_factor"] == 2


def test_dynamic_only_if_the_sets_differ() -> None:
    assert LongRoPE(short_factor=SHORT, long_factor=LONG).dynamic
    assert not LongRoPE(short_factor=LONG, long_factor=LONG).dynamic


def test_lists_from_a_config_become_tuples() -> None:
    pasted = LongRoPE(short_factor=[1, 1, 1.05, 1.1], long_factor=list(LONG))
    assert pasted == LongRoPE(short_factor=SHORT, long_factor=LONG)
    assert hash(pasted) == hash(LongRoPE(short_factor=SHORT, long_factor=LONG))
