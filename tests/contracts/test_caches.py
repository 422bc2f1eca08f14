"""A cache is continued by what filled it, or not at all: cropped, copied, picked from, filled before patch, unpatch."""

from __future__ import annotations

import copy
import pickle
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers
from peft import PrefixTuningConfig, get_peft_model
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel, StaticCache

import ctxext
from ctxext.caches.records import cache_argument
from ctxext.errors import IncompatibleError, PatchStateError
from tests._models import FOLLOWING, RECENT, STATIC, by_method, extended, logits, tiny, tokens
from tests._programs import ROOT, ran
from tests.walk.tiny import TRAINED_LENGTH

following = pytest.mark.parametrize(("model_type", "method"), FOLLOWING, ids=by_method)
every = pytest.mark.parametrize(("model_type", "method"), [*FOLLOWING, *STATIC], ids=by_method)

LONG, KEPT, NEW = 2 * TRAINED_LENGTH - 28, 40, 5  # 100 tokens are read, 40 of them kept, 5 others follow


@torch.no_grad()
def read(model: Any, ids: Tensor, cache: Any, **arguments: Any) -> Tensor:
    found: Tensor = model(ids, past_key_values=cache, use_cache=True, **arguments).logits
    return found


def filled_by(model: PreTrainedModel, length: int = LONG, rows: int = 1) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    read(model, tokens(length, rows), cache)
    return cache


def edited() -> Tensor:
    """The first 40 tokens of what was read, and 5 others."""
    return torch.cat([tokens(LONG)[:, :KEPT], tokens(NEW, rows=2)[1:]], dim=1)


def generated(model: PreTrainedModel, prompt: Tensor, **options: Any) -> Tensor:
    greedy = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "disable_compile": True}
    found: Tensor = model.generate(prompt, attention_mask=torch.ones_like(prompt), **greedy, **options)
    return found


class OwnCache:
    """A cache of a user's own, which keeps keys and does not say how many."""

    def __init__(self) -> None:
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if layer in self.kept:
            keys, values = (torch.cat(pair, 2) for pair in zip(self.kept[layer], (keys, values), strict=True))
        self.kept[layer] = keys, values
        return keys, values

    def get_query_offset(self, layer: int) -> int:
        return self.kept[layer][0].shape[2] if layer in self.kept else 0

    def get_mask_sizes(self, new: int, layer: int) -> tuple[int, int]:
        return self.get_query_offset(layer) + new, 0


def halved(_: Any) -> EncoderDecoderCache:
    return EncoderDecoderCache(DynamicCache(), DynamicCache())


class Subclass(DynamicCache):
    """A class of a user's own."""


LINEAR = {"layer_types": ["linear_attention", "full_attention"] * 2, "num_hidden_layers": 4}
WINDOWED = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4, "sliding_window": 16}
KINDS: dict[str, tuple[str, dict[str, Any], tuple[str, str], Any]] = {
    "growing": ("llama", {}, ("yarn", "pi"), lambda config: DynamicCache()),
    "of a config": ("llama", {}, ("self_extend", "yarn"), lambda config: DynamicCache(config=config)),
    "static": ("llama", {}, ("yarn", "rerope"), lambda config: StaticCache(config=config, max_cache_len=LONG)),
    "of a subclass": ("llama", {}, ("alibi", "pi"), lambda config: Subclass()),
    "of the user": ("llama", {}, ("yarn", "pi"), lambda config: OwnCache()),
    "in windows": ("gemma3_text", WINDOWED, ("yarn", "self_extend"), lambda config: DynamicCache(config=config)),
    "of states": ("qwen3_next", LINEAR, ("yarn", "self_extend"), lambda config: DynamicCache(config=config)),
    "of two halves": ("t5", {}, ("stretch_buckets", "stretch_buckets"), halved),
    "quantized": ("llama", {}, ("yarn", "pi"), lambda config: transformers.QuantizedCache("fp8", config)),
}
if not RECENT:  # before transformers 5.23
    del KINDS["quantized"], KINDS["of the user"]


