"""Which layers rotate is seen, not read off the config: extensions that could only harm are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    PixtralVisionConfig,
    PixtralVisionModel,
    PreTrainedModel,
    RobertaForMaskedLM,
)
from transformers.activations import ACT2FN

import ctxext
from ctxext.core.subject import Subject
from ctxext.errors import IncompatibleError
from ctxext.probe.layers import Layers, look
from ctxext.training.masked import shift_of
from tests._models import RECENT, bert, logits, tiny, tokens
from tests.walk.check import State, rotating_layers


def seen_of(model: Any) -> Layers:
    return look(model, [path for path, _ in Subject(model).rotaries])


@pytest.mark.parametrize(
    "model_type",
    ["llama", "gemma2", "gemma3_text", "smollm3", "cohere2", "exaone4", "qwen3_5_text", "granite_swa", "gpt_neox"]
    + (["flint", "llama4_text"] if RECENT else []),
)
def test_the_probe_sees_what_arithmetic_with_not_a_number_shows(model_type: str) -> None:
    if model_type == "llama4_text":
        pytest.skip("rotates by complex numbers")
    model = tiny(model_type)
    seen = seen_of(model)
    assert seen.failure is None
    paths = [path for path, _ in Subject(model).rotaries]
    assert seen.rotating == rotating_layers(model, tokens(24), paths, seen.attending | seen.rotating)
    assert seen.rotating


def test_the_probe_names_windows_and_leaves_the_model_alone() -> None:
    model = tiny("gemma2")
    before = State.of(model, tokens())
    seen = seen_of(model)
    assert seen.rotating == seen.attending == {"model.layers.0", "model.layers.1"}
    assert seen.windowed == {"model.layers.0"}
    assert before.difference(model) is None
    assert not any("forward" in vars(module) for module in model.modules())


class UntraceableActivation(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().numpy())


def untraceable(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Any:
    """A model whose forward pass asks its data something that a pass without data cannot answer."""
    monkeypatch.setitem(ACT2FN, "untraceable", UntraceableActivation)
    return tiny(hidden_act="untraceable", num_hidden_layers=2, **changes)


def test_a_model_that_cannot_be_probed_is_extended_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    model = untraceable(monkeypatch)
    assert "numpy" in str(seen_of(model).failure)
    ctxext.patch(model, "yarn", factor=4.0)
    assert "cannot tell which layers rotate" in " ".join(ctxext.describe(model).notes)


def test_a_model_that_cannot_be_probed_and_has_windows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = untraceable(monkeypatch, layer_types=["sliding_attention", "full_attention"], sliding_window=16)
    with pytest.raises(IncompatibleError, match="cannot tell which of them rotate"):
        ctxext.patch(model, "yarn", factor=4.0)


def test_alibi_needs_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(IncompatibleError, match="cannot tell which of its layers rotate"):
        ctxext.patch(untraceable(monkeypatch), "alibi", factor=4.0)


def test_a_model_that_reads_no_tokens_is_refused_by_name() -> None:
    model = PixtralVisionModel(
        PixtralVisionConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    )
    with pytest.raises(IncompatibleError, match="reads no tokens"):
        ctxext.patch(model, "yarn", factor=4.0, trained_length=64)


# Probes read tokens that mean nothing special: the row of a padding token is zero, wherever a config puts it.

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
        model = bert(BertModel, vocab_size=vocabulary, pad_token_id=1)
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
    for padding, vocabulary in ((7, 12), (2, 4)):
        model = bert(RobertaForMaskedLM, vocab_size=vocabulary, pad_token_id=padding)
        ctxext.patch(model, "hierarchical", factor=2, trained_length=64 - padding - 1)
        assert shift_of(model) == padding + 1
