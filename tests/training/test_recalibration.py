"""Positions are dropped, the model is recalibrated at its old length, then reads further: DroPE by the recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import ctxext
from ctxext.training.lora import attach_lora, merged
from tests._models import logits, tiny, tokens
from tests._peft import ALL
from tests.training._recipe import RECIPES, losses, recipe
from tests.walk.tiny import TRAINED_LENGTH

CONFIG = RECIPES / "configs" / "smollm2-135m-64k-nope-drope.yaml"


@pytest.mark.nightly
@pytest.mark.parametrize("whole", ["true", "false"])
def test_recalibrated_at_the_old_length_and_then_read_further(whole: str, settings: Any, tmp_path: Path) -> None:
    asked = ("--data.length", str(TRAINED_LENGTH), "--extension.factor", "1", "--lora.whole", whole, "--device", "cpu")
    recipe.finetune(settings(*asked, "--training.accumulation", "1", config=CONFIG))
    found = losses(tmp_path / "run")
    assert found[4] < found[1]
    report = json.loads((tmp_path / "run" / "run.json").read_text())
    assert report["extension"]["target_length"] == TRAINED_LENGTH
    weights = tmp_path / "run" / "merged"
    stock = AutoModelForCausalLM.from_pretrained(weights).eval()
    both = {"rope_type": "linear", "type": "linear"}  # transformers keeps the old word for it, too
    assert stock.config.rope_parameters == both | {"rope_theta": 10000.0, "factor": 1e30}
    ours = ctxext.load(tmp_path / "run" / "adapter").eval()
    torch.testing.assert_close(logits(stock, tokens()), logits(ours, tokens()), rtol=1e-4, atol=1e-4)
    further = ctxext.load(weights, "nope", factor=4, trained_length=TRAINED_LENGTH)
    assert further.config.max_position_embeddings == 4 * TRAINED_LENGTH
    assert torch.equal(logits(further.eval(), tokens()), logits(stock, tokens())), "the factor changes no number"
    sharper = ctxext.load(weights, "nope", factor=4, trained_length=TRAINED_LENGTH, sharpening=0.1).eval()
    assert not torch.allclose(logits(sharper, tokens()), logits(stock, tokens()))


@pytest.mark.parametrize("tied", [True, False])
def test_whole_weights_are_trained_saved_and_merged(tied: bool, tmp_path: Path) -> None:
    plain = tiny(tie_word_embeddings=tied)
    expected = {name: value.clone() for name, value in plain.state_dict().items()}
    adapted = attach_lora(ctxext.patch(plain, "nope", factor=4), whole=True, embeddings=tied)
    trained = {name for name, weight in adapted.named_parameters() if weight.requires_grad}
    assert not any("lora_" in name for name in trained)
    assert {name.split(".")[-4] for name in trained if ".self_attn." in name} == {*ALL}
    with torch.no_grad():
        for weight in adapted.parameters():
            if weight.requires_grad:
                weight.add_(1.0)
    adapted.save_pretrained(tmp_path)
    loaded = merged(ctxext.load(tmp_path, base=ctxext.patch(tiny(tie_word_embeddings=tied), "nope", factor=4)))
    for name, value in merged(adapted).state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name])
        is_trained = tied or not name.startswith(("model.embed_tokens", "lm_head"))
        torch.testing.assert_close(value, expected[name] + (1.0 if is_trained else 0.0))
