"""Which heads retrieve: scores against attention weights of the model's own eager pass, and a model left untouched."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ctxext
from ctxext.errors import IncompatibleError, InvalidParameterError, PatchStateError
from ctxext.surgery.heads import HeadScores, heads, induction_scores
from ctxext.surgery.subject import Subject, weights_digest
from tests._models import bert, tiny


def drawn(model: Any, seed: int = 0) -> Tensor:
    """The random tokens that a model of 64 tokens and 128 ordinary token ids repeats."""
    special = {value for name, value in vars(model.config).items() if name.endswith("_token_id")}
    ordinary = torch.tensor([token for token in range(model.config.vocab_size) if token not in special])
    return ordinary[torch.randperm(len(ordinary), generator=torch.Generator().manual_seed(seed))[:32]]


def by_definition(model: Any, seed: int = 0) -> list[float]:
    """Scores from all attention weights, pair by pair and head by head."""
    model = copy.deepcopy(model).eval()
    model.set_attn_implementation("eager")
    tokens = drawn(model, seed)
    with torch.no_grad():
        layers = model(torch.cat([tokens, tokens])[None], output_attentions=True, use_cache=False).attentions
    kv_heads = getattr(model.config, "num_key_value_heads", model.config.num_attention_heads)
    groups = []
    for layer in layers:
        each = [sum(float(head[32 + i, i + 1]) for i in range(31)) / 31 for head in layer[0].float()]
        per_group = len(each) // kv_heads
        groups += [max(each[group * per_group : (group + 1) * per_group]) for group in range(kv_heads)]
    return groups


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_scores_are_the_attention_to_the_token_that_followed_the_twin(kv_heads: int, attention: str) -> None:
    model = tiny(num_attention_heads=4, num_key_value_heads=kv_heads, hidden_size=64, initializer_range=0.3)
    model.set_attn_implementation(attention)
    scores = induction_scores(Subject.of(model), seeds=[0])
    assert scores.kv_heads == (kv_heads,) * model.config.num_hidden_layers
    assert scores.probes["induction"] == pytest.approx(by_definition(model), abs=1e-6)
    assert scores.spread == {}


def test_scores_are_the_mean_over_seeds_beside_their_spread() -> None:
    model = tiny(initializer_range=0.3)
    scores = heads(model, seeds=(3, 4))
    first, second = torch.tensor(by_definition(model, 3)), torch.tensor(by_definition(model, 4))
    assert torch.allclose(torch.tensor(scores.probes["induction"]), (first + second) / 2, atol=1e-6)
    assert torch.allclose(torch.tensor(scores.spread["induction"]), (first - second).abs() / math.sqrt(2), atol=1e-6)
    assert scores == heads(model, seeds=(3, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_model_is_left_as_it_was(dtype: torch.dtype) -> None:
    model = tiny().to(dtype).train()
    model.model.layers[0].eval()
    training = [module.training for module in model.modules()]
    digest, config, state = weights_digest(model), model.config.to_dict(), torch.get_rng_state()
    assert heads(model).fingerprint == digest == weights_digest(model)
    assert [module.training for module in model.modules()] == training
    assert model.config.to_dict() == config
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(torch.get_rng_state(), state)


def test_the_model_is_left_as_it_was_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny().train()

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(model.model.layers[1].mlp, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        heads(model)
    assert model.config._attn_implementation == "sdpa"
    assert all(module.training for module in model.modules())


def test_special_tokens_are_not_drawn() -> None:
    model = tiny(vocab_size=40, bos_token_id=3, eos_token_id=[4, 5], pad_token_id=6)
    read: list[Tensor] = []
    model.get_input_embeddings().register_forward_pre_hook(lambda _, given: read.append(given[0]))
    heads(model, seeds=(0,))
    tokens = read[0][0]
    assert len(tokens) == 64
    assert torch.equal(tokens[:32], tokens[32:])
    assert len(set(tokens.tolist())) == 32
    assert not {3, 4, 5, 6} & set(tokens.tolist())


def scores_of(*values: float, kv_heads: tuple[int, ...] = (2, 3)) -> HeadScores:
    return HeadScores(kv_heads=kv_heads, probes={"induction": values}, fingerprint="0123456789ab")


def test_the_best_groups_come_first_and_the_lower_number_of_equal_ones() -> None:
    scores = scores_of(0.1, 0.5, 0.5, 0.0, 0.9)
    assert scores.ranked() == (4, 1, 2, 0, 3)
    assert scores.chosen(share=0.2) == (4,)
    assert scores.chosen(share=0.21) == (1, 4)
    assert scores.chosen(share=0.001) == (4,)
    assert scores.chosen(share=1) == (0, 1, 2, 3, 4)
    assert scores.chosen(threshold=0.5) == (1, 2, 4)
    assert scores.chosen(threshold=1.0) == (4,)
    assert [scores.place(group) for group in range(5)] == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]


def test_a_share_is_not_rounded_up_by_an_error_of_rounding() -> None:
    scores = scores_of(*(group / 100 for group in range(90)), kv_heads=(3,) * 30)
    for whole in range(1, 91):
        assert len(scores.chosen(share=whole / 90)) == whole
    assert len(scores.chosen(share=0.2)) == 18


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "one of the two"),
        ({"share": 0.2, "threshold": 0.1}, "one of the two"),
        ({"share": 0.0}, "share must be above 0 and at most 1, found 0.0"),
        ({"share": 1.5}, "share must be above 0"),
        ({"share": math.nan}, "share must be above 0"),
        ({"threshold": -0.1}, "threshold must be from 0 to 1, found -0.1"),
        ({"threshold": math.nan}, "threshold must be from 0 to 1"),
    ],
)
def test_a_choice_out_of_range_is_refused(given: dict[str, float], message: str) -> None:
    with pytest.raises(InvalidParameterError, match=message):
        scores_of(0.1, 0.2, 0.3, 0.4, 0.5).chosen(**given)


def test_scores_are_read_as_they_were_saved(tmp_path: Path) -> None:
    scores = heads(tiny(), seeds=(1, 2))
    scores.save(tmp_path / "heads.json")
    assert HeadScores.read(tmp_path / "heads.json") == scores


@pytest.mark.parametrize(
    "content",
    [
        None,
        "",
        "[]",
        "{}",
        '{"kv_heads": 3, "probes": {}, "spread": {}, "fingerprint": "", "settings": {}}',
        '{"kv_heads": [2], "probes": {}, "spread": {}, "fingerprint": "", "settings": {}}',
        '{"kv_heads": [2], "probes": {"induction": [0.1]}, "spread": {}, "fingerprint": "", "settings": {}}',
        '{"kv_heads": [2], "probes": [0.1, 0.2], "spread": {}, "fingerprint": "", "settings": {}}',
    ],
)
def test_a_file_of_something_else_is_refused_with_the_way_out(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "heads.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InvalidParameterError, match=r"ctxext heads CHECKPOINT -o heads\.json"):
        HeadScores.read(path)


def test_a_patched_model_is_refused() -> None:
    model = ctxext.patch(tiny(), "yarn", factor=2)
    with pytest.raises(PatchStateError, match=r"ctxext\.unpatch"):
        heads(model)
    assert heads(ctxext.unpatch(model)) == heads(tiny())


def test_a_model_that_sees_both_ways_is_refused() -> None:
    with pytest.raises(IncompatibleError, match="lets tokens see later ones"):
        heads(bert())


@pytest.mark.parametrize("own", ["flash_attention_2", "flex_attention"])
def test_kernels_that_take_no_dense_mask_give_way_while_heads_are_recorded(own: str) -> None:
    model, plain = tiny(initializer_range=0.3), tiny(initializer_range=0.3)
    model.config._attn_implementation_internal = own
    scores = heads(model)
    assert model.config._attn_implementation == own
    assert scores.probes == heads(plain).probes


# Sinks and soft caps take their share of the attention: only the model's own eager function knows of them.
@pytest.mark.parametrize("model_type", ["gpt_oss", "gemma2", "gemma3_text", "qwen3", "gpt2", "opt", "mistral"])
def test_scores_are_those_of_the_model_s_own_attention(model_type: str) -> None:
    model = tiny(model_type)
    layers = by_definition(model)
    assert heads(model, seeds=(0,)).probes["induction"] == pytest.approx(layers, abs=1e-5)


def test_no_seeds_are_refused() -> None:
    with pytest.raises(InvalidParameterError, match="seeds is empty"):
        heads(tiny(), seeds=())
