"""Latent attention: a part of each head rotates, and the temperature belongs to the whole score."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import ctxext
from tests._models import RECENT, logits, tiny, tokens

LATENT = ["deepseek_v2", "deepseek_v3", "longcat_flash", "minicpm3", "youtu", "glm4_moe_lite"]
TEMPERATURE = 0.1 * math.log(4) + 1


def scalings(model: Any) -> list[float]:
    modules = (module for name, module in model.named_modules() if "self_attn" in name)
    return [module.scaling for module in modules if hasattr(module, "scaling")]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", LATENT)
def test_yarn_sharpens_whole_scores_as_deepseek_publishes_it(model_type: str) -> None:
    model = tiny(model_type)
    plain = scalings(model)
    ctxext.patch(model, "yarn", factor=4.0)
    assert model.config.rope_parameters["mscale"] == model.config.rope_parameters["mscale_all_dim"] == 1.0
    assert scalings(model) == pytest.approx([scaling * TEMPERATURE**2 for scaling in plain], rel=1e-12)
    assert len(plain) >= 2
    assert "multiplies whole attention scores" in " ".join(ctxext.describe(model).notes)
    assert model.model.rotary_emb.attention_scaling == pytest.approx(1.0, rel=1e-12)
    ctxext.unpatch(model)
    assert scalings(model) == plain


def test_it_equals_stock_code_on_the_published_form(tmp_path: Path) -> None:
    model = tiny("deepseek_v3")
    model.save_pretrained(tmp_path)
    published = {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0, "rope_theta": 10000.0}
    published["original_max_position_embeddings"] = 64
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, rope_parameters=published, max_position_embeddings=256)
    ctxext.patch(model, "yarn", factor=4.0)
    assert torch.equal(logits(model, tokens()), logits(stock.eval(), tokens()))


def test_other_models_keep_the_temperature_on_cos_and_sin() -> None:
    for model_type in ("llama", "gpt_neox"):
        model = ctxext.patch(tiny(model_type), "yarn", factor=4.0)
        assert "mscale" not in model.config.rope_parameters
        rotary = next(module for name, module in model.named_modules() if name.endswith("rotary_emb"))
        assert rotary.attention_scaling == pytest.approx(TEMPERATURE)


@pytest.mark.slow
@pytest.mark.skipif(not RECENT, reason="transformers 5.17 has no dots3_note_text")
def test_latent_attention_that_cannot_scale_scores_keeps_it_too() -> None:
    """Its code reads no mscale: stored there, the temperature would be lost."""
    model = ctxext.patch(tiny("dots3_note_text"), "yarn", factor=4.0)
    assert "mscale" not in model.config.rope_parameters["indexed_attention"]
    assert model.model.rotary_emb.indexed_attention_attention_scaling == pytest.approx(TEMPERATURE)


@pytest.mark.slow
def test_a_default_that_forgets_how_much_rotates(tmp_path: Path) -> None:
    """Unscaled, stock Mistral 4 computes frequencies for whole heads, which its own layers cannot use.

    So what its scaled form computes says how many there are, and nothing is stored as ``default``.
    """
    model = tiny("mistral4")
    plain = model.model.rotary_emb.inv_freq.clone()
    assert 2 * len(plain) == model.config.qk_rope_head_dim
    ctxext.patch(model, "pi", factor=4.0, scaling="extend").save_pretrained(tmp_path)
    torch.testing.assert_close(model.model.rotary_emb.inv_freq, plain / 4)
    stock = type(model).from_pretrained(tmp_path).eval()
    assert torch.equal(logits(stock, tokens()), logits(model, tokens()))
