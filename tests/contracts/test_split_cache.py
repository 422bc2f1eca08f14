"""Retrieval heads in a cache: far heads keep all keys, the others few, and decoding is that of no cache."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache

import ctxext
from ctxext.errors import IncompatibleError, InvalidParameterError
from ctxext.methods import RetrievalHeads, Streaming
from ctxext.surgery.bounded import BoundedLayer, SplitLayer
from ctxext.surgery.caches import empty
from tests._models import logits, tiny, tokens

EXACT = 1e-6
LENGTH = 230
SINKS, WINDOW = 4, 24
MOST = SINKS + WINDOW + 2 * 32  # with what may be cropped, and as much again between two cuts
# Three layers of 4 groups: two read far in the first, which lie apart; none in the second; all in the third.
HEADS = (0, 2, 8, 9, 10, 11)
MIXED = {"num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}


def model_of(**parameters: Any) -> PreTrainedModel:
    method = RetrievalHeads(**{"factor": 4, "heads": HEADS, "sinks": SINKS, "window": WINDOW} | parameters)
    return ctxext.patch(tiny(**MIXED).double(), method)


def held(cache: DynamicCache) -> list[list[tuple[int, int]]]:
    """Heads and keys of each part of each layer."""
    found = []
    for layer in cache.layers:
        parts = [layer, layer.near] if isinstance(layer, SplitLayer) and layer.near is not None else [layer]
        assert all(part.keys.shape == part.values.shape for part in parts)
        found.append([tuple(part.keys.shape[1:3]) for part in parts])
    return found


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


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max())


@pytest.mark.slow
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("steps", [[10] + [1] * 220, [200] + [1] * 30, [37] * 6, [90, 1, 1, 60, 3, 75], [16] * 14])
def test_decoding_is_that_of_no_cache_and_the_other_heads_hold_what_they_see(steps: list[int], exact: bool) -> None:
    model, cache = model_of(exact=exact), DynamicCache()
    ids = tokens(sum(steps), rows=2)
    assert error(read(model, cache, ids, steps), logits(model, ids)) < EXACT
    (far, near), (bounded,), (whole,) = held(cache)
    assert (far, whole) == ((2, sum(steps)), (4, sum(steps)))
    assert (near[0], bounded[0]) == (2, 4)
    assert near[1] == bounded[1] < MOST
    assert cache.get_seq_length() == sum(steps)
    assert [type(layer) for layer in cache.layers[:2]] == [SplitLayer, BoundedLayer]


@pytest.mark.slow
@pytest.mark.parametrize("far", [{"far": "dual_chunk", "chunk": 32}, {"far": "rerope", "far_window": 40}])
def test_other_far_methods_decode_as_without_a_cache(far: dict[str, Any]) -> None:
    model, cache = model_of(**far), DynamicCache()
    ids = tokens(180)
    assert error(read(model, cache, ids, [130, *[1] * 40, 10]), logits(model, ids)) < EXACT
    assert len(held(cache)[0]) == 2


@pytest.mark.slow
def test_plain_positions_inside_the_window_hold_less_and_see_the_window() -> None:
    """Against dense attention of the second layer, whose heads all see the first and the nearest tokens."""
    model = model_of(far="plain", factor=1, exact=False, window=8, heads=(8, 9, 10, 11))
    whole = model_of(far="plain", factor=1, exact=False, window=8, heads=tuple(range(12)))
    ids, plain = tokens(64), tiny(**MIXED).double()
    assert error(logits(whole, ids), logits(plain, ids)) < EXACT
    assert error(logits(model, ids)[:, :8], logits(plain, ids)[:, :8]) < EXACT
    assert error(logits(model, ids)[:, 20:], logits(plain, ids)[:, 20:]) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("padding", [[0, 23], [3, 95], [0, 140], [40, 40]])
def test_rows_that_begin_at_different_slots(padding: list[int]) -> None:
    """The second row is inside the trained window, where it sees all, when the first one could drop keys."""
    model, cache = model_of(), DynamicCache()
    ids = tokens(LENGTH + 20, rows=2)
    keep = torch.arange(ids.shape[1])[None] >= torch.tensor(padding)[:, None]
    found = read(model, cache, ids, [150, *[1] * 45, 20, *[1] * 35], keep)
    for row, start in enumerate(padding):
        alone = logits(model, ids[row : row + 1, start:])
        assert error(found[row : row + 1, start:], alone) < EXACT
    assert held(cache)[1][0][1] < LENGTH


@pytest.mark.slow
def test_generate_is_the_same_however_it_caches() -> None:
    model = model_of()
    ids = tokens(140, rows=2)
    keep = torch.ones_like(ids)
    keep[1, :37] = 0
    how: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    cache = DynamicCache()
    batch = model.generate(ids, attention_mask=keep, past_key_values=cache, **how)
    assert held(cache)[0][1][1] < MOST
    assert torch.equal(batch, model.generate(ids, attention_mask=keep, use_cache=False, **how))
    assert torch.equal(batch, model.generate(ids, attention_mask=keep, cache_implementation="static", **how))
    assert torch.equal(batch[1:, 140:], model.generate(ids[1:, 37:], **how)[:, 103:])
    beams = [model.generate(ids, attention_mask=keep, num_beams=2, use_cache=cached, **how) for cached in (True, False)]
    assert torch.equal(*beams)
    for looked_up in (3, 20):
        assert torch.equal(model.generate(ids[:1], prompt_lookup_num_tokens=looked_up, **how), batch[:1])


@pytest.mark.slow
def test_generate_over_the_end_of_the_trained_window_with_guesses_that_are_taken_back() -> None:
    """No key is dropped that a crop back into the trained window would need."""
    model = model_of()
    ids = tokens(40)
    how: dict[str, Any] = {"max_new_tokens": 120, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    wanted = model.generate(ids, use_cache=False, **how)
    for looked_up in (2, 10):
        assert torch.equal(model.generate(ids, prompt_lookup_num_tokens=looked_up, **how), wanted)


@pytest.mark.slow
def test_a_static_cache_stays_as_it_is() -> None:
    model = model_of()
    ids = tokens(LENGTH)
    cache = StaticCache(config=model.config, max_cache_len=LENGTH)
    assert error(read(model, cache, ids, [150, *[1] * 30]), logits(model, ids[:, :180])) < EXACT


@pytest.mark.slow
def test_it_is_cropped_as_far_as_it_still_holds_what_is_seen_and_refused_beyond() -> None:
    model, cache = model_of(), DynamicCache()
    ids = tokens(LENGTH, rows=2)
    whole = logits(model, ids)
    read(model, cache, ids, [150])
    copied = pickle.loads(pickle.dumps(copy.deepcopy(cache)))
    for some, removed in ((cache, -20), (copied, torch.tensor(-20))):
        some.crop(removed)
        assert some.get_seq_length() == 130
        assert error(read(model, some, ids, [7, *[1] * 43]), whole[:, 130:180]) < EXACT
    before = held(cache)
    with pytest.raises(IncompatibleError, match=r"cropped by up to \d+ tokens, found 100"):
        cache.crop(-100)
    assert held(cache) == before, "a refused crop takes nothing from the heads that hold all"
    assert cache.get_seq_length() == 180


@pytest.mark.slow
def test_a_cache_that_was_emptied_reads_a_short_text_as_without_the_extension() -> None:
    model, cache, plain = model_of(), DynamicCache(), tiny(**MIXED).double()
    ids = tokens(LENGTH)
    read(model, cache, ids, [180])
    empty(cache)
    assert cache.get_seq_length() == 0
    found = read(model, cache, ids, [30, *[1] * 10])
    assert torch.equal(found, read(plain, DynamicCache(), ids, [30, *[1] * 10]))
    assert error(read(model, cache, ids, [100, *[1] * 40, 10]), logits(model, ids[:, :190])[:, 40:]) < EXACT
    assert len(held(cache)[0]) == 2


@pytest.mark.slow
def test_rows_are_repeated_picked_and_put_in_another_order() -> None:
    model = model_of()
    ids = tokens(170, rows=2)
    keep = torch.arange(170)[None] >= torch.tensor([[0], [29]])
    whole = torch.cat([logits(model, ids[:1]), torch.nn.functional.pad(logits(model, ids[1:, 29:]), (0, 0, 29, 0))])
    for change, rows in (
        (lambda cache: cache.reorder_cache(torch.tensor([1, 0])), [1, 0]),
        (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1]),
        (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
    ):
        cache = DynamicCache()
        read(model, cache, ids, [150], keep)
        assert len(held(cache)[0]) == 2
        change(cache)
        found = read(model, cache, ids[rows], [1] * 20, keep[rows])
        assert error(found, whole[rows, 150:]) < EXACT


def test_an_offloaded_layer_moves_both_parts() -> None:
    model, cache = model_of(), DynamicCache()
    read(model, cache, tokens(150), [150])
    layer = cache.layers[0]
    layer.device = layer.near.device = torch.device("meta")
    layer.prefetch()
    assert layer.keys.is_meta
    assert layer.near.keys.is_meta


def test_a_mask_that_forgets_the_padding_is_refused_before_anything_is_cached() -> None:
    model, cache = model_of(), DynamicCache()
    ids = tokens(220, rows=2)
    keep = torch.arange(220)[None] >= torch.tensor([[0], [29]])
    read(model, cache, ids, [200], keep)
    before = held(cache)
    with pytest.raises(InvalidParameterError, match="filled with padding in front of some rows"):
        read(model, cache, ids, [1])
    assert held(cache) == before


def test_groups_that_the_model_does_not_have_are_refused() -> None:
    with pytest.raises(InvalidParameterError, match=r"of which this model has 12 \(0 to 11\), found 12"):
        model_of(heads=(3, 12))


@pytest.mark.slow
@pytest.mark.parametrize("heads", [(0, 1, 2, 3), (0, 1, 2, 3, 5), (0, 1, 2, 3, 4, 5, 6, 7)], ids=str)
def test_a_cache_of_which_some_layers_were_cropped_and_others_refused_is_not_read_further(
    heads: tuple[int, ...],
) -> None:
    """The first layer holds all keys, and is cropped before a later one refuses."""
    model, cache = model_of(heads=heads), DynamicCache()
    ids = tokens(200)
    read(model, cache, ids, [180])
    with pytest.raises(IncompatibleError, match=r"cropped by up to \d+ tokens, found 100"):
        cache.crop(-100)
    with pytest.raises(IncompatibleError, match="Some layers of this cache hold 80 tokens and others 180"):
        read(model, cache, ids, [1])
    empty(cache)
    assert error(read(model, cache, ids, [150, *[1] * 40]), logits(model, ids[:, :190])) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", [Streaming(factor=4, window=WINDOW), RetrievalHeads(factor=4, heads=(0, 5), window=WINDOW)], ids=str
)
def test_a_layer_that_attends_twice_in_a_pass_drops_no_key_between(method: Streaming | RetrievalHeads) -> None:
    model, cache = ctxext.patch(tiny("diffllama").double(), method), DynamicCache()
    ids = tokens(180)
    assert error(read(model, cache, ids, [100, *[1] * 50, 30]), logits(model, ids)) < EXACT
    assert not any("cache" in note for note in ctxext.describe(model).notes)


def test_where_all_groups_read_far_nothing_is_said_of_others() -> None:
    assert any("other groups" in note for note in ctxext.describe(model_of()).notes)
    assert not any("other groups" in note for note in ctxext.describe(model_of(heads=tuple(range(12)))).notes)
