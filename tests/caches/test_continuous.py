"""Continuous batching, several texts in one row: the tokens of each text alone, or a refusal in the caller's thread."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching.offloading_manager import OffloadingManager

import ctxext
from ctxext.caches.records import PAGED_IN_LAYERS
from ctxext.errors import IncompatibleError, InvalidParameterError, PatchStateError
from ctxext.laboratory.encodings import ENCODINGS
from ctxext.methods import METHODS, Method
from ctxext.methods.dynamic_yarn import DynamicYaRN
from ctxext.methods.longrope import LongRoPE
from ctxext.methods.remap import RemapMethod
from ctxext.methods.retrieval_heads import RetrievalHeads
from ctxext.spec import RopeSpec
from tests._models import tiny, tokens
from tests.walk.tiny import TRAINED_LENGTH

ROPE = RopeSpec(rotary_dim=32, base=1e4, trained_length=TRAINED_LENGTH)
REMAPPING = [kind.example(ROPE) for kind in METHODS.values() if issubclass(kind, RemapMethod)]
SELF_EXTEND = METHODS["self_extend"].example(ROPE)
TWO_SETS: dict[str, Any] = {"short_factor": (1.0,) * 16, "long_factor": (4.0,) * 16, "factor": 4.0}
BY_REQUEST: list[Method] = [
    *(METHODS[name](factor=4.0, growth="request") for name in ("dynamic_yarn", "dynamic_ntk", "dynamic_pi")),
    LongRoPE(**TWO_SETS, growth="request"),
]
TABLES = [METHODS["yarn"](factor=4.0), METHODS["ntk"](factor=4.0), LongRoPE(**TWO_SETS | {"short_factor": (4.0,) * 16})]
LIKE_OTHERS = [*BY_REQUEST[1:3], *TABLES[1:2]]
"""Methods that reach a paged cache as the first of their list does."""
LAYER_TYPES = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4}
WINDOWS = LAYER_TYPES | {"sliding_window": 16, "num_key_value_heads": 2}
IN_GROUPS_THAT_REACH = RetrievalHeads(heads=(2,), factor=4.0)
PAGED: list[tuple[str, dict[str, Any], Method]] = [
    *(("llama", {}, method) for method in [*REMAPPING, *BY_REQUEST, *TABLES, METHODS["alibi"](factor=4.0)]),
    *(("qwen3", {}, method) for method in [SELF_EXTEND, METHODS["dual_chunk"].example(ROPE), BY_REQUEST[0]]),
    *((name, WINDOWS, SELF_EXTEND) for name in ("gemma3_text", "olmo3", "gpt_oss")),
    *(("olmo3", WINDOWS, method) for method in (BY_REQUEST[0], IN_GROUPS_THAT_REACH)),
]
HYBRID = {"layer_types": ["linear_attention", "full_attention"] * 2, "num_hidden_layers": 4}
REFUSED: list[tuple[str, dict[str, Any], str | Method, str]] = [
    *(("llama", {}, name, "growth='request'") for name in ("dynamic_ntk", "dynamic_pi", "dynamic_yarn")),
    ("llama", {}, LongRoPE(**TWO_SETS), "growth='request'"),
    ("llama", {}, next(iter(ENCODINGS)), "reads no paged cache"),
    ("bloom", {}, "pi", "reads no paged cache"),
    ("bloom", {}, "dynamic_pi", "growth='request'"),
    ("qwen3_next", HYBRID, SELF_EXTEND, "no paged cache for layers of type 'linear_attention'"),
    ("deepseek_v3", {}, SELF_EXTEND, "a pass with transformers' paged cache fails"),
    ("gpt_neox", {}, BY_REQUEST[0], "a pass with transformers' paged cache fails"),
]
OLDER = "(?!)" if PAGED_IN_LAYERS else "it needs transformers 5.24"
ENTRIES: list[Callable[[Any], Any]] = [
    lambda model: model.generate_batch([[41, 42, 43], [44, 45]], max_new_tokens=2),
    lambda model: model.generate(tokens(9), cache_implementation="paged", max_new_tokens=2),
    lambda model: model.continuous_batching_context_manager().__enter__(),
    lambda model: model.init_continuous_batching(),
]
PROMPTS = [tokens(TRAINED_LENGTH + 86)[0].tolist(), tokens(20, rows=2)[1].tolist(), tokens(70, rows=3)[2].tolist()]
SETTINGS = GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0)
SIZES: dict[str, Any] = {"num_blocks": 32, "max_batch_tokens": 64, "page_size": 32}
paged_in_layers = pytest.mark.skipif(not PAGED_IN_LAYERS, reason="transformers before 5.24 pages in its own attention")


def extended(model_type: str, method: str | Method, changes: dict[str, Any]) -> PreTrainedModel:
    factor = 4.0 if isinstance(method, str) else None
    return ctxext.patch(tiny(model_type, **changes), method, factor=factor, trained_length=TRAINED_LENGTH)


def working() -> list[threading.Thread]:
    """The running threads, without those of progress bars, which are of a class of their own."""
    return [thread for thread in threading.enumerate() if type(thread) is threading.Thread]


def batched(
    model: PreTrainedModel, prompts: list[list[int]] = PROMPTS, *, sizes: dict[str, Any] | None = None, **options: Any
) -> list[tuple[list[int], list[float]]]:
    """The new tokens of each prompt, and the logarithms of their probabilities."""
    small = ContinuousBatchingConfig(**SIZES | {"return_logprobs": True} | (sizes or {}))
    how = {"generation_config": SETTINGS, "continuous_batching_config": small, "warmup": False} | options
    results = model.generate_batch(prompts, **how)
    assert {result.error for result in results.values()} == {None}
    return [(result.generated_tokens, result.logprobs) for result in results.values()]


@contextlib.contextmanager
def managed(model: PreTrainedModel) -> Iterator[Any]:
    """A manager that runs, as its caller holds it."""
    sizes = ContinuousBatchingConfig(**SIZES)
    manager = model.init_continuous_batching(generation_config=SETTINGS, continuous_batching_config=sizes)
    manager.start()
    try:
        yield manager
    finally:
        manager.stop(hard_stop=True)


def alone(model: PreTrainedModel, prompts: list[list[int]] = PROMPTS) -> list[tuple[list[int], list[float]]]:
    """The new tokens of each prompt by ``generate``, and the logarithms of their probabilities."""
    greedy = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    greedy |= {"output_logits": True, "return_dict_in_generate": True}
    texts = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **greedy)
        new = out.sequences[0, len(prompt) :].tolist()
        losses = torch.stack(out.logits)[:, 0].log_softmax(-1)
        texts.append((new, losses[range(len(new)), new].tolist()))
    return texts


def assert_same(texts: list[tuple[list[int], list[float]]], others: list[tuple[list[int], list[float]]]) -> None:
    for (new, losses), (other_new, other_losses) in zip(texts, others, strict=True):
        assert new == other_new
        assert losses == pytest.approx(other_losses, abs=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "changes", "method"),
    [
        pytest.param(*case, id=f"{case[0]}-{case[2].name}", marks=[pytest.mark.nightly] * (case[2] in LIKE_OTHERS))
        for case in PAGED
    ],
)
@paged_in_layers
def test_a_batch_gives_the_tokens_of_each_request_alone(
    model_type: str, changes: dict[str, Any], method: Method
) -> None:
    """In passes of 64 tokens, so that prompts are read in pieces, some beside others that decode."""
    plain = alone(tiny(model_type, **changes))
    model = extended(model_type, method, changes)
    expected = alone(model)
    assert [losses for _, losses in expected] != [losses for _, losses in plain]
    assert_same(batched(model), expected)
    ctxext.unpatch(model)
    assert "init_continuous_batching" not in vars(model)
    assert_same(alone(model), plain)


@pytest.mark.nightly
@pytest.mark.parametrize("model_type", ["olmo3", "gpt_oss"])
@paged_in_layers
def test_requests_that_have_not_filled_their_windows_yet(model_type: str) -> None:
    """They have fewer keys than others in layers with a window of 16 tokens."""
    model, prompts = extended(model_type, SELF_EXTEND, WINDOWS), [PROMPTS[0], PROMPTS[1][:9], PROMPTS[2][:5], [7]]
    assert_same(batched(model, prompts), alone(model, prompts))


@pytest.mark.nightly
@pytest.mark.parametrize("method", [SELF_EXTEND, BY_REQUEST[0]], ids=lambda method: method.name)
@paged_in_layers
def test_requests_that_lose_their_blocks_begin_again(method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    model, times = extended("llama", method, {}), []
    offload = OffloadingManager.offload_requests
    monkeypatch.setattr(OffloadingManager, "offload_requests", lambda self: times.append(1) or offload(self))
    prompts = [tokens(90, rows=4)[row].tolist() for row in range(4)]
    few = {"num_blocks": 10, "page_size": 16, "safety_margin": 0.0}
    assert_same(batched(model, prompts, sizes=few), alone(model, prompts))
    assert times


@pytest.mark.nightly
@pytest.mark.parametrize("method", [SELF_EXTEND, BY_REQUEST[0]], ids=lambda method: method.name)
@paged_in_layers
def test_a_shared_prefix_is_read_once_where_its_keys_are_the_same(method: Method) -> None:
    """Requests of other lengths have other keys under a dynamic method."""
    model = extended("llama", method, {})
    texts = [PROMPTS[0][:100] + tail for tail in ([7, 8, 9], list(range(3, 60)))]
    batched(model, PROMPTS[:1], persistent_manager=True)
    cache = model._cached_continuous_batching_manager.batch_processor.cache
    shared = cache.search_prefix_match("another", texts[0])
    cache.free_blocks("another")
    assert shared == (0 if method.dynamic else 96)
    assert_same(batched(model, texts, persistent_manager=True), alone(model, texts))
    model.destroy_cached_continuous_batching_manager()
    ctxext.unpatch(model)


@pytest.mark.nightly
@pytest.mark.parametrize(("model_type", "method"), [("olmo3", SELF_EXTEND), ("llama", BY_REQUEST[0])])
@paged_in_layers
def test_eager_attention_and_a_manager_that_is_kept(model_type: str, method: Method) -> None:
    model = tiny(model_type, **WINDOWS if model_type == "olmo3" else {})
    model.set_attn_implementation("eager")
    ctxext.patch(model, method, trained_length=TRAINED_LENGTH)
    expected, implementation = alone(model), model.config._attn_implementation
    for _ in range(2):
        assert_same(batched(model, persistent_manager=True), expected)
        assert model.config._attn_implementation == implementation
    model.destroy_cached_continuous_batching_manager()
    ctxext.unpatch(model)
    assert model.config._attn_implementation == "eager"


@pytest.mark.nightly
@paged_in_layers
def test_several_texts_of_one_prompt() -> None:
    """They copy the blocks that are not full."""
    model = extended("llama", SELF_EXTEND, {})
    settings = copy.deepcopy(SETTINGS)
    settings.num_return_sequences = 3
    how = {"continuous_batching_config": ContinuousBatchingConfig(**SIZES), "warmup": False}
    results = model.generate_batch(PROMPTS, generation_config=settings, **how)
    new = [new for new, _ in alone(model)]
    assert [result.generated_tokens for result in results.values()] == [new[0]] * 3 + [new[1]] * 3 + [new[2]] * 3


@pytest.mark.parametrize(
    ("model_type", "changes", "method", "reason"), REFUSED, ids=lambda value: getattr(value, "name", str(value)[:20])
)
def test_every_entry_is_refused_in_the_thread_of_its_caller(
    model_type: str, changes: dict[str, Any], method: str | Method, reason: str
) -> None:
    model = extended(model_type, method, changes)
    threads, implementation = working(), model.config._attn_implementation
    name = getattr(method, "name", method)
    for enter in ENTRIES:
        said = rf"^Method '{name}' .*generate_batch.*({reason}|{OLDER}).* with a padded batch"
        with pytest.raises(IncompatibleError, match=said):
            enter(model)
    assert [thread for thread in working() if thread not in threads] == []  # those of earlier tests may end
    assert model.config._attn_implementation == implementation
    ctxext.unpatch(model)
    assert "init_continuous_batching" not in vars(model)


@paged_in_layers
def test_a_dynamic_method_needs_the_number_of_new_tokens() -> None:
    model = extended("llama", DynamicYaRN(factor=4.0, growth="request"), {})
    with pytest.raises(InvalidParameterError, match=r"^max_new_tokens is not set\."):
        model.generate_batch([[41, 42, 43]], continuous_batching_config=ContinuousBatchingConfig(**SIZES))
    manager = model.init_continuous_batching(continuous_batching_config=ContinuousBatchingConfig(**SIZES))
    with pytest.raises(InvalidParameterError, match=r"^max_new_tokens is not set\."):
        manager.add_request([41, 42, 43])


@pytest.mark.parametrize(
    "setting", [{"use_cuda_graph": True}, {"use_async_batching": True}, {"default_compile_level": 1}]
)
@paged_in_layers
def test_graphs_are_refused_by_name(setting: dict[str, Any]) -> None:
    model = extended("llama", SELF_EXTEND, {})
    with pytest.raises(IncompatibleError, match=rf"^{next(iter(setting))}="):
        model.init_continuous_batching(continuous_batching_config=ContinuousBatchingConfig(**SIZES | setting))


@pytest.mark.nightly
def test_blocks_that_were_filled_under_other_positions_are_not_shared() -> None:
    """A manager that is kept between calls shares the blocks of equal prompts."""
    model = tiny()
    plain = batched(model, persistent_manager=True)
    manager = model._cached_continuous_batching_manager
    assert manager.batch_processor.cache.search_prefix_match("another", PROMPTS[0]) > 0
    ctxext.patch(model, "yarn", factor=4.0)
    found = batched(model, persistent_manager=True)
    assert_same(found, alone(model))
    assert found != plain
    ctxext.unpatch(model)
    assert model._cached_continuous_batching_manager is manager
    again = batched(model)
    assert_same(again, plain)
    assert_same(again, alone(model))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, "yarn"),
        ("yarn", None),
        ("self_extend", None),
        *(
            pytest.param(*pair, marks=pytest.mark.nightly)
            for pair in ((None, "self_extend"), ("yarn", "pi"), ("self_extend", "rerope"), ("dynamic_ntk", None))
        ),
    ],
)
@paged_in_layers
def test_a_manager_that_its_caller_holds_is_refused_by_name_once_the_extension_changes(
    before: str | None, after: str | None
) -> None:
    """The keys in its cache, some of which the next prompts may share, have other positions."""
    model = tiny()

    def change(name: str | None) -> None:
        if name is None:
            ctxext.unpatch(model)
        else:
            ctxext.patch(model, name, factor=4.0, **({"growth": "request"} if name == "dynamic_ntk" else {}))

    if before is not None:
        change(before)
    with managed(model) as manager:
        for _ in range(2):  # the second shares blocks of the first
            assert manager.get_result(manager.add_request(PROMPTS[0]), timeout=60).error is None
        if before is not None:
            ctxext.unpatch(model)
        if before is None or after is not None:
            change(after)
        if before is None:  # transformers' own manager: the worker finds out
            assert "it began before this" in manager.get_result(manager.add_request(PROMPTS[0]), timeout=60).error
        else:
            with pytest.raises(PatchStateError, match=rf"was extended by '{before}'.*model\.init_continuous_batching"):
                manager.add_request(PROMPTS[2])
        assert_same(batched(model), alone(model))
        if after is not None:
            ctxext.unpatch(model)
            change(before) if before is not None else None
        if before is not None and after is not None:  # extended as it was: its keys are right again
            assert manager.get_result(manager.add_request(PROMPTS[0]), timeout=60).error is None


@paged_in_layers
def test_a_part_that_was_extended_alone_is_named_in_batches_of_the_whole() -> None:
    """Its manager is transformers' own, whose cache holds no token yet."""
    model = tiny()
    ctxext.patch(model.model, "yarn", factor=4.0)
    with managed(model) as manager:
        error = manager.get_result(manager.add_request(PROMPTS[0]), timeout=60).error
        assert "or belongs to a model around it. Extend the whole, by ctxext.patch" in error


