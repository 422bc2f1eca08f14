"""What every method that remaps positions promises with a cache: decoding is one pass, whatever is done on the way.

Streaming drops the keys of all heads that no later query sees, retrieval heads those of the other heads.
"""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache
from transformers.cache_utils import DynamicLayer

import ctxext
from ctxext.caches.held import held_layers
from ctxext.errors import IncompatibleError, InvalidParameterError
from ctxext.methods.remap import RemapMethod
from ctxext.methods.retrieval_heads import RetrievalHeads
from ctxext.methods.streaming import Streaming
from tests._models import logits, tiny, tokens
from tests._programs import ROOT, ran
from tests.attention import _remapped
from tests.attention._remapped import EXACT, error, extended, target

SINKS, WINDOW, SPARE = 4, 24, 32
MOST = SINKS + WINDOW + 2 * SPARE  # with what may be cropped, and as much again between two cuts
# Three layers of 4 groups: two read far in the first, which lie apart; none in the second; all in the third.
HEADS = (0, 2, 8, 9, 10, 11)
MIXED = {"num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}


@torch.no_grad()
def read(model: PreTrainedModel, cache: Any, ids: Tensor, steps: list[int], keep: Tensor | None = None) -> Tensor:
    """Logits of the tokens after those in the cache, read in passes of so many tokens."""
    found, at = [], int(cache.get_seq_length())
    for step in steps:
        mask = {}
        if keep is not None:
            places = (keep.long().cumsum(1) - 1).clamp(min=0)
            mask = {"attention_mask": keep[:, : at + step], "position_ids": places[:, at : at + step]}
        found.append(model(ids[:, at : at + step], past_key_values=cache, **mask).logits)
        at += step
    return torch.cat(found, 1)


def require_one_pass(model: PreTrainedModel, cache: Any, ids: Tensor, *steps: int, padding: int = 0) -> None:
    """Hold what is read in passes of so many tokens to one pass of each row alone; the last row may be padded in front.

    A cache that holds tokens goes on with those behind them in ``ids``.
    """
    keep, at = torch.ones_like(ids), int(cache.get_seq_length())
    keep[-1, :padding] = 0
    found = read(model, cache, ids, list(steps), keep if padding else None)
    for row, start in enumerate([0] * (len(ids) - 1) + [padding]):
        right = logits(model, ids[row : row + 1, start : at + sum(steps)])[0]
        here, stop = max(at, start), at + sum(steps)
        error = float((found[row, here - at :] - right[here - start : stop - start]).abs().max())
        share = 1e-6 if right.dtype == torch.float64 else 1e-4
        assert error < share * max(1.0, float(right.abs().max())), (row, error)


def split(**parameters: Any) -> PreTrainedModel:
    method = RetrievalHeads(**{"factor": 4, "heads": HEADS, "sinks": SINKS, "window": WINDOW} | parameters)
    return ctxext.patch(tiny(**MIXED).double(), method)


def streaming(**changes: Any) -> PreTrainedModel:
    return ctxext.patch(tiny(**changes).double(), Streaming(factor=4, sinks=SINKS, window=WINDOW))


BOUNDED = {"streaming": streaming, "split": split}
every_bound = pytest.mark.parametrize("made", BOUNDED.values(), ids=BOUNDED)


def held(cache: DynamicCache) -> list[list[tuple[int, int]]]:
    """Heads and keys of each part of each layer."""
    found = []
    for layer in held_layers(cache):
        parts = [layer] if layer.near is None else [layer, layer.near]
        assert all(part.keys.shape == part.values.shape for part in parts)
        found.append([tuple(part.keys.shape[1:3]) for part in parts])
    return found


def require_few(cache: DynamicCache, length: int) -> None:
    """Hold the heads that see few keys to these, and the others to all."""
    parts = held(cache)
    if len(parts) == 2:  # streaming
        assert {keys for part in parts for _, keys in part} <= set(range(MOST))
        return
    (far, near), (bounded,), (whole,) = parts
    assert (far, whole) == ((2, length), (4, length))
    assert (near[0], bounded[0]) == (2, 4)
    assert near[1] == bounded[1] < MOST


@pytest.mark.slow
@_remapped.every_pair
def test_passes_of_any_size_are_one_pass(cls: type[RemapMethod], model_type: str) -> None:
    """In a growing cache and in a static one, a padded row beside a full one."""
    kind = _remapped.KINDS[model_type]
    if not kind.decodes:
        pytest.skip("transformers reads with a cache otherwise than without one")
    model, method = extended(cls, model_type)
    length = min(target(method), 120)
    ids, cache = tokens(length, rows=2), DynamicCache(config=model.config)
    if not kind.continues:
        require_one_pass(model, cache, ids[:1], length - 3, 1, 1, 1)
        return
    require_one_pass(model, cache, ids[:1], 70, *[1] * 20, length - 90)
    static = StaticCache(config=model.config, max_cache_len=length)
    require_one_pass(model, static, ids, 70, *[1] * 10, 9, padding=23)


@pytest.mark.slow
@every_bound
@pytest.mark.parametrize("way", ["given", "made", "made, in a tuple", "made by the decoder alone"])
def test_one_call_of_a_long_text_holds_few_keys(made: Any, way: str) -> None:
    """After 200 tokens the heads that see few hold their window; if the decoder makes the cache, one call later."""
    model, ids = made(), tokens(200)
    with torch.no_grad():
        cache = DynamicCache() if way == "given" else None
        read_by = model.model if way == "made by the decoder alone" else model
        out = read_by(ids, past_key_values=cache, use_cache=True, return_dict="tuple" not in way)
        cache = out[1] if "tuple" in way else out.past_key_values
    if way == "given":
        require_few(cache, 200)
        assert held(cache)[1][0][1] >= SINKS + WINDOW
    more = tokens(3, rows=2)[1:]
    found = read(model, cache, torch.cat([ids, more], 1), [3])
    require_few(cache, 203)
    assert error(found, logits(model, torch.cat([ids, more], 1))[:, -3:]) < EXACT
    assert model(ids[:, :9], use_cache=False).past_key_values is None


@pytest.mark.slow
@pytest.mark.parametrize("steps", [[130] + [1] * 40, [37] * 5, [90, 1, 1, 60, 3, 25], [16] * 11, [10] + [1] * 170])
@every_bound
def test_few_keys_are_held_in_passes_of_any_size(made: Any, steps: list[int]) -> None:
    model, cache, ids, sizes = made(), DynamicCache(), tokens(sum(steps), rows=2), set()
    for step in steps:
        require_one_pass(model, cache, ids, step)
        sizes.add(held(cache)[1][0][1])
    require_few(cache, sum(steps))
    assert max(sizes) < max(MOST + WINDOW, steps[0] + 1)
    assert cache.get_seq_length() == sum(steps)


@pytest.mark.slow
@every_bound
def test_it_is_cropped_as_far_as_it_still_holds_what_is_seen_and_refused_beyond(made: Any) -> None:
    model, cache, ids = made(), DynamicCache(), tokens(180)
    require_one_pass(model, cache, ids, 150)
    cache.crop(-torch.tensor(20))  # a tensor, as transformers 5.17 decodes assisted
    require_one_pass(model, cache, ids, 7, *[1] * 13, 30)
    before = held(cache)
    with pytest.raises(IncompatibleError, match=r"found 100.*the first 4 and the newest") as refusal:
        cache.crop(-100)
    assert held(cache) == before, "a refused crop takes nothing"
    cache.crop(-int(re.findall(r"cropped by up to (\d+) tokens", str(refusal.value))[0]))
    require_one_pass(model, cache, ids, 1, 3)


@every_bound
def test_a_mask_that_forgets_the_padding_is_refused_before_anything_is_cached(made: Any) -> None:
    model, cache = made(), DynamicCache()
    ids, keep = tokens(220, rows=2), torch.arange(220)[None] >= torch.tensor([[0], [29]])
    read(model, cache, ids, [200], keep)
    before = held(cache)
    with pytest.raises(InvalidParameterError, match="filled with padding in front of some rows"):
        read(model, cache, ids, [1])
    with pytest.raises(InvalidParameterError, match="covers 1 tokens, but the text has 201"):
        model(ids[:, 200:201], past_key_values=cache, attention_mask=keep[:, 200:201])
    assert held(cache) == before


@pytest.mark.slow
def test_plain_positions_inside_the_window_hold_less_and_see_the_window() -> None:
    """Against dense attention of the second layer, whose heads all see the first and the nearest tokens."""
    plain = {"far": "plain", "factor": 1, "exact": False, "window": 8}
    model, whole = split(**plain, heads=(8, 9, 10, 11)), split(**plain, heads=tuple(range(12)))
    ids, unextended = tokens(64), tiny(**MIXED).double()
    assert error(logits(whole, ids), logits(unextended, ids)) < EXACT
    assert error(logits(model, ids)[:, :8], logits(unextended, ids)[:, :8]) < EXACT
    assert error(logits(model, ids)[:, 20:], logits(unextended, ids)[:, 20:]) > 1e-3


def parts(cache: DynamicCache) -> list[Tensor]:
    """Keys and values of the far and the near heads of the first layer."""
    layer = cache.layers[0]
    return [layer.keys, layer.values, layer.near.keys, layer.near.values]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["cropped", "copied"])
