"""Streaming in constant memory: the cache drops what no later query can see, and nothing else changes."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel, StaticCache

import ctxext
from ctxext.errors import IncompatibleError, InvalidParameterError
from ctxext.methods.streaming import Streaming
from tests._caches import OF_ROWS, read
from tests._models import logits, tiny, tokens
from tests.walk.tiny import TRAINED_LENGTH

EXACT = 1e-6
LENGTH = 180
SINKS, WINDOW = 4, 32
MOST = SINKS + WINDOW + 2 * 32  # with what may be cropped, and as much again between two cuts


def model_of(**changes: Any) -> PreTrainedModel:
    assert SINKS + WINDOW < TRAINED_LENGTH
    return ctxext.patch(tiny(**changes).double(), Streaming(factor=4, sinks=SINKS, window=WINDOW))


def held(cache: DynamicCache) -> int:
    sizes = {part.shape[-2] for layer in cache.layers for part in (layer.keys, layer.values)}
    assert len(sizes) == 1
    return sizes.pop()


@torch.no_grad()
def test_one_call_of_a_long_text_holds_no_more_whoever_makes_the_cache() -> None:
    model, ids = model_of(), tokens(LENGTH)
    given = DynamicCache()
    model(ids, past_key_values=given)
    made = model(ids, use_cache=True).past_key_values
    assert SINKS + WINDOW <= held(made) == held(given) < MOST
    assert model(ids, use_cache=False).past_key_values is None


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["llama", "glm"])
def test_decoding_is_that_of_no_cache_and_holds_no_more_keys_than_it_sees(model_type: str) -> None:
    model = model_of(model_type=model_type)
    ids = tokens(LENGTH, rows=2)
    whole, cache, sizes = logits(model, ids), DynamicCache(), set()
    found = [read(model, cache, ids, [10])]
    for _ in range(LENGTH - 10):
        found.append(read(model, cache, ids, [1]))
        sizes.add(held(cache))
    assert float((torch.cat(found, 1) - whole).abs().max()) < EXACT
    assert max(sizes) < MOST
    assert cache.get_seq_length() == LENGTH


@pytest.mark.slow
@pytest.mark.parametrize("steps", [[130] + [1] * 40, [37] * 5, [90, 1, 1, 60, 3, 25], [16] * 11])
def test_chunks_of_a_prefill_are_dropped_too(steps: list[int]) -> None:
    model, cache = model_of(), DynamicCache()
    ids = tokens(sum(steps), rows=2)
    found = read(model, cache, ids, steps)
    assert float((found - logits(model, ids)).abs().max()) < EXACT
    assert held(cache) < MOST


@pytest.mark.slow
@pytest.mark.parametrize("padding", [[0, 23], [3, 95], [0, 119], [40, 40]])
def test_rows_that_begin_at_different_slots_keep_their_own_first_tokens(padding: list[int]) -> None:
    """The second row is shorter than the window when the first one drops keys, and later drops its own."""
    model, cache = model_of(), DynamicCache()
    ids = tokens(LENGTH + 20, rows=2)
    keep = torch.arange(ids.shape[1])[None] >= torch.tensor(padding)[:, None]
    found = read(model, cache, ids, [120, *[1] * 45, 20, *[1] * 15], keep)
    assert held(cache) < MOST
    for row, start in enumerate(padding):
        alone = logits(model, ids[row : row + 1, start:])
        assert float((found[row : row + 1, start:] - alone).abs().max()) < EXACT


@pytest.mark.slow
def test_generate_is_the_same_however_it_caches() -> None:
    model = model_of()
    ids = tokens(100, rows=2)
    keep = torch.ones_like(ids)
    keep[1, :37] = 0
    how: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    cache = DynamicCache()
    batch = model.generate(ids, attention_mask=keep, past_key_values=cache, **how)
    assert held(cache) < MOST
    assert torch.equal(batch, model.generate(ids, attention_mask=keep, use_cache=False, **how))
    assert torch.equal(batch, model.generate(ids, attention_mask=keep, cache_implementation="static", **how))
    assert torch.equal(batch[1:, 100:], model.generate(ids[1:, 37:], **how)[:, 63:])
    beams = [model.generate(ids, attention_mask=keep, num_beams=2, use_cache=cached, **how) for cached in (True, False)]
    assert torch.equal(*beams)
    assert torch.equal(model.generate(ids[:1], prompt_lookup_num_tokens=20, **how), batch[:1])


@pytest.mark.slow
def test_a_static_cache_stays_as_it_is() -> None:
    model = model_of()
    ids = tokens(LENGTH)
    cache = StaticCache(config=model.config, max_cache_len=LENGTH)
    found = read(model, cache, ids, [150, *[1] * 30])
    assert float((found - logits(model, ids)).abs().max()) < EXACT


@pytest.mark.slow
def test_it_is_cropped_as_far_as_it_still_holds_what_is_seen_and_refused_beyond() -> None:
    model, cache = model_of(), DynamicCache()
    ids = tokens(LENGTH, rows=2)
    whole = logits(model, ids)
    read(model, cache, ids, [150])
    copied = pickle.loads(pickle.dumps(copy.deepcopy(cache)))
    for some, removed in ((cache, -20), (copied, torch.tensor(-20))):  # a tensor, as transformers 5.17 decodes assisted
        some.crop(removed)
        assert some.get_seq_length() == 130
        assert float((read(model, some, ids, [7, *[1] * 43]) - whole[:, 130:]).abs().max()) < EXACT
    with pytest.raises(
        IncompatibleError,
        match=r"cropped by up to \d+ tokens, found 100.*the first 4 and the newest \d+ of its 180 tokens",
    ):
        cache.crop(-100)
    assert cache.get_seq_length() == 180
    cache.reset()
    assert cache.get_seq_length() == 0
    assert float((read(model, cache, ids, [130, 20]) - whole[:, :150]).abs().max()) < EXACT


@pytest.mark.slow
def test_rows_are_repeated_picked_and_put_in_another_order() -> None:
    model = model_of()
    ids = tokens(150, rows=2)
    keep = torch.arange(150)[None] >= torch.tensor([[0], [29]])
    whole = torch.cat([logits(model, ids[:1]), torch.nn.functional.pad(logits(model, ids[1:, 29:]), (0, 0, 29, 0))])
    for change, rows in OF_ROWS:
        cache = DynamicCache()
        read(model, cache, ids, [130], keep)
        change(cache)
        found = read(model, cache, ids[rows], [1] * 20, keep[rows])
        assert float((found - whole[rows, 130:]).abs().max()) < EXACT


def test_with_a_gradient_it_is_the_same() -> None:
    model, cache = model_of(), DynamicCache()
    ids = tokens(200)
    found = [model(part, past_key_values=cache).logits for part in ids.split([150, 25, 25], 1)]
    assert held(cache) < MOST
    assert float((torch.cat(found, 1).detach() - logits(model, ids)).abs().max()) < EXACT


def test_a_mask_that_forgets_the_padding_is_refused() -> None:
    model, cache = model_of(), DynamicCache()
    ids = tokens(220, rows=2)
    keep = torch.arange(220)[None] >= torch.tensor([[0], [29]])
    read(model, cache, ids, [200], keep)
    with pytest.raises(InvalidParameterError, match="filled with padding in front of some rows"):
        read(model, cache, ids, [1])
    with pytest.raises(InvalidParameterError, match="covers 1 tokens, but the text has 201"):
        model(ids[:, 200:201], past_key_values=cache, attention_mask=keep[:, 200:201])


@pytest.mark.slow
def test_right_padding_drops_nothing_and_stays_right() -> None:
    """Slots do not tell distances there."""
    model, cache = model_of(), DynamicCache()
    ids = tokens(230, rows=2)
    keep = torch.ones_like(ids)
    keep[1, 180:200] = 0
    positions = (keep.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        parts = [
            model(
                ids[:, a:b],
                attention_mask=keep[:, :b],
                position_ids=positions[:, a:b],
                past_key_values=cache,
            ).logits
            for a, b in [(0, 200), (200, 215), (215, 230)]
        ]
    assert held(cache) == 230
    found = torch.cat(parts, 1)
    text = torch.cat([ids[1:, :180], ids[1:, 200:]], 1)
    wanted = logits(model, text)
    assert float((torch.cat([found[1:, :180], found[1:, 200:]], 1) - wanted).abs().max()) < EXACT
