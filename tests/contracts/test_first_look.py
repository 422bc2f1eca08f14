"""Every way of extending by attention in bfloat16, where there is one on a GPU: a text, steps after it, compiled steps.

The first stage of ``make gpu-run``; on a CPU the same tests run at night. FlashAttention's rule: the error against
float64 is at most twice that of the plain model in the same dtype on the same device.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import ctxext
from scripts.bench import random_model
from tests._steps import compiled_step

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TRAINED, LENGTH, STEPS = 96, 150, 4
METHODS: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("self_extend", "dual_chunk", "rerope", "streaming", "alibi")},
    "string": {"local": 8, "factor": 1.7},  # it reaches no farther than twice the trained length
    "retrieval_heads": {"heads": (0,)},
}
pytestmark = [pytest.mark.gpu, pytest.mark.nightly]


def model_with(method: str, dtype: torch.dtype, device: str) -> Any:
    """A Llama of two layers with weights that bfloat16 holds, and a method on it; without a name a plain one."""
    small = {"hidden_size": 256, "intermediate_size": 256, "vocab_size": 256, "max_position_embeddings": TRAINED}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "initializer_range": 0.06}
    model = random_model("llama-1b", "bf16", "cpu", 2, **small, **heads).to(device)
    model = model.double() if dtype == torch.float64 else model
    return ctxext.patch(model, method, **{"factor": 4, **METHODS[method]}) if method else model


@torch.no_grad()
def read(model: Any, ids: Tensor, way: str) -> Tensor:
    """Logits of a text, or of the steps after it."""
    ids = ids.to(model.device)
    text, rest = ids[:, :LENGTH], ids[:, LENGTH:].T[..., None]
    if way == "compiled steps":
        step = compiled_step(model, text, LENGTH + STEPS)
        return torch.cat([step(token) for token in rest], 1)
    cache = DynamicCache(config=model.config)
    logits: Tensor = model(text, past_key_values=cache).logits
    return logits if way == "text" else torch.cat([model(x, past_key_values=cache).logits for x in rest], 1)


@cache
@torch.no_grad()
def error(method: str, way: str) -> float:
    """The root mean square by which bfloat16 is off, over that of the logits."""
    ids = torch.randint(256, (1, LENGTH + STEPS), generator=torch.Generator().manual_seed(0))
    right = model_with(method, torch.float64, "cpu")(ids, use_cache=False).logits
    right = right[:, :LENGTH] if way == "text" else right[:, LENGTH:]
    found = read(model_with(method, torch.bfloat16, DEVICE), ids, way).double().cpu()
    torch.compiler.reset()
    return float((found - right).norm() / right.norm())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("way", ["text", "steps", "compiled steps"])
def test_bfloat16_is_no_rougher_than_twice_the_plain_model(
    method: str, way: str, request: pytest.FixtureRequest
) -> None:
    if way == "compiled steps":
        request.getfixturevalue("_without_checker")
    plain, ours = error("", way), error(method, way)
    print(f"{method}, {way}: {ours:.2e} beside {plain:.2e} of the plain model")
    assert ours <= 2 * plain