def test_a_step_writes_beside_the_held_keys_and_over_none_that_were_held_before(how: str) -> None:
    """A text that goes on from fewer tokens, and two that go on from one cache; a copy in each step would be dear."""
    model, cache = split(), DynamicCache()
    ids = tokens(170)
    read(model, cache, ids, [150, 1])
    before = [(part.data_ptr(), part.shape[2]) for part in parts(cache)]
    read(model, cache, ids, [1, 2])
    assert [(part.data_ptr(), part.shape[2] - 3) for part in parts(cache)] == before
    kept = [(part, part.clone()) for part in parts(cache)]
    other = copy.deepcopy(cache) if how == "copied" else cache
    if how == "cropped":
        other.crop(-2)
    at = other.get_seq_length()
    more = torch.cat([ids[:, :at], ids[:, :5]], 1)
    assert error(read(model, other, more, [1, 4]), logits(model, more)[:, at:]) < EXACT
    assert all(torch.equal(part, held) for part, held in kept)
    if how == "copied":
        assert error(read(model, cache, ids, [1, 4]), logits(model, ids[:, :159])[:, 154:]) < EXACT


def test_an_offloaded_layer_moves_both_parts() -> None:
    cache = DynamicCache()
    read(split(), cache, tokens(150), [150])
    layer = cache.layers[0]
    layer.device = layer.near.device = torch.device("meta")
    layer.prefetch()
    assert layer.keys.is_meta
    assert layer.near.keys.is_meta


