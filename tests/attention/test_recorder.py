"""What heads attend to is recorded as the model's own eager pass computes it, and the model is left untouched."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import ctxext
from ctxext.attention import recorder
from ctxext.attention.heads import heads, induction_scores
from ctxext.attention.recorder import retrieval_share
from ctxext.caches.digest import weights_digest
from ctxext.core.subject import Subject
from ctxext.errors import IncompatibleError, PatchStateError
from tests._models import RECENT, bert, tiny
from tests.attention._induction import induction


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_scores_are_the_attention_to_the_twin_and_to_the_token_that_followed_it(kv_heads: int, attention: str) -> None:
    model = tiny(num_attention_heads=4, num_key_value_heads=kv_heads, hidden_size=64, initializer_range=0.3)
    model.set_attn_implementation(attention)
    scores = induction_scores(Subject.of(model), seeds=[0])
    assert scores.kv_heads == (kv_heads,) * model.config.num_hidden_layers
    assert scores.probes["induction"] == pytest.approx(induction(model), abs=1e-6)
    assert scores.spread == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_model_is_left_as_it_was(dtype: torch.dtype) -> None:
    model = tiny().to(dtype).train()
    model.model.layers[0].eval()
    training = [module.training for module in model.modules()]
    digest, config, state = weights_digest(model), model.config.to_dict(), torch.get_rng_state()
    heads(model)
    assert weights_digest(model) == digest
    assert [module.training for module in model.modules()] == training
    assert model.config.to_dict() == config
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(torch.get_rng_state(), state)


def test_the_model_is_left_as_it_was_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny().train()
    monkeypatch.setattr(model.model.layers[1].mlp, "forward", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        heads(model)
    assert model.config._attn_implementation == "sdpa"
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: tiny(max_position_embeddings=16), "found on 32 tokens or more"),
        (lambda: tiny(vocab_size=6, bos_token_id=0, eos_token_id=1, pad_token_id=2), "knows 3 ordinary ones"),
        (bert, "lets tokens see later ones"),
        (lambda: tiny("t5"), "is an encoder-decoder"),
        (lambda: tiny("bloom"), "No attention of BloomForCausalLM reaches beyond a window and goes through"),
        (lambda: tiny("falcon"), "No attention of FalconForCausalLM reaches beyond a window and goes through"),
    ],
    ids=["short", "few tokens", "both ways", "encoder-decoder", "bloom", "falcon"],
)
def test_a_model_whose_heads_cannot_be_scored_is_refused(made: Any, said: str) -> None:
    with pytest.raises(IncompatibleError, match=said):
        heads(made())


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
    assert heads(model, seeds=(0,)).probes["induction"] == pytest.approx(induction(model), abs=5e-5)


@pytest.mark.skipif(not RECENT, reason="before transformers 5.23 no tiny model has layers that differ in groups")
def test_layers_may_differ_in_groups() -> None:
    scores = heads(tiny("mimo_v2_flash"), seeds=(0,))
    assert scores.kv_heads == (2, 4, 2)
    assert [len(values) for values in scores.probes.values()] == [8, 8]


def no_table(_: Any) -> Any:
    raise NotImplementedError("not auto-handled")


def several_tables(model: Any) -> Any:
    return torch.nn.ModuleList([model.model.embed_tokens])  # without a weight of its own, as Kyutai's


@pytest.mark.parametrize("table", [no_table, several_tables])
def test_a_model_need_not_have_one_table_of_inputs(table: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    expected = induction_scores(Subject.of(model), seeds=[0])
    monkeypatch.setattr(type(model), "get_input_embeddings", table)
    assert induction_scores(Subject.of(model), seeds=[0]).scores == expected.scores


def test_attention_that_is_not_finite_is_refused() -> None:
    model = tiny()
    model.get_input_embeddings().weight.data[:] = math.nan
    with pytest.raises(IncompatibleError, match="is not finite"):
        heads(model)


@pytest.mark.nightly
def test_wrappers_and_hooks_change_nothing() -> None:
    scores = heads(tiny(), seeds=(0,))
    in_training = tiny().train()
    in_training.gradient_checkpointing_enable()
    compiled = tiny()
    compiled.model.layers[0].compile()
    for model in (torch.nn.DataParallel(tiny()), torch.compile(tiny()), compiled, in_training, tiny().model):
        assert heads(model, seeds=(0,)).probes == scores.probes


def test_a_default_device_changes_nothing() -> None:
    model, scores = tiny(), heads(tiny(), seeds=(0,))
    with torch.device("meta"):
        assert heads(model, seeds=(0,)).probes == scores.probes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_a_default_dtype_changes_nothing(model_type: str, dtype: torch.dtype) -> None:
    """As training programs set it: scores of three digits would choose other heads."""
    model = tiny(model_type)
    extended = ctxext.patch(tiny(), "retrieval_heads", factor=2, heads=[0, 1])
    scores, share = heads(model, seeds=(0, 1)), retrieval_share(extended)
    torch.set_default_dtype(dtype)
    try:
        found = heads(model, seeds=(0, 1)), retrieval_share(extended)
    finally:
        torch.set_default_dtype(torch.float32)
    assert found == (scores, share)


def test_a_layer_that_attends_twice_in_a_pass_has_its_groups_once() -> None:
    """DiffLlama halves its values, and calls attention with each half."""
    model = tiny("diffllama")
    scores = heads(model, seeds=(0,))
    assert scores.kv_heads == (model.config.num_key_value_heads,) * model.config.num_hidden_layers
    extended = ctxext.patch(model, "retrieval_heads", factor=4, share=1.0)
    assert extended.config.ctxext["method"]["heads"] == list(range(sum(scores.kv_heads)))


@pytest.mark.parametrize("chosen", [(0, 3), (1,), (2, 3), (0, 1, 2, 3)])
def test_an_extended_model_tells_the_share_of_the_heads_that_it_chose(chosen: tuple[int, ...]) -> None:
    model = tiny(num_key_value_heads=2)
    wanted = induction(model)
    ctxext.patch(model.train(), "retrieval_heads", factor=4, heads=chosen)
    attends = [vars(module).get("_ctxext_attend") for module in model.modules()]
    assert retrieval_share(model) == pytest.approx(sum(wanted[group] for group in chosen) / len(chosen), abs=1e-6)
    assert [vars(module).get("_ctxext_attend") for module in model.modules()] == attends
    assert all(module.training for module in model.modules())


def test_a_share_of_heads_that_do_not_read_far_is_refused() -> None:
    with pytest.raises(PatchStateError, match="not extended by retrieval_heads"):
        retrieval_share(ctxext.patch(tiny(), "self_extend", factor=4))
    changed = ctxext.patch(tiny(), "retrieval_heads", factor=4, heads=[0], exact=False, window=16)
    with pytest.raises(IncompatibleError, match=r"changes texts of more than 16 tokens.*Set exact to true"):
        retrieval_share(changed)


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_autocast_rounds_no_score(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries and keys are what the model computes under it; their products would keep three digits of ten."""
    found, function_of = list[bool](), recorder.attention_function

    def watched(module: Any, implementation: str) -> Any:
        own = function_of(module, implementation)

        def attend(*given: Any, **named: Any) -> Any:
            if implementation == "eager":
                found.append(torch.is_autocast_enabled("cpu"))
            return own(*given, **named)

        return attend

    monkeypatch.setattr(recorder, "attention_function", watched)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        heads(tiny(model_type), seeds=(0,))
    assert found
    assert not any(found)
