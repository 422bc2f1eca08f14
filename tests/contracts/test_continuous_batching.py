"""Continuous batching, with several texts in one row: right for a method that is one table, refused for any other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from inspect import signature
from typing import Any

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

import ctxext
from ctxext.errors import IncompatibleError
from ctxext.laboratory.encodings import ENCODINGS
from ctxext.methods import METHODS, LongRoPE, Method
from ctxext.methods.remap import RemapMethod
from ctxext.spec import RopeSpec
from tests._models import tiny, tokens
from tests.walk.tiny import TRAINED_LENGTH

LONGROPE = LongRoPE(short_factor=(1.0,) * 16, long_factor=(4.0,) * 16, factor=4.0)
ROPE = RopeSpec(rotary_dim=32, base=1e4, trained_length=TRAINED_LENGTH)
REMAPPING = [kind.example(ROPE) for kind in METHODS.values() if issubclass(kind, RemapMethod)]
REFUSED: list[tuple[str, str | Method]] = [
    *(("llama", method) for method in REMAPPING),
    *(("llama", name) for name in ("dynamic_ntk", "dynamic_pi", "dynamic_yarn", "alibi")),
    ("llama", LONGROPE),
    ("llama", next(iter(ENCODINGS))),
    ("bloom", "pi"),
    ("bloom", "dynamic_pi"),
]
ENTRIES: list[Callable[[Any], Any]] = [
    lambda model: model.generate_batch([[41, 42, 43], [44, 45]]),
    lambda model: model.generate(tokens(9), cache_implementation="paged"),
    lambda model: model.continuous_batching_context_manager().__enter__(),
    lambda model: model.init_continuous_batching(),
]
PROMPTS = [tokens(TRAINED_LENGTH + 36)[0].tolist(), tokens(20, rows=2)[1].tolist()]
SETTINGS = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)


def extended(model_type: str, method: str | Method) -> PreTrainedModel:
    factor = 4.0 if isinstance(method, str) else None
    return ctxext.patch(tiny(model_type), method, factor=factor, trained_length=TRAINED_LENGTH)


def working() -> list[threading.Thread]:
    """The running threads, without those of progress bars, which are of a class of their own."""
    return [thread for thread in threading.enumerate() if type(thread) is threading.Thread]


def batched(model: PreTrainedModel, **options: Any) -> list[list[int]]:
    page = "page_size" if "page_size" in signature(ContinuousBatchingConfig).parameters else "block_size"
    small = ContinuousBatchingConfig(num_blocks=32, max_batch_tokens=64, **{page: 32})
    results = model.generate_batch(
        PROMPTS, generation_config=SETTINGS, continuous_batching_config=small, warmup=False, **options
    )
    assert [result.error for result in results.values()] == [None] * len(PROMPTS)
    return [result.generated_tokens for result in results.values()]


def alone(model: PreTrainedModel) -> list[list[int]]:
    greedy = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return [model.generate(torch.tensor([ids]), **greedy)[0, len(ids) :].tolist() for ids in PROMPTS]


@pytest.mark.parametrize(("model_type", "method"), REFUSED, ids=lambda value: getattr(value, "name", value))
def test_every_entry_is_refused_in_the_thread_of_its_caller(model_type: str, method: str | Method) -> None:
    model = extended(model_type, method)
    threads, implementation = working(), model.config._attn_implementation
    name = getattr(method, "name", method)
    for enter in ENTRIES:
        with pytest.raises(IncompatibleError, match=rf"^Method '{name}' .*generate_batch.* with a padded batch"):
            enter(model)
    assert working() == threads
    assert model.config._attn_implementation == implementation
    ctxext.unpatch(model)
    assert "init_continuous_batching" not in vars(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    ["yarn", "ntk", LongRoPE(short_factor=(4.0,) * 16, long_factor=(4.0,) * 16, factor=4.0)],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_method_that_is_one_table_gives_the_tokens_of_generate(method: str | Method) -> None:
    model = extended("llama", method)
    assert batched(model) == alone(model)


@pytest.mark.slow
def test_blocks_that_were_filled_under_other_positions_are_not_shared() -> None:
    """A manager that is kept between calls shares the blocks of equal prompts."""
    model = tiny()
    plain = batched(model, persistent_manager=True)
    manager = model._cached_continuous_batching_manager
    assert manager.batch_processor.cache.search_prefix_match("another", PROMPTS[0]) > 0
    ctxext.patch(model, "yarn", factor=4.0)
    found = batched(model, persistent_manager=True)
    assert found == alone(model) != plain
    ctxext.unpatch(model)
    assert model._cached_continuous_batching_manager is manager
    assert batched(model) == plain == alone(model)
