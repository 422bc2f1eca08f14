"""Retrieval heads in a cache: far heads keep all keys, the others few, and decoding is that of no cache."""

from __future__ import annotations

import copy
import pickle
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache

import ctxext
from ctxext.caches.bounded import BoundedLayer, SplitLayer
from ctxext.caches.records import empty
from ctxext.errors import IncompatibleError, InvalidParameterError
from ctxext.methods.retrieval_heads import RetrievalHeads
from ctxext.methods.streaming import Streaming
from tests._caches import OF_ROWS, read
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


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max())


@pytest.mark.parametrize("way", ["given", "made", "made, in a tuple", "made by the decoder alone"])
def test_one_call_of_a_long_text_holds_what_the_other_heads_see(way: str) -> None:
    """Whoever makes the cache. After 200 tokens the other heads hold their window, and the first tokens."""
    model, ids = model_of(exact=False), tokens(200)
    with torch.no_grad():
        cache = DynamicCache() if way == "given" else None
        read_by = model.model if way == "made by the decoder alone" else model
        out = read_by(ids, past_key_values=cache, use_cache=True, return_dict="tuple" not in way)
        cache = out[1] if "tuple" in way else out.past_key_values
        (far, near), (bounded,), (whole,) = held(cache)
        assert (far, whole) == ((2, 200), (4, 200))
        assert SINKS + WINDOW <= near[1] == bounded[1] < MOST
        more = tokens(3, rows=2)[1:]
        found = model(more, past_key_values=cache).logits
    assert error(found, logits(model, torch.cat([ids, more], 1))[:, -3:]) < EXACT


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
    for change, rows in OF_ROWS:
        cache = DynamicCache()
        read(model, cache, ids, [150], keep)
        assert len(held(cache)[0]) == 2
        change(cache)
        found = read(model, cache, ids[rows], [1] * 20, keep[rows])
        assert error(found, whole[rows, 150:]) < EXACT


def parts(cache: DynamicCache) -> list[Tensor]:
    """Keys and values of the far and the near heads of the first layer."""
    layer = cache.layers[0]
    return [layer.keys, layer.values, layer.near.keys, layer.near.values]


@pytest.mark.slow
def test_a_step_writes_the_new_tokens_beside_the_held_ones() -> None:
    """A copy of all held keys in each step would cost a long text most of what it saves."""
    model, cache = model_of(), DynamicCache()
    ids = tokens(170, rows=2)
    read(model, cache, ids, [150, 1])
    before = [(part.data_ptr(), part.shape[2]) for part in parts(cache)]
    read(model, cache, ids, [1, 2, 1])
    assert [(part.data_ptr(), part.shape[2] - 4) for part in parts(cache)] == before


@pytest.mark.slow
@pytest.mark.parametrize("how", ["cropped", "copied"])
def test_what_was_held_before_is_not_written_over(how: str) -> None:
    """A text that goes on from fewer tokens, and two that go on from one cache, each in a copy."""
    model, cache = model_of(), DynamicCache()
    ids = tokens(170)
    read(model, cache, ids, [150, 1, 3])
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


@pytest.mark.slow
def test_a_cache_goes_on_outside_of_the_mode_that_filled_it() -> None:
    model, cache = model_of(), DynamicCache()
    ids = tokens(160)
    with torch.inference_mode():
        read(model, cache, ids, [150, 1])
    found = read(model, cache, ids, [1, 2])
    with torch.inference_mode():
        found = torch.cat([found, read(model, cache, ids, [1])], 1)
    assert error(found, logits(model, ids[:, :155])[:, 151:]) < EXACT


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


@pytest.mark.parametrize(("factor", "exact", "read"), [(4, True, "0.55"), (1, True, "1.00"), (1, False, "0.72")])
def test_what_a_step_reads_is_said_of_the_longest_text(factor: float, exact: bool, read: str) -> None:
    """Inside the trained window all groups read all keys, unless exact=False."""
    notes = ctxext.describe(model_of(factor=factor, exact=exact)).notes
    assert any(f"A step at {64 * factor:,} tokens reads {read} of the keys" in note for note in notes)


