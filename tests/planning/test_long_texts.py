"""Layers that go through a text in a loop: what a long text takes is continued from short ones, in bounded time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, LlamaConfig

from ctxext.errors import IncompatibleError
from ctxext.planning import dry_run
from ctxext.planning.dry_run import Taken, _extrapolated
from ctxext.planning.plan import longest, plan_serving, plan_training

SMALL: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 64, "head_dim": 16, "max_position_embeddings": 4096,
}  # fmt: skip
QWEN = SMALL | {
    "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    "full_attention_interval": 2, "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "mlp_only_layers": [], "decoder_sparse_step": 1,
}  # fmt: skip

FIRST = 128  # two chunks of its linear attention


def looping(**changes: Any) -> Any:
    return AutoConfig.for_model("qwen3_next", **QWEN | changes)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dry_run, "FIRST", FIRST)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "attention", ["sdpa", pytest.param("eager", marks=pytest.mark.nightly)]
)  # of all pairs of tokens
def test_a_long_prompt_is_continued_from_short_ones(attention: str) -> None:
    plan = plan_serving(looping(attn_implementation=attention))
    found = plan.at(16 * FIRST)
    assert max(length for _, length in plan.run._taken) <= 4 * FIRST
    small = plan.at(5 * FIRST)
    taken = plan.run._prefill(5 * FIRST)
    assert (small.cache, small.layer) == (taken.kept, pytest.approx(taken.work, rel=0.02))
    assert found.cache > 3 * small.cache - plan.at(0x100).cache
    assert longest(plan, 2**36).length > 10 * FIRST  # and to look for the longest takes no longer


@pytest.mark.nightly
def test_other_models_run_at_the_length_itself() -> None:
    plan = plan_serving(LlamaConfig(**SMALL))
    plan.at(16 * FIRST)
    assert [length for _, length in plan.run._taken] == [16 * FIRST]


@pytest.mark.nightly
def test_a_long_training_step_is_continued_from_short_ones() -> None:
    plan = plan_training(looping())
    taken, found = plan.run._step(4 * FIRST), plan.run.step(4 * FIRST)
    assert (found.kept, found.work) == (taken.kept, pytest.approx(taken.work, rel=0.05))
    assert max(length for _, length in plan.run._taken) <= 3 * FIRST


def points(*curves: Any, count: int = 4) -> list[Taken]:
    return [Taken(*(curve(place) for curve in curves)) for place in range(count)]


def test_what_is_continued_is_exact_up_to_the_second_degree() -> None:
    line, curve = (lambda n: 700 + 1300 * n), (lambda n: 5000 + 70 * n + 900 * n * n)
    flat = lambda n: 44  # noqa: E731
    assert _extrapolated(points(line, flat, flat, count=3), 1000.0) == Taken(line(1000), 44, 44)
    assert _extrapolated(points(line, curve, flat), 1000.0) == Taken(line(1000), curve(1000), 44)
    assert _extrapolated(points(line, curve, flat), 12.5) == Taken(round(line(12.5)), round(curve(12.5)), 44)
    assert _extrapolated(points(line, lambda n: max(5000, 3000 * n), flat), 10.0) is None


SHARED: dict[str, dict[str, Any]] = {
    "the last layers read earlier keys": {
        "model_type": "gemma4_text", "num_hidden_layers": 4, "num_kv_shared_layers": 2, "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "global_head_dim": 32,
        "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8,
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
        },
    },
    "the same of an older class": {
        "model_type": "gemma3n_text", "num_hidden_layers": 5, "num_kv_shared_layers": 2, "sliding_window": 64,
        "layer_types": [*["sliding_attention"] * 2, "full_attention", "sliding_attention", "full_attention"],
        "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8, "laurel_rank": 8, "altup_num_inputs": 2,
        "activation_sparsity_pattern": [0.0] * 5,
    },
    "a layer takes what the one before has picked": {
        "model_type": "glm_moe_dsa", "num_hidden_layers": 6, "first_k_dense_replace": 3, "num_key_value_heads": 2,
        "indexer_types": ["full", "full", "full", "shared", "shared", "full"], "moe_intermediate_size": 16,
        "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "qk_head_dim": 16,
        "v_head_dim": 16, "n_routed_experts": 2, "num_experts_per_tok": 1, "n_shared_experts": 1, "n_group": 1,
        "topk_group": 1, "index_topk": 16, "index_head_dim": 16, "index_n_heads": 2,
    },
}  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("name", SHARED)
def test_layers_that_need_an_earlier_one_are_counted_behind_it(name: str) -> None:
    """As much as all layers in one run, which is what a user runs."""
    fields = SMALL | SHARED[name]
    run = plan_serving(AutoConfig.for_model(fields.pop("model_type"), **fields)).run
    taken = run.prefill(256)
    with run._running(*range(len(run.layers)), training=False) as live:
        output = run.causal(input_ids=torch.zeros(1, 256, dtype=torch.long), use_cache=True, logits_to_keep=1)
        held = [value for key, value in output.items() if key != "logits"]
        del output
        assert held
        assert taken.kept == live.now
    assert taken.work == pytest.approx(live.peak - live.now, rel=0.05)
    assert run.step(256).kept > 0


@pytest.mark.nightly
def test_a_layer_that_takes_what_others_made_is_planned_with_them() -> None:
    fields = SMALL | SHARED["a layer takes what the one before has picked"]
    run = plan_serving(AutoConfig.for_model(fields.pop("model_type"), **fields)).run
    assert run.prefill(64).kept > 0
    assert {index: run._needed(index) for index in (1, 3, 5)} == {1: (), 3: (2,), 5: ()}


def test_what_a_layer_does_not_find_is_told_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    run = plan_serving(LlamaConfig(**SMALL)).run
    monkeypatch.setattr(type(run.base), "forward", lambda self, **given: {}["shared"])
    with pytest.raises(IncompatibleError, match=r"LlamaForCausalLM cannot be run without data at this length.*shared"):
        run.prefill(64)
