"""Models that sharpen their queries by position themselves are not sharpened twice (Ministral 3, Mistral 4)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ctxext
from ctxext.methods.yarn import YaRN
from tests._models import logits, tiny, tokens


def weights_by_hand(model: Any, inputs: Tensor, inv_freq: Tensor, beta: float, original: int) -> Tensor:
    """Attention of Ministral's first layer in float64 from its weights, with the model's own temperature alone."""
    layer, config = model.model.layers[0], model.config
    hidden = model.model.embed_tokens(inputs)[0].double()
    hidden = hidden / (hidden.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt()
    hidden = hidden * layer.input_layernorm.weight.double()
    place = torch.arange(len(hidden), dtype=torch.float64)
    turned = []
    for linear in (layer.self_attn.q_proj, layer.self_attn.k_proj):
        heads = (hidden @ linear.weight.double().T).view(len(hidden), -1, config.head_dim).transpose(0, 1)
        pairs = torch.complex(*heads.chunk(2, -1)) * torch.exp(1j * place[:, None] * inv_freq)
        turned.append(torch.cat([pairs.real, pairs.imag], -1))
    own = 1 + beta * torch.log(1 + torch.floor(place / original))
    keys = turned[1].repeat_interleave(len(turned[0]) // len(turned[1]), 0)
    scores = (turned[0] * own[:, None]) @ keys.transpose(1, 2) / config.head_dim**0.5
    return scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -torch.inf).softmax(-1)


@pytest.mark.parametrize("scaling", ["extend", "replace"])
def test_yarn_leaves_the_temperature_to_the_model(scaling: str, tmp_path: Path) -> None:
    model = tiny("ministral3")
    model.set_attn_implementation("eager")
    ctxext.patch(model, "yarn", factor=4.0, scaling=scaling)
    inputs, inv_freq = tokens(60), model.model.rotary_emb.inv_freq.double()
    with torch.no_grad():
        found = model(inputs, output_attentions=True).attentions[0][0]
        wanted = weights_by_hand(model, inputs, inv_freq, beta=0.1, original=16)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-5)
    assert "adds nothing" in " ".join(ctxext.describe(model).notes)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(ctxext.load(tmp_path, attn_implementation="eager"), inputs), logits(model, inputs))


def test_a_checkpoint_that_was_saved_with_both_is_loaded_as_it_was(tmp_path: Path, monkeypatch: Any) -> None:
    model = tiny("ministral3")
    with monkeypatch.context() as before:
        before.setattr("ctxext.models.temperature._beta_of", lambda text: 0.0)
        ctxext.patch(model, YaRN(factor=4.0), scaling="extend")
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(ctxext.load(tmp_path), tokens()), logits(model, tokens()))