@torch.no_grad()
def go_on(model: Any, cache: Any, first: int, stop: int) -> Tensor:
    given: dict[str, Any] = {"input_ids": tokens(LONG)[:, first:stop]}
    if model.config.is_encoder_decoder:
        states = torch.ones(1, 7, model.config.hidden_size)
        given = {"decoder_input_ids": given["input_ids"], "encoder_outputs": (states,)}
    elif isinstance(cache, OwnCache):
        given["position_ids"] = torch.arange(first, stop)[None]
    found: Tensor = model(**given, past_key_values=cache, use_cache=True).logits
    return found


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind != "growing")) for kind in KINDS])
def test_no_kind_of_cache_goes_on_under_another_extension(kind: str) -> None:
    """Filled before ``patch``, before ``unpatch``, and under another method."""
    model_type, changes, methods, made = KINDS[kind]
    first, other = ({"method": name, "factor": factor} for name, factor in zip(methods, (4.0, 2.0), strict=True))
    model = tiny(model_type, **changes)
    for before, after in ((None, first), (first, None), (first, other)):
        if before is not None:
            ctxext.patch(model, trained_length=TRAINED_LENGTH, **before)
        cache = made(model.config)
        if before is not None and not hasattr(cache, "get_seq_length"):
            with pytest.raises(PatchStateError, match=r"This OwnCache has no get_seq_length"):
                go_on(model, cache, 0, 9)
            ctxext.unpatch(model)
            continue
        go_on(model, cache, 0, 9)
        if before is not None:
            ctxext.unpatch(model)
        if after is not None:
            ctxext.patch(model, trained_length=TRAINED_LENGTH, **after)
        with pytest.raises(PatchStateError, match=r"Start with a new cache\."):
            go_on(model, cache, 9, 12)
        if after is not None:
            ctxext.unpatch(model)


@pytest.mark.parametrize("borrow", [copy.copy, lambda _: DynamicCache()])
def test_a_cache_that_borrows_the_layers_of_another(borrow: Any) -> None:
    model = extended("llama", {"method": "yarn", "factor": 4.0})
    cache = filled_by(model, KEPT)
    made = borrow(cache)
    made.layers = cache.layers
    ctxext.unpatch(model)
    with pytest.raises(PatchStateError, match=r"after ctxext\.unpatch, and gives other.*Start with a new cache"):
        read(model, tokens(1), made)
    ctxext.patch(model, trained_length=TRAINED_LENGTH, method="yarn", factor=4.0)
    read(model, tokens(1), cache)


def test_the_half_of_a_cache_that_holds_the_text_of_an_encoder() -> None:
    """Its keys are computed from the states of an encoder, in which positions are of the extension too."""
    model = tiny("t5")
    for before in (None, "stretch_buckets"):
        if before:
            ctxext.patch(model, trained_length=TRAINED_LENGTH, method=before, factor=2.0)
        cache = halved(None)
        go_on(model, cache, 0, 9)
        if before:
            ctxext.unpatch(model)
        ctxext.patch(model, trained_length=TRAINED_LENGTH, method="stretch_buckets", factor=4.0)
        with pytest.raises(PatchStateError, match=r"^This cache of 7 tokens was filled .*Start with a new cache\."):
            go_on(model, EncoderDecoderCache(DynamicCache(), cache.cross_attention_cache), 0, 3)
        ctxext.unpatch(model)


@pytest.mark.parametrize("argument", ["cache", "past_key_values"])
@pytest.mark.parametrize(
    ("model_type", "method"), [("llama", "dynamic_ntk"), ("llama", "yarn"), ("llama", "alibi"), ("mpt", "pi")]
)
def test_a_cache_is_guarded_under_each_of_its_names(model_type: str, method: str, argument: str) -> None:
    model = tiny(model_type)
    if argument not in (cache_argument(model), "past_key_values"):
        pytest.skip("this transformers calls it past_key_values, and no other name")
    plain = filled_by(model, KEPT)
    ctxext.patch(model, method, factor=4.0, trained_length=TRAINED_LENGTH)
    for called in (model, model.get_decoder()):  # the older name is changed to the newer inside each of them
        with pytest.raises(PatchStateError, match="40 tokens was filled without a record"):
            called(tokens(NEW), **{argument: plain}, use_cache=True)
    ids, cache = tokens(TRAINED_LENGTH), DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :KEPT], **{argument: cache}, use_cache=True)
        found = model(ids[:, KEPT:], **{argument: cache}, use_cache=True).logits
    torch.testing.assert_close(found, logits(model, ids)[:, KEPT:], atol=3e-4, rtol=0)


class Renamed(transformers.LlamaForCausalLM):  # type: ignore[misc]
    """As of a transformers to come, in which a cache has a third name."""

    def forward(self, input_ids: Tensor, memory: Any = None, use_cache: bool | None = None) -> Any:
        return super().forward(input_ids)


def test_a_cache_of_an_unknown_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.LlamaModel, "forward", Renamed.forward)
    model = tiny()
    model.__class__ = Renamed
    before = model.config.to_dict()
    said = r"forward takes use_cache, but no cache named cache or past_key_values"
    with pytest.raises(IncompatibleError, match=said):
        ctxext.patch(model, "yarn", factor=4.0)
    assert model.config.to_dict() == before
    assert "forward" not in vars(model.model)


