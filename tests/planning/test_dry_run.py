"""What a cache takes: quantised, read in chunks, dropped by a method, of draft heads; by hand, and held by a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, Gemma3Config, PretrainedConfig, modeling_layers

import ctxext
from ctxext.checkpoints.load import extended_config
from ctxext.errors import InvalidParameterError
from ctxext.planning.plan import plan_serving, plan_training
from ctxext.training import Memory
from tests._models import RECENT, tiny, tokens
from tests.planning._held import HEAD_DIM, HIDDEN, KV_HEADS, LENGTH, LINEAR, MODELS, held_by, llama

ROW = 2 * KV_HEADS * HEAD_DIM  # numbers that one layer holds of one token


@pytest.mark.parametrize(("bits", "stored"), [(8, 8.5), (4, 4.5)])
def test_a_quantised_cache_by_hand(bits: int, stored: float) -> None:
    """llama.cpp: 32 numbers and a scale of 16 bits; transformers: 64, a scale and a zero point."""
    plain, packed = (plan_serving(llama(5), cache_bits=how).at(LENGTH) for how in (None, bits))
    assert plain.cache == 5 * ROW * LENGTH * 2
    assert packed.cache == 5 * ROW * LENGTH * stored / 8
    assert stored * 32 == 32 * bits + 16
    assert stored * 64 == 64 * bits + 2 * 16
    assert packed.layer - plain.layer == ROW * LENGTH * 2, "the layer at work has its own unpacked"


def parts(cache: Any) -> Iterator[Tensor]:
    for layer in cache.layers:
        for part in (layer, getattr(layer, "near", None)):
            if part is not None and part.keys is not None:
                yield from (part.keys, part.values)


METHODS: dict[str, dict[str, Any]] = {
    "yarn": {},
    "self_extend": {},
    "dual_chunk": {},
    "streaming": {"window": 32, "sinks": 4},
    "streaming exact": {"window": 32, "sinks": 4, "exact": True},
    "retrieval_heads": {"heads": [0, 3, 4, 5], "window": 32},
    "retrieval_heads inexact": {"heads": [0, 3], "window": 32, "exact": False},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_the_cache_of_a_method_is_the_planned_one(name: str) -> None:
    model = tiny(num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2)
    ctxext.patch(model, name.split()[0], factor=4, **METHODS[name])
    planned = plan_serving(model.config, dtype=torch.float32)
    for length in (90, 1024):  # below and beyond the length from which keys are dropped
        with torch.no_grad():
            model(tokens(length), past_key_values=(cache := DynamicCache(config=model.config)), logits_to_keep=1)
        assert planned.at(length).cache == sum(part.numel() * part.element_size() for part in parts(cache))
        assert planned.at(length).prompts == 2 * planned.at(length).cache


def test_no_prompts_are_kept_where_no_text_may_go_on_from_them() -> None:
    follows = ctxext.patch(tiny(), "dynamic_ntk", factor=4)
    for config, more in ((follows.config, {}), (tiny("falcon_h1").config, {}), (tiny().config, {"cache_bits": 8})):
        assert plan_serving(config, **more).at(96).prompts == 0


@pytest.mark.nightly
def test_heads_that_do_not_retrieve_hold_a_window_by_hand() -> None:
    """With 8 of 10 heads: 4 first tokens, 32 newest less the next query, and 32 to spare."""
    plain = tiny(num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=2)
    number = 2 * plain.config.head_dim * 2
    extended = ctxext.patch(plain, "retrieval_heads", factor=4, heads=[0, 9], window=32, sinks=4)
    planned = plan_serving(extended.config).at(LENGTH)
    assert planned.cache == number * (2 * LENGTH + 8 * (4 + 31 + 32))
    packed = plan_serving(extended.config, cache_bits=4).at(LENGTH)
    assert packed.cache == planned.cache * 4.5 / 16


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "sliding", "bloom"])
def test_a_prompt_in_chunks_holds_what_is_planned(name: str) -> None:
    model, chunk = MODELS[name](), 128
    planned = plan_serving(model.config, dtype=torch.float32, prompt_chunk=chunk).at(LENGTH)
    whole = plan_serving(model.config, dtype=torch.float32).at(LENGTH)
    assert (planned.cache, planned.layer < whole.layer / 2) == (whole.cache, True)

    def read() -> None:
        past: dict[str, Any] = {}
        for piece in tokens(LENGTH).split(chunk, 1):
            past = {"past_key_values": model(piece, use_cache=True, logits_to_keep=1, **past).past_key_values}

    with torch.no_grad():
        assert planned.total - planned.fixed == pytest.approx(held_by(model, read), rel=0.05)


@pytest.mark.nightly
def test_draft_heads_by_hand() -> None:
    """A head is a decoder layer, the projection of two states to one, three norms, and the keys of a layer."""
    layer = sum(inputs * outputs for inputs, outputs in LINEAR) + 2 * HIDDEN
    for field in ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules"):
        planned = plan_serving(llama(5, **{field: 2})).at(LENGTH)
        assert planned.draft == 2 * 2 * (layer + 2 * HIDDEN * HIDDEN + 3 * HIDDEN)
        assert planned.draft_cache == 2 * ROW * LENGTH * 2
        without = plan_serving(llama(5)).at(LENGTH)
        assert (planned.total, without.draft, without.draft_cache) == (without.total, 0, 0)
    packed = plan_serving(llama(5, num_nextn_predict_layers=1), quantisation="nf4", cache_bits=8).at(LENGTH)
    linear = sum(inputs * outputs for inputs, outputs in LINEAR)
    assert packed.draft == planned.draft // 2 - 2 * linear + int(linear * (0.5 + 1 / 64 + 1 / 4096))
    assert packed.draft_cache == ROW * LENGTH * 8.5 / 8


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(modeling_layers, "MtpModel"), reason="this transformers has no draft heads")
@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe"])
def test_draft_heads_are_those_of_transformers(kind: str) -> None:
    model = tiny(kind, first_k_dense_replace=1, num_nextn_predict_layers=2)
    shared = {id(weight) for weight in model.parameters()}
    heads = modeling_layers.MtpModel(model, 2)
    own = sum(weight.numel() for weight in heads.parameters() if id(weight) not in shared)
    assert plan_serving(model.config, dtype=torch.float32).fixed.draft == 4 * own


def with_tower() -> tuple[Gemma3Config, PretrainedConfig]:
    """Return the config of a small Gemma 3, and of its text part."""
    kinds = [*3 * ["sliding_attention"], "full_attention"] * 2
    text = tiny("gemma3_text", num_hidden_layers=8, layer_types=kinds).config
    tower = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
    tower |= {"image_size": 28, "patch_size": 14}
    whole = Gemma3Config(text_config=text.to_dict(), vision_config=tower, mm_tokens_per_image=4, image_token_index=5)
    return whole, text


@pytest.mark.slow
def test_a_tower_for_pictures_holds_nothing_of_a_text() -> None:
    """As Gemma 3's: its layers come before those that read text, and it has a learned table of 4 places."""
    held, alone = (plan_serving(config).at(LENGTH) for config in with_tower())
    assert held.cache == alone.cache
    assert held.layer == pytest.approx(alone.layer, rel=0.05)
    streams = (extended_config(config, "streaming", factor=4, window=32, sinks=4) for config in with_tower())
    bounded, alone = (plan_serving(config).at(LENGTH) for config in streams)
    assert bounded.cache == alone.cache < held.cache


@pytest.mark.slow
@pytest.mark.skipif(not RECENT, reason="Gemma 3 of transformers 5.16 has a loss of its own")
def test_a_tower_for_pictures_keeps_nothing_for_a_backward() -> None:
    step, alone = (plan_training(config, memory=Memory(offload=True)).at(LENGTH) for config in with_tower())
    assert step.host == alone.host
    assert step.kept == pytest.approx(alone.kept, rel=0.05)


def test_refused() -> None:
    with pytest.raises(InvalidParameterError, match="cache_bits must be 8 or 4, or None for the dtype's, found 2"):
        plan_serving(llama(2), cache_bits=2)
    with pytest.raises(InvalidParameterError, match="prompt_chunk must be a positive whole number of tokens, found 0"):
        plan_serving(llama(2), prompt_chunk=0)
