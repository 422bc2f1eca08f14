"""A deep model is inspected on few layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, LlamaConfig, MistralConfig, Qwen2Config

from ctxext.checkpoints import inspect
from ctxext.checkpoints.inspect import inspect_checkpoint
from tests._checkpoints import SHAPE, try_only


def stored(place: Path, config: Any, **changes: Any) -> Path:
    place.mkdir(exist_ok=True)
    (place / "config.json").write_text(json.dumps(config.to_dict() | changes), encoding="utf-8")
    return place


WINDOWED = {"layer_types": ["full_attention"] * 12 + ["sliding_attention"] + ["full_attention"] * 27}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "layers"),
    [
        (LlamaConfig(**SHAPE | {"num_hidden_layers": 40}), 2),
        (LlamaConfig(**SHAPE), 2),
        (Qwen2Config(**SHAPE | {"num_hidden_layers": 40}, **WINDOWED, sliding_window=16, use_sliding_window=True), 14),
        (MistralConfig(**SHAPE | {"num_hidden_layers": 40}), 2),
        # every eighth layer attends, by a number
        (
            AutoConfig.for_model("jamba", **SHAPE | {"num_hidden_layers": 24}, attn_layer_period=8, attn_layer_offset=4,
                                 use_mamba_kernels=False, mamba_d_state=4, num_experts=2, num_experts_per_tok=1),
            8,
        ),
        # the first dense layers of a mixture of experts are more than are looked at: all of them are
        (
            AutoConfig.for_model("deepseek_v3", **SHAPE | {"num_hidden_layers": 12}, first_k_dense_replace=10,
                                 moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
                                 topk_group=1, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8),
            12,
        ),
    ],
)  # fmt: skip
def test_a_deep_model_is_inspected_on_one_layer_of_every_kind(
    config: Any, layers: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tried = []

    def verdict(model: Any, *_: Any) -> inspect.MethodCheck:
        tried.append(model.config.num_hidden_layers)
        return inspect.MethodCheck(method="yarn", factor=4.0)

    monkeypatch.setattr(inspect, "_verdict", verdict)
    inspect_checkpoint(stored(tmp_path / "src", config))
    assert set(tried) == {layers}


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        Qwen2Config(**SHAPE | {"num_hidden_layers": 14}, **{"layer_types": WINDOWED["layer_types"][6:20]},
                    sliding_window=16, use_sliding_window=True),
        LlamaConfig(**SHAPE | {"num_hidden_layers": 10}),
        pytest.param(MistralConfig(**SHAPE | {"num_hidden_layers": 14}, sliding_window=16), marks=pytest.mark.nightly),
    ],
    ids=lambda config: config.model_type,
)  # fmt: skip
def test_what_is_found_on_few_layers_is_what_is_found_on_all(
    config: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place = stored(tmp_path / "src", config)
    try_only(monkeypatch, "yarn", "pi", "retrieval_heads")
    found = inspect_checkpoint(place)
    monkeypatch.setattr(inspect, "FEW", 14)
    monkeypatch.setattr(inspect, "_is_one_repeated", lambda _: False)
    assert inspect_checkpoint(place) == found