@pytest.mark.parametrize("model_type", ["bloom", "falcon", "mpt"])
def test_a_layer_whose_cache_has_an_unknown_name_is_refused(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(model_type, **({"alibi": True, "new_decoder_architecture": False} if model_type == "falcon" else {}))
    attention = next(type(module) for module in model.modules() if type(module).__name__.endswith("Attention"))
    monkeypatch.setattr(attention, "forward", lambda self, hidden_states, memory=None: (hidden_states, None))
    before = model.config.to_dict()
    with pytest.raises(IncompatibleError, match=r"Attention\.forward takes no cache under a name that ctxext knows"):
        ctxext.patch(model, "pi", factor=4.0, trained_length=TRAINED_LENGTH)
    assert model.config.to_dict() == before


@following
def test_a_pass_that_failed_half_way_spoils_the_cache(model_type: str, method: dict[str, Any]) -> None:
    """An interrupt, or too little memory: some layers hold keys of the new length, others do not."""
    model = extended(model_type, method)
    cache = filled_by(model, TRAINED_LENGTH - 4)
    last = [module for module in model.modules() if isinstance(module, nn.ModuleList)][-1][-1]
    handle = last.register_forward_pre_hook(Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        read(model, tokens(2), cache)
    handle.remove()
    with pytest.raises(IncompatibleError, match="a pass failed half-way"):
        read(model, tokens(1), cache)
    assert logits(model, tokens(3)).isfinite().all()


@every
def test_a_cache_filled_before_patch(model_type: str, method: dict[str, Any]) -> None:
    model = tiny(model_type)
    cache, again = filled_by(model, KEPT), filled_by(model, KEPT)
    ctxext.patch(model, trained_length=TRAINED_LENGTH, **method)
    with pytest.raises(PatchStateError, match=r"cache of 40 tokens was filled without a record"):
        read(model, edited()[:, KEPT:], cache)
    if (model_type, method) in FOLLOWING:
        found = generated(model, edited(), past_key_values=again)
        assert torch.equal(found, generated(model, edited(), use_cache=False))
    else:
        with pytest.raises(PatchStateError, match="Start with a new cache"):
            generated(model, edited(), past_key_values=again)


def prefixed(model: PreTrainedModel) -> Any:
    torch.manual_seed(0)
    return get_peft_model(model, PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)).eval()


@pytest.mark.parametrize("method", ["yarn", "dynamic_ntk"])
def test_a_learned_prefix_is_taken_in_either_order(method: str) -> None:
    model = prefixed(tiny())
    plain = logits(model, tokens(KEPT))
    ctxext.patch(model, method, factor=4.0)
    found = logits(model, tokens(KEPT))
    assert torch.equal(found, plain) == (method == "dynamic_ntk")
    assert found.isfinite().all()
    ctxext.unpatch(model)
    assert torch.equal(logits(model, tokens(KEPT)), plain)
    inside = prefixed(ctxext.patch(tiny(), method, factor=4.0))
    assert torch.equal(logits(inside, tokens(KEPT)), found)
    assert inside.generate(input_ids=tokens(KEPT), max_new_tokens=3).shape[1] == KEPT + 3
    made = tiny()
    cache = made(tokens(4)).past_key_values
    with pytest.raises(PatchStateError, match="without a record"):
        ctxext.patch(made, method, factor=4.0)(tokens(4), past_key_values=cache)


@pytest.mark.nightly
@pytest.mark.usefixtures("_for_compiling")
def test_compiled_whole_a_static_method_still_remembers() -> None:
    model = extended("llama", {"method": "yarn", "factor": 4.0})
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    cache, expected = DynamicCache(config=model.config), logits(model, edited())
    first = read(compiled, edited()[:, :KEPT], cache)
    torch.testing.assert_close(torch.cat([first, read(compiled, edited()[:, KEPT:-1], cache)], 1), expected[:, :-1])
    last = read(model, edited()[:, -1:], cache)
    torch.testing.assert_close(last, expected[:, -1:], atol=3e-4, rtol=0)


@pytest.mark.nightly
def test_a_static_cache_is_one_graph_for_all_tokens() -> None:
    """In a process of its own: the checker of shapes that tests run under cannot be compiled."""
    ran(["-m", "tests.contracts.compiled_remap_program", "generated"], ROOT, code=0)


@pytest.mark.parametrize("method", ["yarn", "self_extend", "dynamic_ntk", "alibi"])
def test_a_stored_cache_is_refused_under_another_factor(method: str) -> None:
    """Whoever stores prefixes reads keys of another rotation without a word, but for this record."""
    model, other = (ctxext.patch(tiny(), method, factor=factor) for factor in (4, 2))
    ids = tokens(KEPT + 4)
    stored = pickle.dumps(model(ids[:, :KEPT]).past_key_values)
    again = model(ids[:, KEPT:], past_key_values=pickle.loads(stored)).logits
    torch.testing.assert_close(again, model(ids).logits[:, KEPT:], atol=1e-5, rtol=1e-5)
    with pytest.raises(PatchStateError, match=r"extended by .*factor 4.*factor 2.*Start with a new cache"):
        other(ids[:, KEPT:], past_key_values=pickle.loads(stored))