def test_groups_that_the_model_does_not_have_are_refused() -> None:
    with pytest.raises(InvalidParameterError, match=r"of which this model has 12 \(0 to 11\), found 12"):
        split(heads=(3, 12))


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", [Streaming(factor=4, window=WINDOW), RetrievalHeads(factor=4, heads=(0, 5), window=WINDOW)], ids=str
)
def test_a_layer_that_attends_twice_in_a_pass_drops_no_key_between(method: Streaming | RetrievalHeads) -> None:
    model = ctxext.patch(tiny("diffllama").double(), method)
    require_one_pass(model, DynamicCache(), tokens(140), 100, *[1] * 10, 30)
    assert not any("cache" in note for note in ctxext.describe(model).notes)


def test_where_all_groups_read_far_nothing_is_said_of_others() -> None:
    assert any("other groups" in note for note in ctxext.describe(split()).notes)
    assert not any("other groups" in note for note in ctxext.describe(split(heads=tuple(range(12)))).notes)


@pytest.mark.parametrize(("factor", "exact", "read"), [(4, True, "0.55"), (1, True, "1.00"), (1, False, "0.72")])
def test_what_a_step_reads_is_said_of_the_longest_text(factor: float, exact: bool, read: str) -> None:
    """Inside the trained window all groups read all keys, unless exact=False."""
    notes = ctxext.describe(split(factor=factor, exact=exact)).notes
    assert any(f"A step at {64 * factor:,} tokens reads {read} of the keys" in note for note in notes)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["deepseek_v3", "gemma3_text"])
