"""YaRN and its published variants."""

from __future__ import annotations

import json
import logging
import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ctxext.errors import InvalidParameterError
from ctxext.methods.formulas import index_that_turns
from ctxext.methods.ntk_by_parts import NTKByParts
from ctxext.methods.yarn import YaRN
from ctxext.spec import RopeSpec
from tests.methods._thetas import thetas

LLAMA_2 = RopeSpec(rotary_dim=128, base=1e4, trained_length=4096)


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize(("fast", "slow"), [(32, 1), (16, 0.5)])
@pytest.mark.parametrize("blend", ["frequency", "wavelength"])
def test_index_ramp(rope: RopeSpec, truncate: bool, fast: float, slow: float, blend: str) -> None:
    # A pair i turns L b^(-2i/d) / 2pi times in the window, so the pair that turns n times is a logarithm to b^(2/d).
    step = rope.base ** (2 / rope.rotary_dim)
    first, last = (math.log(rope.trained_length / (2 * math.pi * turns), step) for turns in (fast, slow))
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.rotary_dim - 1)
    expected = []
    for i, theta in enumerate(thetas(rope)):
        divided = min(1, max(0, (i - first) / (last - first)))
        if blend == "frequency":
            expected.append(divided * theta / 4 + (1 - divided) * theta)
        else:
            wavelength = divided * 4 * (2 * math.pi / theta) + (1 - divided) * 2 * math.pi / theta
            expected.append(2 * math.pi / wavelength)
    method = YaRN(factor=4, beta_fast=fast, beta_slow=slow, truncate=truncate, blend=blend)
    assert method.frequencies(rope, 7).inv_freq.tolist() == pytest.approx(expected, rel=1e-9)


def test_turns_ramp_is_the_papers_by_parts(rope: RopeSpec) -> None:
    yarn = YaRN(factor=4, ramp="turns", beta_fast=20, beta_slow=2).frequencies(rope, 7)
    parts = NTKByParts(factor=4, beta=20, alpha=2).frequencies(rope, 7)
    assert torch.equal(yarn.inv_freq, parts.inv_freq)


def test_deepseeks_two_weights_and_a_given_factor() -> None:
    assert YaRN(factor=40, mscale=1, mscale_all_dim=1).attention_scale == 1
    expected = (1 + 0.0707 * math.log(40)) / (1 + 0.1 * math.log(40))
    assert YaRN(factor=40, mscale=0.707, mscale_all_dim=1).attention_scale == pytest.approx(expected, rel=1e-12)
    assert YaRN(factor=40, attention_factor=1).attention_scale == 1


STOCK_VARIANTS: list[dict[str, Any]] = [
    *({"beta_fast": fast, "beta_slow": slow} for fast, slow in ((16, 2), (1.05, 1), (600, 64))),
    *({"truncate": False}, {"attention_factor": 1}, {"mscale": 0.707, "mscale_all_dim": 1}, {"ramp": "turns"}),
    *({"blend": "wavelength"}, {"blend": "wavelength", "attention_factor": 1.5}),
]


def require_stock(rope: RopeSpec, method: YaRN, rope_type: str) -> None:
    """Hold frequencies and temperature to what stock transformers computes from the stored form."""
    parameters, target = json.loads(json.dumps(method.rope_parameters(rope))), 4 * rope.trained_length
    assert parameters["rope_type"] == rope_type
    config = LlamaConfig(head_dim=rope.rotary_dim, max_position_embeddings=target, rope_parameters=parameters)
    inv_freq, scale = ROPE_INIT_FUNCTIONS[rope_type](config)
    expected = method.frequencies(rope, 7)
    torch.testing.assert_close(inv_freq.double(), expected.inv_freq, rtol=1e-5, atol=0)
    assert scale == pytest.approx(expected.attention_scale, rel=1e-12)


