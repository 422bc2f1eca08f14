"""Layers that have an owner, next to those of transformers."""

from __future__ import annotations

import copy
import itertools
import pickle
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache, cache_utils
from transformers.cache_utils import DynamicLayer, StaticLayer

import ctxext
from ctxext.caches.records import is_exporting, owned, plain_class
from ctxext.errors import PatchStateError
from tests._models import logits, tiny, tokens
from tests.caches._requests import LONGROPE

MAPPINGS = ("DYNAMIC_LAYER_TYPE_MAPPING", "STATIC_LAYER_TYPE_MAPPING")


@pytest.mark.skipif(not hasattr(cache_utils, MAPPINGS[0]), reason="this transformers registers no layer types")
@pytest.mark.parametrize("kind", [DynamicLayer, StaticLayer])
def test_new_caches_of_any_model_are_made_of_plain_layers(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers registers each class of layers that names its type, and makes new caches of the last one."""
    before = {name: dict(getattr(cache_utils, name)) for name in MAPPINGS}
    for name in MAPPINGS:
        monkeypatch.setattr(cache_utils, name, dict(before[name]))
    named = type("Named", (kind,), {"_layer_type": "named"})
    registered = {name: dict(getattr(cache_utils, name)) for name in MAPPINGS}
    assert registered != before
    made = owned(named)
    assert {name: getattr(cache_utils, name) for name in MAPPINGS} == registered
    assert made._layer_type == "named"  # type: ignore[attr-defined]
    assert plain_class(object.__new__(made)) is named


@pytest.mark.slow
@pytest.mark.parametrize("method", ["yarn", "self_extend", "dynamic_pi"])
def test_a_cache_made_for_windows_is_refused_once_they_are_lifted(method: str) -> None:
    model = tiny("mistral", sliding_window=16)
    before = [DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=80)]
    ctxext.patch(model, method, factor=2, sliding_window="lift")
    for cache in before:
        with pytest.raises(PatchStateError, match="made for sliding windows, which the extension has lifted"):
            model(tokens(40), past_key_values=cache)
    cache = DynamicCache(config=model.config)
    steps = [model(part, past_key_values=cache).logits for part in tokens(40).split(30, 1)]
    torch.testing.assert_close(torch.cat(steps, 1), logits(model, tokens(40)), atol=2e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(cache_utils, "Fp8QuantizedLayer"), reason="this transformers keeps no keys in 8 bits")
@pytest.mark.parametrize(("model_type", "method"), [("llama", "dynamic_ntk"), ("bloom", "dynamic_pi")])
def test_beams_over_quantized_keys_follow_a_length(model_type: str, method: str) -> None:
    """A quantized layer holds its keys elsewhere, so that they do not tell the number of rows."""
    plain, options = tiny(model_type), {"num_beams": 2, "max_new_tokens": 4, "eos_token_id": None, "pad_token_id": 0}
    options |= {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}, "do_sample": False}
    model = ctxext.patch(tiny(model_type), method, factor=4.0, trained_length=64)
    for rows in (1, 2):
        ids = tokens(20, rows)
        assert torch.equal(model.generate(ids, **options), plain.generate(ids, **options))


@pytest.mark.slow
def test_rows_keep_their_length_where_the_first_layer_holds_a_state() -> None:
    """Two rows, of which one is longer than the trained length, change places."""
    changes = {"layer_types": ["linear_attention", "full_attention"] * 2, "num_hidden_layers": 4}
    how = {"factor": 4.0, "growth": "doubling", "trained_length": 64}
    model = ctxext.patch(tiny("qwen3_next", **changes), "dynamic_yarn", **how)
    ids, cache, last = tokens(91, rows=2), DynamicCache(config=model.config), torch.ones(2, 1, dtype=torch.long)
    keep = (torch.arange(90)[None] >= torch.tensor([[40], [0]])).long()
    with torch.no_grad():
        model(ids[:, :90], attention_mask=keep, position_ids=(keep.cumsum(1) - 1).clamp(min=0), past_key_values=cache)
        cache.reorder_cache(torch.tensor([1, 0]))
        keep = torch.cat([keep.flip(0), last], 1)
        more = {"attention_mask": keep, "position_ids": keep.sum(1, keepdim=True) - 1}
        found = model(ids.flip(0)[:, 90:], past_key_values=cache, **more).logits
    for row, alone in enumerate((ids[1:], ids[:1, 40:])):
        torch.testing.assert_close(found[row], logits(model, alone)[0, -1:], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("model_type", "method"),
    [
        ("phi3", {"method": "yarn", "factor": 4.0}),
        pytest.param("phi3", {"method": "self_extend", "factor": 4.0}, marks=pytest.mark.slow),
        pytest.param("phi3", {"method": LONGROPE}, marks=pytest.mark.slow),
        pytest.param("phimoe", {"method": "self_extend", "factor": 4.0}, marks=pytest.mark.slow),
        pytest.param("phi4_multimodal", {"method": "pi", "factor": 4.0}, marks=pytest.mark.slow),
    ],
)
def test_generate_keeps_its_cache_where_stock_longrope_would_change(model_type: str, method: dict[str, Any]) -> None:
    """Phi-3 and its kin drop it at the original length, and may go on from the newest token alone."""
    model = ctxext.patch(tiny(model_type, sliding_window=None, original_max_position_embeddings=64), **method)
    prompt, cache = tokens(56), DynamicCache(config=model.config)
    options = {"eos_token_id": None, "pad_token_id": 0, "do_sample": False}
    found = model.generate(prompt, max_new_tokens=24, past_key_values=cache, **options)
    declared = {"ctxext_length": 80} if method["method"] is LONGROPE else {}
    expected = prompt
    for _ in range(24):
        expected = torch.cat([expected, logits(model, expected, **declared)[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(found, expected)
    assert cache.get_seq_length() == 79


def _read(model: Any, cache: Any, ids: torch.Tensor, part: slice, method: str | None, in_graph: bool) -> None:
    """Read a part of a text under a method, and compare it with one pass."""
    with nullcontext() if method is None else ctxext.patched(model, method, factor=4):
        read_on = torch.compile(model, backend="eager") if in_graph else model
        found = read_on(ids[:, part], past_key_values=cache).logits
        torch.testing.assert_close(found, model(ids, use_cache=False).logits[:, part])


@pytest.mark.nightly
@pytest.mark.usefixtures("_without_checker")
@pytest.mark.parametrize(
    "graphs", [(True, False), (False, True), (True, True)], ids=["the first", "the second", "both"]
)
@torch.no_grad()
def test_a_graph_reads_on_what_its_own_extension_filled(graphs: tuple[bool, bool]) -> None:
    others = [(None, "yarn"), ("yarn", None), ("pi", "yarn"), ("dynamic_ntk", None), ("self_extend", None)]
    ids = tokens(21)
    for methods, is_static in itertools.product([*others, ("yarn", "yarn")], [False, True]):
        torch.compiler.reset()
        model = tiny().double()
        cache: Any = StaticCache(model.config, max_cache_len=40) if is_static else DynamicCache(config=model.config)
        _read(model, cache, ids, slice(0, 20), methods[0], graphs[0])
        same = methods[0] == methods[1]
        with nullcontext() if same else pytest.raises(PatchStateError, match=r"filled|without a record"):
            _read(model, cache, ids, slice(20, 21), methods[1], graphs[1])


class Exported(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + is_exporting()


@pytest.mark.usefixtures("_without_checker")
def test_a_graph_that_is_compiled_is_no_export() -> None:
    """Dynamo of torch 2.11 says so of every graph, which then compared no records."""
    zero = torch.zeros(1)
    assert torch.compile(Exported(), backend="eager", fullgraph=True)(zero) == 0
    assert torch.export.export(Exported(), (zero,), strict=True).module()(zero) == 1
    assert torch.export.export(Exported(), (zero,)).module()(zero) == 1


@torch.no_grad()
def test_a_call_that_was_interrupted_lets_no_other_model_fill_its_cache() -> None:
    model, ids = ctxext.patch(tiny(), "yarn", factor=4), tokens(20)
    cache = DynamicCache(config=model.config)
    model(ids, past_key_values=cache)
    handle = model.model.layers[1].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        model(ids[:, :1], past_key_values=cache)
    handle.remove()
    caches = [cache, copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))]
    ctxext.unpatch(model)
    for each in caches:
        with pytest.raises(PatchStateError, match="This cache of 21 tokens was filled while a model was extended"):
            model(ids[:, :1], past_key_values=each)


@pytest.mark.slow
@pytest.mark.usefixtures("_without_checker")
@pytest.mark.parametrize("model_type", ["gemma3n_text", "qwen3_next"])
@torch.no_grad()
def test_one_graph_reads_into_an_empty_cache_in_which_some_layers_never_hold_keys(model_type: str) -> None:
    """Layers that read the keys of others call themselves initialized, and layers with a state say nothing of it."""
    torch.compiler.reset()
    hybrid = {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}
    changes: dict[str, Any] = hybrid if model_type == "qwen3_next" else {}
    model, ids = ctxext.patch(tiny(model_type, **changes), "yarn", factor=4), tokens(20)
    cache = StaticCache(config=model.config, max_cache_len=40)
    found = torch.compile(model, backend="eager", fullgraph=True)(ids, past_key_values=cache).logits
    torch.testing.assert_close(found, model(ids, use_cache=False).logits, atol=2e-5, rtol=0)
