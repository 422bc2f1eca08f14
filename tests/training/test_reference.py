"""Trainers that load a reference model themselves: never the plain checkpoint in the place of an extended model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

import ctxext
from ctxext.errors import PatchStateError
from ctxext.training import reference
from tests._models import logits, tokens
from tests._peft import base_of


def as_trl_builds_it(model: Any) -> Any:
    """TRL 1.16.0, trainer/dpo_trainer.py:926 and trainer/utils.py:1396."""
    return AutoModelForCausalLM.from_pretrained(getattr(model.config, "_name_or_path", ""))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["yarn", "dynamic_ntk", "self_extend", "alibi", "t5_bias"])
def test_a_model_extended_in_memory(method: str, plain: Path) -> None:
    models = {"patched": ctxext.patch(base_of(plain), method, factor=4), "loaded": ctxext.load(plain, method, factor=4)}
    for model in models.values():
        with pytest.raises(OSError, match=r"Give a reference model by ctxext\.training\.reference\(model\)"):
            as_trl_builds_it(model)
        assert any("ctxext.training.reference" in note for note in ctxext.describe(model).notes)
        ctxext.unpatch(model)
        assert torch.equal(logits(as_trl_builds_it(model).eval(), tokens()), logits(base_of(plain), tokens()))


@pytest.mark.slow
def test_a_checkpoint_that_was_saved_extended_leads_to_itself(plain: Path, tmp_path: Path) -> None:
    ctxext.save(ctxext.patch(base_of(plain), "yarn", factor=4), tmp_path)
    for model in (base_of(tmp_path), ctxext.load(tmp_path)):
        assert torch.equal(logits(as_trl_builds_it(model).eval(), tokens()), logits(model, tokens()))
        assert not any("ctxext.training.reference" in note for note in ctxext.describe(model).notes)


@pytest.mark.parametrize("method", ["yarn", "self_extend", "dynamic_ntk", "t5_bias"])
def test_reference_is_a_frozen_copy(method: str, plain: Path) -> None:
    model = ctxext.patch(base_of(plain), method, factor=4).train()
    kept = reference(model)
    assert not any(weight.requires_grad for weight in kept.parameters())
    assert not kept.training
    expected = logits(model.eval(), tokens())
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1)
    assert torch.equal(logits(kept, tokens()), expected)
    assert any(weight.requires_grad for weight in model.parameters())


def test_a_plain_model_has_no_reference_of_ours(plain: Path) -> None:
    with pytest.raises(PatchStateError, match="is not extended"):
        reference(base_of(plain))


@pytest.mark.slow
def test_adapters_go_on_naming_their_base(plain: Path, tmp_path: Path) -> None:
    model = get_peft_model(ctxext.patch(base_of(plain), "yarn", factor=4), LoraConfig(target_modules=["q_proj"]))
    model.add_adapter("second", LoraConfig(target_modules=["q_proj"]))
    model.save_pretrained(tmp_path)
    assert ModelCard.load(tmp_path / "README.md").data["base_model"] == str(plain)
    for place in (tmp_path, tmp_path / "second"):
        assert torch.equal(logits(ctxext.load(place), tokens()), logits(model.eval(), tokens()))
