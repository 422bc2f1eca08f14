"""What a step costs beside its arithmetic: how often the host reads what an accelerator computed, and what it launches.

The host never reads once for each layer, where it would wait every time; a layer launches few kernels more than plain
attention, counted on the CPU, without computing attention.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM

import ctxext
from ctxext.errors import IncompatibleError
from ctxext.kernels import step
from ctxext.methods import BiasMethod, EncodingMethod, RopeMethod, known_methods
from ctxext.spec import RopeSpec
from tests._host_reads import Counting
from tests._models import tiny, tokens
from tests._products import crossed, some
from tests._steps import launches_a_layer

TRAINED = 32
# What a text and a step may read beyond stock transformers, which asks whether a mask hides anything: whether positions
# go on where the cache ends, and what a method asks of them.
MORE = 3


def model_of(name: str | None, layers: int) -> LlamaForCausalLM:
    model = tiny("llama", num_hidden_layers=layers, max_position_embeddings=TRAINED)
    if name is None:
        return model
    rope = model.model.rotary_emb
    spec = RopeSpec(rotary_dim=2 * len(rope.inv_freq), base=10000.0, trained_length=TRAINED)
    return ctxext.patch(model, known_methods()[name].example(spec), trained_length=TRAINED)


@torch.no_grad()
def reads(model: LlamaForCausalLM, length: int, *, given: bool) -> tuple[int, int]:
    """Of a whole text, and of the second step after it; with a mask and positions as ``generate`` gives them."""

    def told(start: int, stop: int) -> dict[str, torch.Tensor]:
        positions, mask = torch.arange(start, stop)[None], torch.ones(1, stop, dtype=torch.long)
        return {"position_ids": positions, "attention_mask": mask} if given else {}

    ids, cache, found = torch.randint(64, (1, length + 2)), DynamicCache(), []
    model(ids[:, :length], **told(0, length))  # the frequencies of a length are computed once, on the host
    for start, stop in ((0, length), (length, length + 1), (length + 1, length + 2)):
        with Counting() as counting:
            model(ids[:, start:stop], past_key_values=cache, **told(start, stop))
        found.append(counting.found.total())
    return found[0], found[2]


def of_method(name: str | None, layers: int, *, given: bool) -> tuple[int, int]:
    model = model_of(name, layers)
    try:
        return reads(copy.deepcopy(model), 2 * TRAINED - 4, given=given)
    except IncompatibleError:  # beyond the window a step changes what is cached of a method that follows the length
        return reads(model, TRAINED - 4, given=given)


FOR_LLAMA = RopeMethod | BiasMethod | EncodingMethod
NAMES = [name for name, cls in known_methods().items() if issubclass(cls, FOR_LLAMA)]
NAMES.sort(key=lambda name: name != "self_extend")  # in front: with and without a mask


@pytest.mark.slow
@pytest.mark.parametrize(("given", "name"), crossed([True, False], NAMES))  # as generate calls, and bare
def test_reads_do_not_grow_with_the_layers_and_are_few(name: str, given: bool) -> None:
    few, many = (of_method(name, layers, given=given) for layers in (1, 2))
    assert few == many, "a read in every layer"
    stock = of_method(None, 2, given=given)
    assert max(many[0] - stock[0], many[1] - stock[1]) <= MORE


def test_a_read_is_counted_and_most_methods_were_looked_at() -> None:
    with Counting() as counting:
        assert bool(torch.ones(2).all())
        assert torch.ones(2).tolist() == [1, 1]
    assert counting.found.total() == 2
    assert of_method(None, 2, given=True)[1] == 1, "stock asks whether the mask hides anything"
    assert {"yarn", "dynamic_ntk", "alibi", "self_extend", "streaming", "t5_bias", "path"} <= set(NAMES)


KERNELS = 2  # plain attention is counted as one, although on CUDA it splits the keys and takes two
# Parameters of each method, and the launches a layer beyond those of plain attention.
METHODS: dict[str, tuple[dict[str, Any], int]] = {
    "self_extend": ({"window": 16}, 1),
    "dual_chunk": ({"chunk": 24, "local": 4}, 1),
    "rerope": ({"window": 16}, 1),
    "streaming": ({"window": 24}, 1),
    "retrieval_heads": ({"window": 20}, 3),  # it writes keys and values of two kinds of heads
}


def stand_in(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
    """Return an empty output, counted as the two kernels."""
    for _ in range(KERNELS):
        torch.zeros(1)
    batch, heads, length = q.shape[:3]
    return q.new_empty(batch, length, heads, v.shape[3]).transpose(1, 2)  # in the order that layers expect


def step_of(method: str | None) -> Callable[[int], Callable[[], object]]:
    """Return what makes the step of a model of so many layers, behind a text beyond every border."""

    def made(layers: int) -> Callable[[], object]:
        model, cache = tiny(num_hidden_layers=layers), DynamicCache()
        if method is not None:
            one_a_layer = {"heads": [4 * layer + 2 for layer in range(layers)]} if method == "retrieval_heads" else {}
            ctxext.patch(model, method, factor=4, **METHODS[method][0], **one_a_layer)
        with torch.no_grad():
            for part in tokens(100).split([98, 1, 1], 1):
                model(part, past_key_values=cache)

        @torch.no_grad()
        def call() -> object:
            return model(tokens(1), past_key_values=cache)

        return call

    return made


@pytest.mark.parametrize("method", some(METHODS, "self_extend", "retrieval_heads"))
def test_a_layer_of_a_step_launches_few_kernels_more_than_a_plain_one(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    plain = launches_a_layer(step_of(None), "cpu", (2, 6))
    monkeypatch.setattr(step, "runs_triton", lambda device: True)
    monkeypatch.setattr(step, "_rows", stand_in)
    assert launches_a_layer(step_of(method), "cpu", (2, 6)) - plain <= METHODS[method][1]
