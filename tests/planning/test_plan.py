"""What a length takes, from the config alone: against arithmetic by hand, and against what a real step holds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import ctxext
from ctxext.errors import IncompatibleError, InvalidParameterError, UnknownNameError
from ctxext.planning.plan import STEP, longest, plan_serving, plan_training
from ctxext.training import Memory
from ctxext.training.lora import attach_lora
from tests._models import tiny, tokens
from tests._products import crossed
from tests.planning._held import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INNER,
    KV_HEADS,
    LENGTH,
    LINEAR,
    MODELS,
    VOCABULARY,
    held_by,
    llama,
)


@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 2), (torch.float32, 4)])
def test_by_hand_in_use(dtype: torch.dtype, size: int) -> None:
    found = plan_serving(llama(5), dtype=dtype).at(LENGTH)
    layer = sum(inputs * outputs for inputs, outputs in LINEAR) + 2 * HIDDEN
    assert found.weights == size * (2 * VOCABULARY * HIDDEN + 5 * layer + HIDDEN)
    assert found.cache == pytest.approx(size * 2 * 5 * KV_HEADS * HEAD_DIM * LENGTH, rel=1e-3)
    assert found.total == found.weights + found.cache + found.layer
    # The widest moment of a layer: residual, norm, the gate, its activation and the other half of the MLP.
    assert found.layer >= size * LENGTH * (2 * HIDDEN + 3 * INNER)


@pytest.mark.nightly
def test_by_hand_in_training() -> None:
    three, five = (plan_training(llama(layers), lora_rank=3).at(LENGTH) for layers in (3, 5))
    updates = 3 * sum(inputs + outputs for inputs, outputs in LINEAR)
    norms, embedding = (2 * 5 + 1) * HIDDEN, VOCABULARY * HIDDEN
    assert five.adapters == five.gradients == five.optimizer // 2 == 4 * (5 * updates + norms + embedding)
    # Of each layer its input, and autocast's copy of its updates, in bfloat16.
    assert five.kept - three.kept == 2 * (2 * HIDDEN * LENGTH + 2 * updates)
    assert (five.layer, five.loss) == (three.layer, three.loss)
    assert five.loss - 2 * HIDDEN * LENGTH == pytest.approx(LENGTH * VOCABULARY * 10, rel=0.15)


@pytest.mark.nightly
def test_by_hand_what_memory_does() -> None:
    def at(layers: int = 5, **memory: Any) -> Any:
        return plan_training(llama(layers), memory=Memory(**memory)).at(LENGTH)

    usual, fewer = at(), at(3)
    three, kept = (at(layers, save_attention=True) for layers in (3, 5))
    attention = LENGTH * (2 * HIDDEN + 4 * HEADS)  # its output, and a float32 per head
    assert kept.kept - three.kept == (usual.kept - fewer.kept) + 2 * attention
    assert at(checkpointing=False).kept > 5 * usual.kept
    offloaded = at(offload=True)
    assert (offloaded.host, offloaded.kept + offloaded.host) == (5 * 2 * HIDDEN * LENGTH, usual.kept)
    assert at(mlp_tile=64).layer < usual.layer
    assert at(loss_chunk=None).loss >= 10 * VOCABULARY * LENGTH > 5 * at(loss_chunk=64).loss


@pytest.mark.slow
def test_by_hand_quantised() -> None:
    plain, packed = (plan_serving(llama(5), quantisation=how).at(LENGTH) for how in (None, "nf4"))
    linear = 5 * sum(inputs * outputs for inputs, outputs in LINEAR)
    assert plain.weights - packed.weights == 2 * linear - int(linear * (0.5 + 1 / 64 + 1 / 4096))
    assert packed.layer - plain.layer == 2 * HIDDEN * INNER, "the largest weight, unpacked"


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_holds_what_is_planned(name: str) -> None:
    model = MODELS[name]()
    planned = plan_serving(model.config, dtype=torch.float32).at(LENGTH)
    with torch.no_grad():
        found = held_by(model, lambda: model(tokens(LENGTH), use_cache=True, logits_to_keep=1))
    assert planned.total - planned.fixed == pytest.approx(found, rel=0.05)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "memory"),
    crossed(
        ["llama", "sliding", "bloom extended"],
        [Memory(), Memory(save_attention=True, mlp_tile=128), Memory(checkpointing=False)],
    ),
)
def test_a_step_holds_what_is_planned(name: str, memory: Memory) -> None:
    model, ids = MODELS[name](), tokens(LENGTH)
    small = {"norms": False, "embeddings": False}
    planned = plan_training(model.config, memory=memory, lora_rank=1, dtype=torch.float32, **small).at(LENGTH)
    adapted = attach_lora(model.train(), rank=1, **small)
    memory.apply(adapted)
    found = held_by(adapted, lambda: adapted(ids, labels=ids, use_cache=False).loss.backward())
    assert planned.total - planned.fixed == pytest.approx(found, rel=0.05)


@pytest.mark.slow
def test_the_longest_that_fits() -> None:
    planned = plan_serving(llama(2))
    budget = 20 * 2**20
    found = longest(planned, budget)
    assert found.length % STEP == 0
    assert found.total <= budget < planned.at(found.length + STEP).total


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "last"), [("mpt", 64), ("marian", 64), ("gptj", 64), ("roberta", 63)])
def test_a_plan_ends_where_the_positions_of_a_table_do(kind: str, last: int) -> None:
    """Rows of a table are not all positions of tokens: two of RoBERTa's 514 are none, of the tiny one's 64 one."""
    model, memory = tiny(kind), Memory(checkpointing=False, loss_chunk=None)
    for planned in (plan_serving(model.config), plan_training(model.config, memory=memory)):
        with pytest.raises(InvalidParameterError, match=rf"^{last} tokens take "):
            longest(planned, 1)
        assert longest(planned, 50 * 2**20).length == last
        with pytest.raises((IndexError, RuntimeError)):  # of the model: it reads no more
            model(tokens(last + 1))
        with pytest.raises(IncompatibleError, match=f"{kind} has positions for {last} tokens and cannot read 65"):
            planned.at(65)


@pytest.mark.slow
def test_frequencies_that_follow_the_text_are_planned_alike() -> None:
    plain = plan_serving(llama(2)).at(LENGTH)
    alone = replace(plain, prompts=0)  # none is kept where positions follow the length
    for method, expected in (("dynamic_ntk", alone), ("yarn", plain)):
        extended = ctxext.patch(tiny_of(llama(2)), method, factor=4).config
        assert plan_serving(extended).at(LENGTH) == expected
    follows = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 256}
    assert plan_serving(llama(2, rope_parameters=follows)).at(LENGTH) == alone


def tiny_of(config: LlamaConfig) -> Any:
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.usefixtures("_any_types")
@pytest.mark.parametrize("given", [{"lora_rank": "8"}, {"lora_rank": 8.5}, {"lora_rank": None}, {"dtype": "bfloat16"}])
def test_other_types_are_refused_by_name(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameterError, match=rf"^{next(iter(given))} must be a .*, found "):
        plan_training(llama(2), **given)


@pytest.mark.slow
def test_a_field_that_keeps_stock_code_out_is_planned_by_its_value() -> None:
    extended = ctxext.patch(tiny("xglm"), "pi", factor=4).config
    assert plan_serving(extended).at(60) == plan_serving(tiny("xglm").config).at(60)


@pytest.mark.slow
def test_refused() -> None:
    with pytest.raises(InvalidParameterError, match="lora_rank must be a whole number, at least 1, found 0"):
        plan_training(llama(2), lora_rank=0)
    with pytest.raises(UnknownNameError, match=r"Unknown quantisation 'nf3'. Did you mean 'nf4'\?"):
        plan_serving(llama(2), quantisation="nf3")
    for plan in (plan_serving, plan_training):  # its weights would be missing, and the scores of all pairs of tokens
        with pytest.raises(IncompatibleError, match=r"not planned for method 'cope'.* Measure a real run instead"):
            plan(ctxext.patch(tiny(), "cope", factor=4).config)
    with pytest.raises(IncompatibleError, match="The config of this blt names no hidden_size"):
        plan_serving(tiny("blt").config)
