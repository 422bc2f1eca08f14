"""Whole patched models on a GPU: what the CPU computes, in one pass, in steps, in training and in ``generate``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import ctxext
from tests._models import on_recent, tiny, tokens
from tests.contracts._fake_device import LENGTH, MODELS, patched

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str),
]

STEPS = 3
ROUNDING = 1e-4
"""Share of the norm by which a GPU may differ besides twice the rounding of a CPU in the same dtype."""


@torch.no_grad()
def copies(model_type: str, name: str, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedModel, PreTrainedModel]:
    """The model on the GPU, on the CPU in the same dtype, and on the CPU in float32, all with the same weights."""
    right, fair, found = (patched(model_type, name, kind) for kind in (torch.float32, dtype, dtype))
    right.load_state_dict({key: weight.float() for key, weight in fair.state_dict().items()})
    found.load_state_dict(fair.state_dict())
    return found.to(DEVICE), fair, right


def require_close(found: Tensor, fair: Tensor, right: Tensor) -> None:
    """Hold the GPU's rounding to that of the CPU in the same dtype."""
    found, fair, right = (x.detach().cpu().double() for x in (found, fair, right))
    ours, plain = ((x - right).norm() / right.norm() for x in (found, fair))
    assert ours <= 2 * plain + ROUNDING, f"{ours:.1e} beside {plain:.1e} of a CPU"


@torch.no_grad()
def read(model: PreTrainedModel, inputs: Tensor, keep: Tensor) -> Tensor:
    """Logits of a padded text, its last tokens one at a time on a cache."""
    inputs, keep, cache = inputs.to(model.device), keep.to(model.device), DynamicCache()
    at, length = inputs.shape[1] - STEPS, inputs.shape[1]
    seen = [model(inputs[:, :at], attention_mask=keep[:, :at], past_key_values=cache).logits]
    for end in range(at + 1, length + 1):
        seen.append(model(inputs[:, end - 1 : end], attention_mask=keep[:, :end], past_key_values=cache).logits)
    return torch.cat(seen, 1)[keep.bool()]


@pytest.mark.parametrize(("model_type", "name"), MODELS)
def test_it_reads_padded_rows_and_goes_on(model_type: str, name: str, dtype: torch.dtype) -> None:
    inputs = tokens(LENGTH, rows=2)
    keep = torch.ones_like(inputs)
    keep[0, :5] = 0
    require_close(*(read(model, inputs, keep) for model in copies(model_type, name, dtype)))


@pytest.mark.parametrize(
    ("model_type", "name"),
    [on_recent(*one, reason="OPT asks whether its mask is all ones") if one[0] == "opt" else one for one in MODELS],
)
def test_it_learns_what_it_learns_on_a_cpu(model_type: str, name: str, dtype: torch.dtype) -> None:
    def gradients(model: PreTrainedModel) -> Tensor:
        inputs = tokens(LENGTH, rows=2).to(model.device)
        model.train()(inputs, labels=inputs, use_cache=False).loss.backward()
        found = {key: weight.grad for key, weight in model.named_parameters() if weight.grad is not None}
        return torch.cat([found[key].float().flatten() for key in sorted(found)])

    require_close(*(gradients(model) for model in copies(model_type, name, dtype)))


@pytest.mark.parametrize(
    "name", ["yarn", "dynamic_ntk", "self_extend", "retrieval_heads", "streaming", "alibi", "fire"]
)
@pytest.mark.parametrize("cache", [None, "static", "offloaded"])
def test_generate_writes_what_it_writes_on_a_cpu(name: str, cache: str | None, dtype: torch.dtype) -> None:
    """In float32, since the best of random logits lie close; a static cache has the step compiled."""
    if dtype != torch.float32:
        pytest.skip("greedy text of a random model depends on the last bits of bfloat16")
    how: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    found, right, _ = copies("llama", name, dtype)
    written = found.generate(tokens(LENGTH, rows=2).to(DEVICE), cache_implementation=cache, **how)
    assert torch.equal(written.cpu(), right.generate(tokens(LENGTH, rows=2), **how))


@pytest.mark.parametrize("name", ["yarn", "self_extend", "retrieval_heads", "alibi"])
def test_a_compiled_model_reads_what_it_reads_uncompiled(name: str, dtype: torch.dtype) -> None:
    found, fair, right = copies("llama", name, dtype)
    inputs, keep = tokens(LENGTH), torch.ones(1, LENGTH, dtype=torch.long)
    require_close(read(torch.compile(found), inputs, keep), read(fair, inputs, keep), read(right, inputs, keep))


def test_it_comes_back_from_the_gpu_unextended(dtype: torch.dtype) -> None:
    plain, inputs = tiny().to(dtype).to(DEVICE), tokens(LENGTH).to(DEVICE)
    with torch.no_grad():
        before = plain(inputs).logits
        extended = ctxext.patch(plain, "self_extend", factor=4.0)(inputs).logits
        assert not torch.equal(before, extended)
        assert torch.equal(ctxext.unpatch(plain)(inputs).logits, before)