@pytest.mark.parametrize("variant", STOCK_VARIANTS, ids=str)
def test_variants_are_the_same_in_stock_transformers(
    rope: RopeSpec, variant: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variant.get("beta_slow", 1) > rope.trained_length / (2 * math.pi):
        pytest.skip("refused, see test_slow_threshold_beyond_the_fastest_frequency")
    messages: list[str] = []
    monkeypatch.setattr(logging.getLogger("transformers.modeling_rope_utils"), "warning", messages.append)
    is_stock_yarn = not variant.keys() & {"ramp", "blend"}
    require_stock(rope, YaRN(factor=4, **variant), "yarn" if is_stock_yarn else "longrope")
    assert messages == []


@pytest.mark.parametrize(
    ("rope", "method"),
    [
        (RopeSpec(rotary_dim=8, base=1e4, trained_length=64), YaRN(factor=4, beta_slow=64 / (2 * math.pi))),
        (RopeSpec(rotary_dim=64, base=1e4, trained_length=131072), YaRN(factor=4)),
        (LLAMA_2, YaRN(factor=4, divisor=3, beta_slow=0.5, beta_fast=2)),
    ],
    ids=["both ends at the first pair", "last end behind the last pair", "a divisor of its own"],
)
def test_clamped_ends_and_divisors_are_those_of_stock_transformers(rope: RopeSpec, method: YaRN) -> None:
    require_stock(rope, method, "yarn")


def test_stock_form_has_no_key_that_is_a_default() -> None:
    written = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 4096}
    assert YaRN(factor=4).rope_parameters(LLAMA_2) == written


def test_slow_threshold_beyond_the_fastest_frequency() -> None:
    tiny = RopeSpec(rotary_dim=8, base=1e4, trained_length=6)
    with pytest.raises(InvalidParameterError, match=r"beta_slow must be at most trained_length / 2 pi \(0\.9549\)"):
        YaRN(factor=4).frequencies(tiny, 7)
    assert YaRN(factor=4, ramp="turns").frequencies(tiny, 7).inv_freq[0].item() == pytest.approx(1 / 4, rel=1e-12)


@pytest.mark.parametrize(("trained", "target"), [(200_000, 211_968), (8192, 32_768), (8192, 10_001)])
def test_the_stock_form_reaches_the_target(trained: int, target: int) -> None:
    """Older vLLMs multiply the two and refuse a longer text, and 200000 * (211968 / 200000) is below 211968."""
    for factor in (target / trained, round(target / trained, 8)):
        form = YaRN(factor=factor).rope_parameters(RopeSpec(rotary_dim=16, base=1e4, trained_length=trained))
        assert form["original_max_position_embeddings"] * form["factor"] >= YaRN(factor=factor).target_length(trained)
        assert form["factor"] == pytest.approx(factor, rel=1e-15)


def test_a_divisor_of_its_own_is_the_factor_of_the_stock_form(rope: RopeSpec) -> None:
    """The target stays what the factor says; frequencies and temperature are those of YaRN at the divisor."""
    own, as_published = YaRN(factor=4, divisor=3), YaRN(factor=3)
    found, expected = (one.frequencies(rope, 4 * rope.trained_length) for one in (own, as_published))
    assert torch.equal(found.inv_freq, expected.inv_freq)
    assert found.attention_scale == expected.attention_scale == pytest.approx(1 + 0.1 * math.log(3))
    assert own.rope_parameters(rope) == as_published.rope_parameters(rope)
    assert own.target_length(1000) == 4000
    assert YaRN.from_dict(own.to_dict()) == own
    assert "divisor" not in YaRN(factor=4).to_dict(), "what was saved and measured before it existed keeps its form"


@pytest.mark.parametrize(
    ("turns_of_pairs", "turns", "index"),
    [
        *(((64, 16, 2, 0.5), turns, index) for turns, index in ((32.0, 0.5), (1.0, 2.5), (128.0, -0.5), (0.25, 3.5))),
        ((64, 16, 2, 0.5), 8.0, 1 + 1 / 3),  # 16 is twice 8, and 8 = 2^3 times 2
        ((64, 16, 32, 2), 8.0, 2 + 1 / 3),  # the first slow pair counts: the third is as the second
        ((4, 4, 4, 4), 2.0, 3.0),
    ],
)
def test_the_pair_that_turns_so_often_among_scaled_frequencies(
    turns_of_pairs: tuple[float, ...], turns: float, index: float
) -> None:
    scaled = tuple(each * 2 * math.pi / 4096 for each in turns_of_pairs)
    rope = RopeSpec(rotary_dim=8, base=10000.0, trained_length=4096, inv_freq=scaled)
    assert index_that_turns(rope, turns) == pytest.approx(index)


def test_one_scaled_pair_has_no_other_to_measure_by() -> None:
    with pytest.raises(InvalidParameterError, match="rotary_dim"):
        index_that_turns(RopeSpec(rotary_dim=2, base=10000.0, trained_length=4096, inv_freq=(0.5,)), 1.0)
