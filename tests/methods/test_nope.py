"""No positions."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import ctxext
from ctxext.laboratory.pictures.frequencies import bands, shown_by_default, spectrum_picture, speed
from ctxext.methods.nope import NoPE
from ctxext.spec import RopeSpec
from tests._models import logits, tiny, tokens
from tests.walk.tiny import TRAINED_LENGTH


@pytest.mark.parametrize("factor", [1, 4, 32])
def test_no_pair_turns_at_any_length(rope: RopeSpec, factor: float) -> None:
    for length in (1, 10**9):
        found = NoPE(factor=factor).frequencies(rope, length)
        assert found.inv_freq.tolist() == [0.0] * (rope.rotary_dim // 2)
        assert found.attention_scale == 1


@pytest.mark.parametrize(("factor", "sharpening"), [(1, 0.4), (2, 0.103), (8, 0.412), (8, 0)])
def test_scores_are_multiplied_by_one_plus_c_ln_s(rope: RopeSpec, factor: float, sharpening: float) -> None:
    scale = NoPE(factor=factor, sharpening=sharpening).frequencies(rope, 1).attention_scale
    assert scale * scale == pytest.approx(1 + sharpening * math.log(factor), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("model_type", ["llama", "gpt_neox", "cohere"])
def test_the_model_is_the_one_whose_cos_is_one_and_sin_is_zero(model_type: str, dtype: torch.dtype) -> None:
    """To the bit, though the stored form divides instead of multiplying by zero."""
    found = logits(ctxext.patch(tiny(model_type), "nope", factor=3).to(dtype), tokens())
    model = tiny(model_type)
    rotary = next(module for module in model.modules() if hasattr(module, "inv_freq"))
    rotary.inv_freq.zero_()
    assert torch.equal(found, logits(model.to(dtype), tokens()))


def test_describe_says_that_it_is_useless_untrained() -> None:
    description = ctxext.describe(ctxext.patch(tiny(), "nope", factor=3))
    assert description.stored_as == "stock rope_type 'linear'"
    assert any("Rotation is gone" in note and f"{TRAINED_LENGTH} tokens" in note for note in description.notes)


def test_its_picture_shows_that_everything_has_stopped(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs ctxext[eval]")
    rope, method = RopeSpec(64, 1e4, 4096), NoPE(factor=4, sharpening=0.1)
    shares, scale = speed(method, rope)
    assert set(bands(shares, 4.0)) == {"stopped"}
    assert scale == pytest.approx(math.sqrt(1 + 0.1 * math.log(4)))
    spectrum_picture([method], rope).save(tmp_path / "nope.png")
    assert (tmp_path / "nope.png").read_bytes().startswith(b"\x89PNG")
    assert not any(isinstance(one, NoPE) for one in shown_by_default(4.0)), "nobody meets it unasked"
