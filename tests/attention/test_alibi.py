"""ALiBi and what models with ALiBi take beside it, on every backend: alone, padded and packed, with gradients.

One oracle for all of it: the same model with the plainest attention there is (``reference``), reading each document
alone, in a batch of one.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import ctxext
from ctxext.errors import BackendUnavailableError, IncompatibleError
from ctxext.kernels import BACKENDS, flex
from tests._models import FALCON, tiny, tokens
from tests.walk.tiny import TRAINED_LENGTH

MODELS: dict[str, dict[str, Any]] = {name: {} for name in ("llama", "mistral", "bloom", "mpt")} | {"falcon": FALCON}
ALIBI = {"method": "alibi", "factor": 4.0}
# What models with a bias of their own take beside it.
OTHERS = [{"method": "pi", "factor": 4.0}]
OTHERS += [{"method": "dynamic_pi", "factor": 4.0, "growth": growth} for growth in ("exact", "doubling")]
OURS = ("reference", "sdpa", "flex")

# Lengths on both sides of the trained window of 64 tokens: under a dynamic method each document has its own positions.
LENGTHS = (40, 100, 70)
TOLERANCE = 3e-4  # float32 sums in another order, logits of size 10; a wrong distance or length shows from 0.1 on
# Backends are proven by themselves: the first model of each kind has all of them here, the others one.
SETTINGS = [
    pytest.param(model, method, backend, marks=[pytest.mark.nightly] * further)
    for model in MODELS
    for method in [ALIBI, *(OTHERS if model not in ("llama", "mistral") else [])]
    for backend in OURS
    for further in [model not in ("llama", "bloom") and backend != "sdpa"]
]


def build(model_type: str, method: dict[str, Any], backend: str) -> PreTrainedModel:
    model = tiny(model_type, **MODELS[model_type])
    return ctxext.patch(model, trained_length=TRAINED_LENGTH, attention=backend, **method)


def documents() -> list[Tensor]:
    row = tokens(sum(LENGTHS))
    return list(row.split(LENGTHS, dim=1))


def run(model: PreTrainedModel, ids: Tensor, **arguments: Any) -> Tensor:
    found: Tensor = model(ids, use_cache=False, **arguments).logits
    return found


def weigh(found: Tensor) -> Tensor:
    """A number to differentiate; every document weighs its tokens the same wherever they stand."""
    weights = torch.linspace(-1, 1, found.shape[-1], dtype=found.dtype)
    return (found.log_softmax(-1) * weights).sum()


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.fixture(autouse=True)
def _plain_flex_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling costs 10 s per layout on CPU; tests/kernels/test_flex.py compiles a few."""
    monkeypatch.setattr(flex, "_compiled", lambda _: flex.flex_attention)


def test_every_backend_of_a_cpu_is_here() -> None:
    assert set(BACKENDS) == {*OURS, "flash", "flash3", "flash4"}


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "method", "backend"), SETTINGS)
def test_padded_and_packed_documents_and_their_gradients(model_type: str, method: dict[str, Any], backend: str) -> None:
    own = build(model_type, method, "reference")
    alone = [run(own, ids) for ids in documents()]
    torch.stack([weigh(found) for found in alone]).sum().backward()
    model, longest = build(model_type, method, backend), max(LENGTHS)
    ids = torch.cat([torch.nn.functional.pad(ids, (longest - ids.shape[1], 0)) for ids in documents()])
    keep = torch.stack([torch.arange(longest) >= longest - length for length in LENGTHS]).long()
    counted = {} if model_type in ("bloom", "mpt") else {"position_ids": (keep.cumsum(-1) - 1).clamp(min=0)}
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    training = _trains(model, backend)
    for way in ("padded", "packed"):
        model.zero_grad()
        with torch.set_grad_enabled(training):
            if way == "padded":
                rows = run(model, ids, attention_mask=keep, **counted).split(1)
                found = [row[:, -length:] for row, length in zip(rows, LENGTHS, strict=True)]
            else:
                found = list(run(model, torch.cat(documents(), 1), position_ids=positions).split(LENGTHS, 1))
        for one, right in zip(found, alone, strict=True):
            torch.testing.assert_close(one, right, atol=TOLERANCE, rtol=0)
        if training:
            torch.stack([weigh(one) for one in found]).sum().backward()
            _same_gradients(model, own)


def test_a_kernel_that_is_compiled_for_a_length_refuses_to_decode() -> None:
    model = build("llama", ALIBI, "flex")
    for way in ({}, {"cache_implementation": "static", "disable_compile": True}, {"prefill_chunk_size": 16}):
        with pytest.raises(BackendUnavailableError, match=r"whenever the number of keys changes\. These can: sdpa"):
            model.generate(tokens(40), max_new_tokens=12, **way)


def test_a_layer_and_a_mask_that_tell_different_windows_are_refused_before_the_first_call() -> None:
    """The code of Qwen2-MoE makes masks of a window, and does not tell attention about it."""
    model = tiny("qwen2_moe", use_sliding_window=True, sliding_window=16, max_window_layers=4)
    before = run(model, tokens(40))
    with pytest.raises(IncompatibleError, match=r"window of None tokens under a mask of \d+ \(None means all\)"):
        ctxext.patch(model, "alibi", factor=2.0)
    assert torch.equal(run(model, tokens(40)), before)


def _trains(model: PreTrainedModel, backend: str) -> bool:
    """Whether this backend trains on this machine; if it does not, a training call is refused by name."""
    if backend != "flex":
        return True
    with pytest.raises(BackendUnavailableError, match="flex"):
        run(model, tokens(8))
    return False


def _same_gradients(model: PreTrainedModel, own: PreTrainedModel) -> None:
    found, expected = gradients(model), gradients(own)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = gradient.abs().max().clamp(min=1.0)
        torch.testing.assert_close(found[name] / scale, gradient / scale, atol=1e-4, rtol=0, msg=name)
