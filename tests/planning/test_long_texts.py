"""Layers that go through a text in a loop: what a long text takes is continued from short ones, in bounded time."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig, LlamaConfig

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


@pytest.mark.slow
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


@pytest.mark.slow
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
