"""Famous checkpoints that were trained with a scaling, extended by the call that their users write."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import ctxext
from ctxext.errors import InvalidParameterError, PatchStateError
from tests._famous import able, famous_model

# Which length each reads with the scaling of its config, by its model card; and what its config says that it was
# trained for before that.
WINDOWS = {
    "meta-llama/Llama-3.1-8B": (131072, 8192),
    "meta-llama/Llama-3.2-1B": (131072, 8192),
    "meta-llama/Llama-3.3-70B-Instruct": (131072, 8192),
    "openai/gpt-oss-20b": (131072, 4096),
    "Qwen/Qwen2.5-7B-Instruct with its documented YaRN": (131072, 32768),
    "lmsys/vicuna-7b-v1.5-16k": (16384, None),
    "NousResearch/Yarn-Llama-2-7b-64k": (65536, 4096),
    "microsoft/Phi-3-mini-128k-instruct": (131072, 4096),
    "microsoft/Phi-4-mini-instruct": (131072, 4096),
    "deepseek-ai/DeepSeek-V2-Lite": (163840, 4096),
    "deepseek-ai/DeepSeek-V3": (163840, 4096),
    "allenai/Olmo-3.1-32B-Instruct": (65536, 8192),
    "google/gemma-3-4b-it": (131072, None),
}


def angles_per_token(model: PreTrainedModel, length: int) -> Tensor:
    """Radians per token of every pair in a text of ``length`` tokens."""
    text = model.config.get_text_config(decoder=True)
    owner = next(
        module
        for path, module in model.named_modules()
        if path.endswith("rotary_emb") and getattr(module, "config", None) is text
    )
    kind = "full_attention" if isinstance(owner.rope_type, dict) else None
    arguments = {} if kind is None else {"layer_type": kind}
    owner(torch.zeros(1), torch.tensor([[0, length - 1]]), **arguments)  # longrope takes its set for long texts now
    found: Tensor = getattr(owner, "inv_freq" if kind is None else f"{kind}_inv_freq").double()
    return found


@pytest.mark.parametrize("name", able(WINDOWS))
def test_twice_the_window_that_it_reads(name: str) -> None:
    """Fast pairs keep the frequency that the weights know and slow ones get half of it; no temperature is lost."""
    window, _ = WINDOWS[name]
    model = famous_model(name)
    known = angles_per_token(model, window)
    ctxext.patch(model, "yarn", factor=2, trained_length=window)
    ratio = angles_per_token(model, 2 * window) / known
    turns = window * known / (2 * math.pi)
    assert bool((ratio < 1 + 1e-6).all())
    assert bool((ratio > 0.5 - 1e-6).all())
    torch.testing.assert_close(ratio[turns < 1], torch.full_like(ratio[turns < 1], 0.5), rtol=1e-5, atol=0)
    torch.testing.assert_close(ratio[turns > 64], torch.ones_like(ratio[turns > 64]), rtol=1e-5, atol=0)
    assert int((turns > 64).sum()) > 0
    found = ctxext.describe(model)
    assert (found.trained_length, found.target_length, found.stock) == (window, 2 * window, True)


@pytest.mark.parametrize("name", WINDOWS)
def test_neither_a_guess_nor_a_smaller_window(name: str) -> None:
    _, original = WINDOWS[name]
    model = famous_model(name, device="meta")
    with pytest.raises(PatchStateError, match="If its weights were trained with that scaling"):
        ctxext.patch(model, "yarn", factor=2)
    if original is not None:
        with pytest.raises(InvalidParameterError, match="that this checkpoint reads already"):
            ctxext.patch(model, "pi", factor=0.5 * WINDOWS[name][0] / original, scaling="replace")


def temperature(model: nn.Module) -> float:
    """What stock code multiplies the scores of the first attention layer by, beside 1 / sqrt(head_dim)."""
    attention = next(module for module in model.modules() if hasattr(module, "qk_nope_head_dim"))
    return float(attention.scaling * math.sqrt(attention.qk_nope_head_dim + attention.qk_rope_head_dim))


def test_deepseek_keeps_the_temperature_it_was_trained_with() -> None:
    model = famous_model("deepseek-ai/DeepSeek-V3", device="meta")
    trained = temperature(model)
    assert trained == pytest.approx((0.1 * math.log(40) + 1) ** 2)
    ctxext.patch(model, "yarn", factor=2, trained_length=163840)
    assert temperature(model) == pytest.approx(trained * (0.1 * math.log(2) + 1) ** 2, rel=1e-6)
