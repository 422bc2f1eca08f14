"""The parameter ``clip``: the slowest pairs slow to a stop after YaRN, NTK and ABF."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import ctxext
from ctxext.methods.abf import ABF
from ctxext.methods.formulas import clipped, plain_inv_freq
from ctxext.methods.ntk import NTK
from ctxext.methods.table import Table
from ctxext.methods.yarn import YaRN
from ctxext.spec import RopeSpec
from tests._models import logits, tiny, tokens
from tests._products import crossed
from tests.methods._thetas import thetas

WHOLE = {"yarn": YaRN, "ntk": NTK, "abf": ABF}


def shares(pairs: int, clip: int) -> list[float]:
    """1 for every pair but the last ``clip``, whose shares fall as cos^2 from 0 to a quarter of a turn."""
    return [math.cos(max(0, i - (pairs - clip)) / (clip - 1) * math.pi / 2) ** 2 for i in range(pairs)]


def unturned(thetas: list[float], trained: int) -> int:
    """Number of pairs whose period, in tokens, exceeds the trained length."""
    return sum(2 * math.pi / theta > trained for theta in thetas)


@pytest.mark.parametrize("clip", [2, 4, "auto", "all"])
def test_the_last_pairs_fall_by_half_a_wave(rope: RopeSpec, clip: Any) -> None:
    plain = thetas(rope)
    clip = len(plain) if clip == "all" else clip
    count = unturned(plain, rope.trained_length) if clip == "auto" else clip
    found = clipped(rope, plain_inv_freq(rope), clip)
    expected = [theta * share for theta, share in zip(plain, shares(len(plain), count), strict=True)]
    assert found.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-20)
    assert found[-1] == 0
    assert found[-count] == pytest.approx(plain[-count], rel=1e-14)


def test_the_authors_clip_20_of_64() -> None:
    """As modeling_cope.py of hrlics/CoPE@ed52ba5 does on Llama 3, in its float32."""
    inv_freq = 1.0 / 500000.0 ** (torch.arange(0, 128, 2, dtype=torch.float32) / 128)
    wave = torch.linspace(0.0, torch.pi, steps=20, dtype=torch.float32)
    inv_freq[44:] = inv_freq[44:] * (0.5 * (1.0 + torch.cos(wave)))
    rope = RopeSpec(128, 5e5, 8192)
    found = clipped(rope, plain_inv_freq(rope), 20)
    # 1 + cos loses digits near the end of the wave.
    torch.testing.assert_close(found, inv_freq.double(), rtol=1e-4, atol=1e-12)


@pytest.mark.parametrize("clip", [3, "auto"])
@pytest.mark.parametrize("name", WHOLE)
def test_the_taper_comes_after_another_method(name: str, clip: Any, rope: RopeSpec) -> None:
    whole = WHOLE[name](factor=4).frequencies(rope, 7)
    count = unturned(thetas(rope), rope.trained_length) if clip == "auto" else clip
    expected = [f * share for f, share in zip(whole.inv_freq.tolist(), shares(len(whole.inv_freq), count), strict=True)]
    method = WHOLE[name](factor=4, clip=clip)
    found = method.frequencies(rope, 7)
    assert found.inv_freq.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-20)
    assert found.attention_scale == whole.attention_scale
    table = Table(factor=4, inv_freq=found.inv_freq.tolist(), attention_scale=found.attention_scale)
    assert method.rope_parameters(rope) == table.rope_parameters(rope)


@pytest.mark.parametrize("name", WHOLE)
def test_what_clips_nothing_is_saved_as_before_there_was_clipping(name: str) -> None:
    assert "clip" not in WHOLE[name](factor=4).to_dict()
    assert WHOLE[name](factor=4, clip="auto").to_dict()["clip"] == "auto"
    assert WHOLE[name].from_dict(WHOLE[name](factor=4, clip=5).to_dict()) == WHOLE[name](factor=4, clip=5)


def test_latent_attention_gets_the_temperature_on_cos_and_sin_where_yarn_is_clipped() -> None:
    method = YaRN(factor=4, clip=4)
    assert method.for_latent_attention() is method


def test_frequencies_of_the_training_count_where_they_were_scaled() -> None:
    scaled = (0.5, 0.1, 0.004, 0.003, 0.002)
    rope = RopeSpec(rotary_dim=10, base=1e4, trained_length=1024, inv_freq=scaled)
    found = clipped(rope, plain_inv_freq(rope), "auto").tolist()
    assert found == pytest.approx([0.5, 0.1, 0.004, 0.0015, 0.0], abs=1e-18)
    assert unturned(list(scaled), 1024) == 3


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "method"), crossed(["glm", "llama", "qwen2"], ["yarn", "ntk", "abf"]))
def test_stock_transformers_loads_it(tmp_path: Any, model_type: str, method: str) -> None:
    model = ctxext.patch(tiny(model_type), method, factor=4.0, clip="auto")
    assert not torch.equal(logits(model, tokens()), logits(tiny(model_type), tokens()))
    model.save_pretrained(tmp_path)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert "ctxext" not in type(stock.model.rotary_emb).__module__
    assert torch.equal(logits(stock, tokens()), logits(model, tokens()))
    ctxext.unpatch(model)
    assert torch.equal(logits(model, tokens()), logits(tiny(model_type), tokens()))


def test_a_stopped_pair_turns_in_no_text() -> None:
    """The stored divisor of 1e30 is a frequency of 0 in float32, at any position."""
    model = ctxext.patch(tiny(head_dim=16), "ntk", factor=4, clip="auto")
    cos, sin = model.model.rotary_emb(torch.zeros(1), torch.tensor([[0, 1, 10**6]]))
    assert (cos[..., 7] == 1).all()
    assert (sin[..., 7].abs() < 1e-20).all()