def drawn(chance: random.Random) -> tuple[PreTrainedModel, RetrievalHeads]:
    """A model of one of several shapes, extended by some method of the far heads."""
    layers, kv_heads = chance.choice([1, 2, 3]), chance.choice([1, 2, 4])
    sizes = {"num_hidden_layers": layers, "num_key_value_heads": kv_heads, "head_dim": 16}
    model = tiny(
        chance.choice(["llama", "glm", "cohere"]), **sizes, num_attention_heads=kv_heads * chance.choice([1, 2])
    )
    groups = range(layers * kv_heads)
    far = chance.choice(["self_extend", "rerope", "dual_chunk", "plain"])
    own = {
        "rerope": {"far_window": 20},
        "dual_chunk": {"chunk": 32, "local": 4},
        "plain": {"factor": 1, "exact": False},
    }
    parameters = {
        "factor": chance.choice([2, 4]),
        "heads": chance.sample(groups, chance.randint(1, len(groups))),
        "window": chance.choice([1, 2, 17, 24, 33]),
        "sinks": chance.choice([1, 4, 30]),
        "exact": chance.random() < 0.5,
        "temperature": chance.choice(["none", "logn"]),
    }
    method = RetrievalHeads(far=far, **parameters | own.get(far, {}))
    return ctxext.patch(model.double(), method), method


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30))
def test_whatever_users_do_to_a_cache_decoding_is_that_of_no_cache(seed: int) -> None:
    """Passes of many sizes; between them crops, copies and other orders of rows, each padded at its own length."""
    chance = random.Random(seed)
    model, method = drawn(chance)
    length, rows, at, cache = 190, chance.choice([1, 2, 3]), 0, DynamicCache()
    ids = tokens(length, rows=rows)
    keep = torch.arange(length)[None] >= torch.tensor([[chance.choice([0, 9, 70])] for _ in range(rows)])
    alone = [logits(model, ids[row : row + 1, keep[row]])[0] for row in range(rows)]
    order = list(range(rows))
    while at < length:
        how = chance.choice(["crop", "order", "copy", "repeat", "nothing", "nothing", "nothing", "nothing"])
        if how == "crop" and at:
            removed = chance.choice([1, 5, 31, 60, at])
            try:
                cache.crop(-min(removed, at))
                at -= min(removed, at)
            except IncompatibleError:
                cache, at = DynamicCache(), 0
        elif how == "order" and at:
            picked = [chance.randrange(len(order)) for _ in order]
            cache.reorder_cache(torch.tensor(picked))
            order = [order[row] for row in picked]
        elif how == "copy":
            cache = pickle.loads(pickle.dumps(copy.deepcopy(cache)))
        elif how == "repeat" and at and len(order) < 4:
            cache.batch_repeat_interleave(2)
            order = [row for row in order for _ in range(2)]
        step = min(length - at, chance.choice([1, 1, 1, 5, 37, 90]))
        found = read(model, cache, ids[order], [step], keep[order])
        for place, row in enumerate(order):
            start = int((~keep[row]).sum())
            wanted = alone[row][max(0, at - start) : max(0, at + step - start)]
            if len(wanted):
                assert error(found[place, step - len(wanted) :], wanted) < EXACT, (method, at, step)
        at += step


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        {"do_sample": True, "top_k": 5, "num_return_sequences": 3},
        {"num_beams": 3, "num_return_sequences": 2},
        {"prefill_chunk_size": 64},
        {"prefill_chunk_size": 7, "num_beams": 2},
    ],
    ids=str,
)
def test_every_way_to_generate_is_that_of_no_cache(how: dict[str, Any]) -> None:
    """Three rows, which leave the trained window at different steps."""
    model, ids = model_of(), tokens(90, rows=3)
    keep = torch.arange(90)[None] >= torch.tensor([[0], [40], [60]])
    how = {"max_new_tokens": 50, "do_sample": False, "pad_token_id": 0, "eos_token_id": None} | how
    results = []
    for cached in (True, False):
        torch.manual_seed(0)
        given = how if cached else {name: value for name, value in how.items() if name != "prefill_chunk_size"}
        results.append(model.generate(ids, attention_mask=keep.long(), use_cache=cached, **given))
    assert torch.equal(*results)


@pytest.mark.slow
def test_an_assistant_and_a_chat_with_a_kept_cache() -> None:
    model, text = model_of(), tokens(50)
    how: dict[str, Any] = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    cache = DynamicCache()
    for turn in range(4):
        how["attention_mask"] = torch.ones_like(text)  # token 0, which pads, may have been written
        wanted = model.generate(text, use_cache=False, **how)
        assert torch.equal(model.generate(text, past_key_values=cache, **how), wanted)
        assert torch.equal(model.generate(text, assistant_model=model_of(exact=False), **how), wanted)
        text = torch.cat([wanted, tokens(20 + turn)], 1)
    assert len(held(cache)[0]) == 2