@paged_in_layers
@pytest.mark.nightly
def test_a_model_whose_attention_a_manager_has_set_is_extended_when_that_is_stopped() -> None:
    """Unpatched, it would have the manager's attention again, which reads rightly from a paged cache only."""
    model = tiny(attn_implementation="eager")
    manager = model.init_continuous_batching(continuous_batching_config=ContinuousBatchingConfig(**SIZES))
    with pytest.raises(PatchStateError, match=r"has set the attention .* 'paged\|eager'. Stop the manager first"):
        ctxext.patch(model, "self_extend", factor=4.0)
    manager.start()
    manager.stop()
    ctxext.patch(model, "self_extend", factor=4.0)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["yarn", "self_extend"])
@paged_in_layers
def test_requests_under_way_do_not_go_on_in_a_model_that_was_unpatched(method: str) -> None:
    """Their keys have other positions; transformers pauses a manager for changes of its model."""
    model = ctxext.patch(tiny(), method, factor=4.0)
    with managed(model) as manager:
        request = manager.add_request(PROMPTS[1], max_new_tokens=400, streaming=True)
        assert not manager.get_result(request, timeout=60).is_finished()
        with manager.pause():
            ctxext.unpatch(model)
        while not (result := manager.get_result(request, timeout=60)).is_finished():
            pass
        assert f"while the model was extended by '{method}'" in result.error
