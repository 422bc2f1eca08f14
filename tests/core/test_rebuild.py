"""Rebuilt configs and models: each caller's own, and no time for what has no effect."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import ctxext
from ctxext.core.rebuild import on_meta, reread
from ctxext.errors import IncompatibleError
from tests._models import logits, tiny, tokens


def test_a_config_that_was_read_back_is_its_callers_own() -> None:
    """Files are read once for each text; whoever changes what came of one changes nothing for the next."""
    config = tiny().config
    one, expected = reread(config), reread(config).to_json_string()
    one.rope_parameters["rope_theta"], one.layer_types = 7.0, ["none"]
    assert reread(config).to_json_string() == expected
    config.vocab_size += 1
    assert reread(config).vocab_size == config.vocab_size


def test_meta_tensors_are_not_filled_and_all_others_are() -> None:
    with on_meta():
        linear, real = nn.Linear(3, 4), torch.empty(3, device="cpu")
        nn.init.trunc_normal_(tensor=linear.weight)
        nn.init.normal_(real, mean=5.0, std=0.0)
        real[1:].zero_()
    assert linear.weight.is_meta
    assert real.tolist() == [5.0, 0.0, 0.0]


@pytest.mark.slow
def test_every_copy_of_a_layer_that_peft_keeps_is_changed() -> None:
    """Latent attention takes a temperature from its config when it is built, in a number of each layer."""
    base = tiny("deepseek_v3")
    expected = logits(ctxext.patch(copy.deepcopy(base), "yarn", factor=4), tokens())
    config = LoraConfig(target_modules=["o_proj"], layers_to_transform=[0], modules_to_save=["layers.1"])
    model: Any = get_peft_model(base, config).eval()
    plain = logits(model, tokens())
    ctxext.patch(model, "yarn", factor=4)
    assert torch.equal(logits(model, tokens()), expected)
    with model.disable_adapter():
        assert torch.equal(logits(model, tokens()), expected)
    ctxext.unpatch(model)
    for context in (contextlib.nullcontext(), model.disable_adapter()):
        with context:
            assert torch.equal(logits(model, tokens()), plain)


@pytest.mark.parametrize(
    ("model_type", "method"),
    [("falcon", "pi"), ("llama", "self_extend"), ("t5", "stretch_buckets")],
)
def test_layers_that_somebody_took_out(model_type: str, method: str) -> None:
    """Pruned models are extended once their config says how many layers are left; PyTorch's error names no way."""
    model = tiny(model_type, **({} if model_type == "t5" else {"num_hidden_layers": 2}))
    stack: Any = {"falcon": "transformer", "llama": "model", "t5": "encoder"}[model_type]
    holder: Any = getattr(model, stack)
    name = {"falcon": "h", "llama": "layers", "t5": "block"}[model_type]
    setattr(holder, name, getattr(holder, name)[:1])
    with pytest.raises(IncompatibleError, match=rf"has no \S*{name}\.1\..* number in the config"):
        ctxext.patch(model, method, factor=2, trained_length=64)
    assert "ctxext" not in vars(model.config)
    model.config.num_hidden_layers = 1
    if model_type == "t5":
        model.decoder.block = model.decoder.block[:1]
        model.config.num_decoder_layers = 1
    ctxext.patch(model, method, factor=2, trained_length=64)
    assert model.config.ctxext["target_length"] == 128
