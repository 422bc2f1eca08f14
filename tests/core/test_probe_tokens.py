"""Probes read tokens that mean nothing special: the row of a padding token is zero, wherever a config puts it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    PreTrainedModel,
    RobertaConfig,
    RobertaForMaskedLM,
)

import ctxext
from ctxext.core.subject import Subject
from ctxext.training.masked import shift_of
from tests._models import logits, tiny

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def olmo3(**changes: Any) -> PreTrainedModel:
    """Attention reads the embedding itself, without a norm: a row of zeros has queries of zeros."""
    torch.manual_seed(0)
    layers = {"vocab_size": 64, "layer_types": ["full_attention"] * 2}
    return Olmo3ForCausalLM(Olmo3Config(**SMALL | layers | changes)).eval()


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},  # pad_token_id 1, as transformers has it
        {"pad_token_id": -1, "vocab_size": 8},
        {"pad_token_id": 0, "eos_token_id": [1, 2], "bos_token_id": 3, "vocab_size": 5},
        {"pad_token_id": 1, "eos_token_id": 0, "vocab_size": 2},
        {"pad_token_id": None, "eos_token_id": 900, "vocab_size": 10},
    ],
    ids=["default", "last", "one ordinary", "none ordinary", "beyond the vocabulary"],
)
def test_positions_of_a_model_are_found_whatever_its_special_tokens_are(changes: dict[str, Any]) -> None:
    model, twin = olmo3(**changes), olmo3(**changes)
    with torch.no_grad():  # as if it had no padding: what another token id would have shown
        twin.model.embed_tokens.weight.normal_()
    for one in (model, twin):
        ctxext.patch(one, "self_extend", factor=2)
    ids = torch.randint(0, changes.get("vocab_size", 64), (1, 100), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        twin.model.embed_tokens.weight.copy_(model.model.embed_tokens.weight)
    assert torch.equal(logits(model, ids), logits(twin, ids))


@pytest.mark.slow
def test_a_first_layer_without_queries_is_no_hindrance() -> None:
    model, whole = tiny(), tiny()
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.zero_()
    for one in (model, whole):
        ctxext.patch(one, "self_extend", factor=2)
    with torch.no_grad():
        whole.model.layers[0].self_attn.q_proj.weight.zero_()
    ids = torch.randint(0, 128, (1, 100), generator=torch.Generator().manual_seed(0))
    assert torch.equal(logits(model, ids), logits(whole, ids))


@pytest.mark.slow
def test_a_table_is_found_in_a_model_of_few_tokens() -> None:
    for vocabulary in (2, 3, 6):
        shape = {name: value for name, value in SMALL.items() if name != "num_key_value_heads"}
        model = BertModel(BertConfig(vocab_size=vocabulary, pad_token_id=1, **shape)).eval()
        ctxext.patch(model, "hierarchical", factor=2)
        assert model.embeddings.position_embeddings.num_embeddings == 128


def test_ordinary_tokens_are_those_without_a_name() -> None:
    config = LlamaConfig(**SMALL, vocab_size=8, bos_token_id=1, eos_token_id=[2, 99], pad_token_id=-1)
    assert Subject(LlamaForCausalLM(config)).ordinary_tokens.tolist() == [0, 3, 4, 5, 6]
    config.audio_token_ids, config.image_token_index = [3, 99], 4
    model = LlamaForCausalLM(config)
    assert Subject(model).ordinary_tokens.tolist() == [0, 5, 6]
    model.model.embed_tokens.padding_idx, config.pad_token_id = 5, None
    assert Subject(model).ordinary_tokens.tolist() == [0, 6, 7], "the table knows its padding, and the config does not"
    config = LlamaConfig(**SMALL, vocab_size=2, bos_token_id=1, eos_token_id=0)
    assert Subject(LlamaForCausalLM(config)).ordinary_tokens.tolist() == [0, 1], "there are no others"


@pytest.mark.slow
def test_the_positions_of_a_masked_model_are_found_behind_its_padding() -> None:
    shape = {name: value for name, value in SMALL.items() if name != "num_key_value_heads"}
    for padding, vocabulary in ((7, 12), (2, 4)):
        torch.manual_seed(0)
        model = RobertaForMaskedLM(RobertaConfig(vocab_size=vocabulary, pad_token_id=padding, **shape)).eval()
        model = ctxext.patch(model, "hierarchical", factor=2, trained_length=64 - padding - 1)
        assert shift_of(model) == padding + 1
