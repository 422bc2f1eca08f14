"""ALiBi and every method that follows the length, on every backend: alone, padded, packed, cached, with gradients.

One oracle for all of it: the same model with the plainest attention there is (``reference``, or the model's own eager
code), reading each document alone, in a batch of one, without a cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import ctxext
from ctxext.errors import BackendUnavailableError
from ctxext.kernels import BACKENDS, flex
from ctxext.methods import METHODS
from ctxext.methods.longrope import LongRoPE
from tests._models import tiny, tokens
from tests.walk.tiny import TRAINED_LENGTH

ROTARY, BIASED = ("llama", "mistral"), ("bloom", "mpt", "falcon")
CHANGES: dict[str, dict[str, Any]] = {
    "falcon": {"alibi": True, "new_decoder_architecture": False, "multi_query": False},
}
# What follows the length, and the two sides of LongRoPE's boundary.
FOLLOWING = [
    *({"method": name, "factor": 4.0} for name in METHODS if name.startswith("dynamic")),
    *({"method": name, "factor": 4.0, "growth": "doubling"} for name in METHODS if name.startswith("dynamic")),
    {"method": LongRoPE(short_factor=(1.0,) * 16, long_factor=(4.0,) * 16, factor=4.0)},
]
OURS = ("reference", "sdpa", "flex")
STOCK = ("eager", "sdpa")

# Lengths on both sides of the trained window of 64 tokens: under a dynamic method each document has its own positions.
LENGTHS = (40, 100, 70)
TOLERANCE = 3e-4  # float32 sums in another order, logits of size 10; a wrong distance or length shows from 0.1 on


def settings() -> Iterator[Any]:
    """Model x method x backend: ALiBi on ctxext's attention, dynamic rotary methods on the model's own."""
    alibi = {"method": "alibi", "factor": 4.0}
    for model in (*ROTARY, *BIASED):
        methods = [alibi] if model in ROTARY else [alibi, *FOLLOWING, {"method": "pi", "factor": 4.0}]
        for method in methods:
            if model in BIASED and not _fits(method):
                continue
            for backend in OURS:
                yield _setting(model, method, backend)
    for model in ROTARY:
        for method in FOLLOWING:
            for backend in STOCK:
                yield _setting(model, method, backend)


def _fits(method: dict[str, Any]) -> bool:
    return method["method"] in ("alibi", "pi", "dynamic_pi")


def _setting(model: str, method: dict[str, Any], backend: str) -> Any:
    name = method["method"] if isinstance(method["method"], str) else method["method"].name
    growth = f" {method['growth']}" if "growth" in method else ""
    # Backends are proven by themselves: the first model of each group has all of them here, the others one.
    further = model not in (ROTARY[0], BIASED[0]) and backend != "sdpa"
    marks = [pytest.mark.nightly] * further
    return pytest.param(model, method, backend, id=f"{model}-{name}{growth}-{backend}", marks=marks)


every_setting = pytest.mark.parametrize(("model_type", "method", "backend"), list(settings()))


def build(model_type: str, method: dict[str, Any], backend: str) -> PreTrainedModel:
    model = tiny(model_type, **CHANGES.get(model_type, {}))
    if backend in OURS and (model_type in BIASED or method["method"] == "alibi"):
        return ctxext.patch(model, trained_length=TRAINED_LENGTH, attention=backend, **method)
    model.set_attn_implementation(backend)
    return ctxext.patch(model, trained_length=TRAINED_LENGTH, **method)


def oracle(model_type: str, method: dict[str, Any], backend: str) -> PreTrainedModel:
    return build(model_type, method, "reference" if backend in OURS and _is_ours(model_type, method) else "eager")


def _is_ours(model_type: str, method: dict[str, Any]) -> bool:
    return model_type in BIASED or method["method"] == "alibi"


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


def test_the_work_list_is_whole() -> None:
    names = {param.id for param in settings()}
    assert {"llama-alibi-sdpa", "mistral-alibi-flex", "bloom-dynamic_pi-sdpa", "falcon-alibi-reference"} <= names
    assert {"llama-dynamic_ntk-sdpa", "llama-dynamic_yarn-eager", "mistral-longrope-sdpa"} <= names
    assert set(BACKENDS) == {*OURS, "flash", "flash3", "flash4"}


@pytest.mark.slow
@every_setting
def test_padded_documents_and_their_gradients(model_type: str, method: dict[str, Any], backend: str) -> None:
    own = oracle(model_type, method, backend)
    apart = [run(own, ids) for ids in documents()]
    torch.stack([weigh(found) for found in apart]).sum().backward()
    model, longest = build(model_type, method, backend), max(LENGTHS)
    ids = torch.cat([torch.nn.functional.pad(ids, (longest - ids.shape[1], 0)) for ids in documents()])
    keep = torch.stack([torch.arange(longest) >= longest - length for length in LENGTHS]).long()
    positions = (keep.cumsum(-1) - 1).clamp(min=0)
    arguments = {} if model_type in ("bloom", "mpt") else {"position_ids": positions}
    training = _trains(model, backend)
    with torch.set_grad_enabled(training):
        rows = run(model, ids, attention_mask=keep, **arguments).split(1)
        found = [row[:, -length:] for row, length in zip(rows, LENGTHS, strict=True)]
    for one, alone in zip(found, apart, strict=True):
        torch.testing.assert_close(one, alone, atol=TOLERANCE, rtol=0)
    if training:
        torch.stack([weigh(one) for one in found]).sum().backward()
        _same_gradients(model, own)


@pytest.mark.slow
@every_setting
def test_packed_documents_and_their_gradients(model_type: str, method: dict[str, Any], backend: str) -> None:
    own = oracle(model_type, method, backend)
    apart = torch.cat([run(own, ids) for ids in documents()], dim=1)
    weigh(apart).backward()
    model = build(model_type, method, backend)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    training = _trains(model, backend)
    with torch.set_grad_enabled(training):
        found = run(model, torch.cat(documents(), dim=1), position_ids=positions)
    torch.testing.assert_close(found, apart, atol=TOLERANCE, rtol=0)
    if training:
        weigh(found).backward()
        _same_gradients(model, own)


@pytest.mark.slow
@every_setting
def test_cached_decoding_is_uncached_decoding(model_type: str, method: dict[str, Any], backend: str) -> None:
    """From inside the trained window across its edge: token for token, and the last logits too."""
    own, model = oracle(model_type, method, backend), build(model_type, method, backend)
    prompt = tokens(TRAINED_LENGTH - 6)
    greedy = prompt
    with torch.no_grad():
        for _ in range(12):
            greedy = torch.cat([greedy, run(own, greedy)[:, -1:].argmax(-1)], dim=1)
        last = run(own, greedy[:, :-1])[:, -1]
    ways: list[dict[str, Any]] = [{}]
    if model_type != "mpt":  # its generate() knows neither static caches nor chunks
        ways += [{"cache_implementation": "static", "disable_compile": True}, {"prefill_chunk_size": 16}]
    options = {
        "max_new_tokens": 12,
        "do_sample": False,
        "eos_token_id": None,
        "attention_mask": torch.ones_like(prompt),
    }
    options |= {"use_cache": True, "output_logits": True, "return_dict_in_generate": True}
    for way in ways:
        if backend == "flex":
            with pytest.raises(BackendUnavailableError, match=r"whenever the number of keys changes\. These can: sdpa"):
                model.generate(prompt, **options, **way)
            continue
        out = model.generate(prompt, **options, **way)
        assert torch.equal(out.sequences, greedy), way
        torch.testing.assert_close(out.logits[-1], last, atol=TOLERANCE, rtol=0)


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