def test_retrieval_heads_hold_less_unless_one_vector_serves_all_heads(model_type: str) -> None:
    def numbers(model: PreTrainedModel) -> int:
        require_one_pass(model, cache := DynamicCache(config=model.config), tokens(180), 150, 1, 29)
        near = [layer.near for layer in cache.layers if getattr(layer, "near", None) is not None]
        return sum(part.keys.numel() + part.values.numel() for part in [*cache.layers, *near])

    plain, (model, _) = numbers(_remapped.model_of(model_type)), extended(RetrievalHeads, model_type)
    if model_type == "deepseek_v3":
        assert numbers(model) == plain
        assert "The cache holds all tokens" in str(ctxext.describe(model))
    else:
        assert numbers(model) < plain


@pytest.mark.nightly
@pytest.mark.parametrize("model_type", ["gemma3n_text", "gemma4_text"])
@pytest.mark.parametrize("name", ["self_extend", "streaming", "retrieval_heads"])
def test_layers_that_share_keys(model_type: str, name: str) -> None:
    """No layer drops keys that a later one reads, and those that compute the last queries only see what they saw."""
    methods: dict[str, RemapMethod] = {
        "self_extend": _remapped.SELF_EXTEND,
        "streaming": Streaming(factor=4, window=WINDOW, exact=False),
        "retrieval_heads": RetrievalHeads(factor=4, heads=(3,), sinks=SINKS, window=WINDOW, exact=False),
    }
    model = tiny(model_type, **_remapped.TWO_KINDS, num_kv_shared_layers=2).double()
    short = tokens(40)
    before = logits(model, short), logits(model, short, logits_to_keep=1)
    _remapped.patched(model, methods[name])
    if name == "self_extend":
        now = logits(model, short), logits(model, short, logits_to_keep=1)
        assert all(map(torch.equal, now, before))
    inputs = tokens(150, rows=2)
    _remapped.require_equal(logits(model, inputs, logits_to_keep=5), logits(model, inputs)[:, -5:])
    for padding in (0, 9):
        require_one_pass(model, DynamicCache(config=model.config), inputs, 100, *[1] * 30, 20, padding=padding)


class OtherLayer(DynamicLayer):
    """A layer of a cache that may keep something else than what it returns."""


@pytest.mark.slow
@_remapped.every_method
def test_a_cache_of_another_kind_is_read_as_it_is(cls: type[RemapMethod]) -> None:
    model, method = extended(cls)
    ids = tokens(min(target(method), 96))
    cache = DynamicCache()
    cache.layer_class_to_replicate = OtherLayer
    with torch.no_grad():
        parts = [model(part, past_key_values=cache).logits for part in ids.split([80, *[1] * (ids.shape[1] - 80)], 1)]
    assert all(isinstance(layer, OtherLayer) for layer in cache.layers)
    assert error(torch.cat(parts, 1), logits(model, ids)) < EXACT


@pytest.mark.nightly
@pytest.mark.parametrize(
    "what",
    [("self_extend", "retrieval_heads"), ("dual_chunk", "rerope", "dpe", "string", "streaming", "texts"), ("growing",)],
    ids=["two", "others", "growing"],
)
def test_a_step_is_one_graph_and_whole_texts_are_refused_with_the_reason(what: tuple[str, ...]) -> None:
    """In a process of its own: the checker of shapes that tests run under cannot be compiled."""
    ran(["-m", "tests.contracts.compiled_remap_program", *what], ROOT, code=0)


@pytest.mark.slow
@every_bound
def test_a_cache_that_was_initialised_ahead_of_time_is_an_empty_one(made: Any) -> None:
    model = made()
    cache = DynamicCache(config=model.config)
    shape = {"batch_size": 1, "num_heads": model.config.num_key_value_heads, "head_dim": 16}
    cache.early_initialization(**shape, dtype=torch.float64, device=torch.device("cpu"))
    require_one_pass(model, cache, tokens(150), 140, 1, 9)
    require_few(cache, 150)
