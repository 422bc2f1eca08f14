"""Classes that somebody typed in: subclasses of transformers' models whose module has no source and few names."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import (
    BertModel,
    BigBirdModel,
    Gemma3TextModel,
    LlamaModel,
    MegatronBertModel,
    MistralModel,
    Phi3Model,
    RemBertModel,
)

import ctxext
from ctxext.errors import IncompatibleError
from ctxext.probe.code import masks_follow_positions, names_of, source_of
from ctxext.training.lora import attach_lora
from tests._models import logits, tiny, tokens
from tests.walk.tiny import TRAINED_LENGTH

TYPED = """
import torch
from transformers import BloomForCausalLM, LlamaForCausalLM, MambaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer


class Attention(LlamaAttention):
    pass


class Layer(LlamaDecoderLayer):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.self_attn = Attention(config, layer_idx)


class Llama(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        layers = [Layer(config, number) for number in range(config.num_hidden_layers)]
        self.model.layers = torch.nn.ModuleList(layers)


class Alibi(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.slopes = config.use_alibi


class Bloom(BloomForCausalLM):
    pass


class Mamba(MambaForCausalLM):
    def last(self):
        return torch.nn.functional.linear(self.hidden, self.out_proj.weight)
"""


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module that was typed in, as ``__main__`` is in a notebook."""
    module = ModuleType("typed_in")
    monkeypatch.setitem(sys.modules, "typed_in", module)
    exec(TYPED, vars(module))
    return module


def same(kind: type, model: Any) -> Any:
    """A model of a typed class with the weights of a stock one."""
    mine = kind(model.config)
    mine.load_state_dict(model.state_dict())
    return mine.eval()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "method"),
    [*(("llama", name) for name in ("self_extend", "yarn", "dynamic_ntk", "alibi", "fox")), ("bloom", "pi")],
)
def test_a_typed_class_is_extended_as_the_class_that_it_is_made_of(typed: Any, model_type: str, method: str) -> None:
    model = tiny(model_type)
    mine = same(getattr(typed, model_type.title()), model)
    for each in (model, mine):
        torch.manual_seed(0)
        ctxext.patch(each, method, factor=2)
    torch.testing.assert_close(logits(mine, tokens()), logits(model, tokens()))
    assert not any("LlamaAttention" in note for note in ctxext.describe(mine).notes)


@pytest.mark.parametrize(("field", "is_read"), [("use_alibi", True), ("alibi", False)])
def test_what_a_typed_class_reads_of_its_config_is_found_in_its_code(typed: Any, field: str, is_read: bool) -> None:
    config = tiny().config
    config.use_alibi = False
    setattr(config, field, True)
    model = typed.Alibi(config)
    if is_read:
        assert ctxext.describe(ctxext.patch(model, "yarn", factor=2)).target_length == 2 * TRAINED_LENGTH
    else:
        with pytest.raises(IncompatibleError, match="alibi=True, but Alibi does not read it"):
            ctxext.patch(model, "yarn", factor=2)


def test_a_typed_class_without_positions_is_refused_with_the_reason(typed: Any) -> None:
    with pytest.raises(IncompatibleError, match="it has no positions at all"):
        ctxext.patch(same(typed.Mamba, tiny("mamba")), "yarn", factor=2)


def test_lora_leaves_out_what_a_typed_class_multiplies_by_itself(typed: Any) -> None:
    model = typed.Llama(tiny().config)
    adapted = attach_lora(ctxext.patch(model, "yarn", factor=2))
    assert "q_proj" in adapted.peft_config["default"].target_modules
    assert "self.out_proj.weight" in source_of(typed.Mamba).splitlines()


def test_names_of_a_class_are_those_of_the_moment(typed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy told torch.compile, which puts names into modules while it traces, that the code had changed."""
    names = names_of(typed.Llama)
    monkeypatch.setitem(vars(typed), "put_later", 1)
    assert names["put_later"] == 1
    assert {"LlamaAttention", "apply_rotary_pos_emb"} <= set(names)


@pytest.mark.parametrize("kind", [BertModel, BigBirdModel, MegatronBertModel, RemBertModel])
def test_a_class_that_makes_masks_without_positions_keeps_no_documents_apart(kind: type) -> None:
    """Under the name of a function of transformers, or under one that was chosen before."""
    assert not masks_follow_positions(kind)


@pytest.mark.parametrize("kind", [LlamaModel, MistralModel, Phi3Model, Gemma3TextModel])
def test_a_class_that_makes_masks_with_positions_keeps_documents_apart(kind: type) -> None:
    assert masks_follow_positions(kind)


def test_two_documents_in_a_row_are_refused_where_they_would_see_each_other() -> None:
    model = ctxext.patch(tiny("megatron-bert"), "tile", factor=2)
    with pytest.raises(IncompatibleError, match="makes its attention masks without positions"):
        model(tokens(40), position_ids=torch.arange(20).repeat(2)[None])
