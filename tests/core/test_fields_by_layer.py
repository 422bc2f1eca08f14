"""Fields that differ by layer, as in Gemma 4 and Step 3.7: read by every verb, and kept where a config is shortened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

import ctxext
from ctxext.checkpoints.inspect import inspect_checkpoint, shortened
from ctxext.checkpoints.write import patch_checkpoint
from ctxext.core.scaling import heads_of, of_layers
from ctxext.errors import VerificationError
from tests._checkpoints import try_only
from tests._products import some

pytest.importorskip("transformers.integrations.heterogeneity")

SMALL: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 128, "max_position_embeddings": 256,
}  # fmt: skip
GEMMA4 = SMALL | {
    "model_type": "gemma4_text", "architectures": ["Gemma4ForCausalLM"], "num_hidden_layers": 12, "global_head_dim": 32,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 2, "sliding_window": 64, "num_kv_shared_layers": 0,
    "vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 0,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
    },
}  # fmt: skip
LLAMA = SMALL | {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 10}
CONFIGS = {
    "wider heads in some layers": GEMMA4,
    "fewer keys in some layers": GEMMA4 | {"num_global_key_value_heads": 1, "attention_k_eq_v": True},
    "a layer without a part": LLAMA | {"per_layer_config": {"9": {"skip": ["mlp"]}}},
}


@pytest.fixture(params=some(CONFIGS, "fewer keys in some layers"))
def config(request: pytest.FixtureRequest) -> dict[str, Any]:
    return CONFIGS[request.param]


def built(config: dict[str, Any]) -> Any:
    """Return a random model of the class that transformers has for a config."""
    read = AutoConfig.for_model(**config)
    auto = AutoModelForImageTextToText if hasattr(read, "text_config") else AutoModelForCausalLM
    return auto.from_config(read)


@pytest.mark.nightly
def test_it_is_inspected_on_fewer_layers(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try_only(monkeypatch, "ntk", "self_extend")
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = inspect_checkpoint(tmp_path)
    assert found.trained_length == 256
    assert [verdict.refused for verdict in found.verdicts] == [None, None]


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["ntk", "self_extend", "streaming"])
def test_a_copy_on_disk_is_loaded_and_described(config: dict[str, Any], method: str, tmp_path: Path) -> None:
    built(config).save_pretrained(tmp_path / "plain")
    patch_checkpoint(tmp_path / "plain", tmp_path / "long", method, factor=2)
    loaded = ctxext.load(tmp_path / "long").eval()
    assert ctxext.describe(loaded).target_length == 512
    with torch.no_grad():
        assert loaded(torch.arange(300)[None] % 128).logits.isfinite().all()


@pytest.mark.nightly
def test_a_model_in_memory_is_extended_and_described(config: dict[str, Any]) -> None:
    model = ctxext.patch(built(config), "self_extend", factor=2)
    assert ctxext.describe(model).target_length == 512


def test_a_form_that_its_class_cannot_check_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers checks longrope by the heads of the whole config, which Step 3.7's layers do not share."""
    try_only(monkeypatch, "ntk", "longrope")
    kinds = ["full_attention", *["sliding_attention"] * 3] * 3
    text = SMALL | {"model_type": "step3p5", "num_hidden_layers": 12, "layer_types": kinds, "sliding_window": 16}
    text |= {"num_sliding_attention_heads": 8, "moe_intermediate_size": 32, "n_routed_experts": 2}
    text |= {"num_experts_per_tok": 1, "share_expert_dim": 32}
    vision = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    whole = {"model_type": "step3p7", "architectures": ["Step3p7ForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps(whole | {"text_config": text, "vision_config": vision}))
    ntk, longrope = inspect_checkpoint(tmp_path).verdicts
    assert ntk.refused is None
    assert "num_attention_heads" in (longrope.refused or "")


def test_a_shortened_config_keeps_a_layer_of_every_kind_and_the_kind_of_the_last() -> None:
    whole = AutoConfig.for_model(**CONFIGS["fewer keys in some layers"] | {"num_hidden_layers": 24} | {
        "layer_types": GEMMA4["layer_types"] * 2
    })  # fmt: skip
    short = shortened(whole, 8)
    assert (short.num_hidden_layers, short.layer_types) == (12, GEMMA4["layer_types"])
    assert [layer.num_key_value_heads for layer in short.per_layer_config] == [2, 2, 2, 2, 2, 1] * 2
    assert (heads_of(short), of_layers(short, "head_dim")) == ((4, 2, 32), [16, 32])
    assert (whole.num_hidden_layers, len(whole.layer_types)) == (24, 24)
    skips = AutoConfig.for_model(**LLAMA | {"num_hidden_layers": 20, "per_layer_config": {3: {"skip": ["mlp"]}}})
    assert (shortened(skips, 8).num_hidden_layers, of_layers(shortened(skips, 8), "skip")[:1]) == (8, [None])
    last = AutoConfig.for_model(**CONFIGS["a layer without a part"])
    assert shortened(last, 8) is last  # its last layer is the only one of its kind
    shared = AutoConfig.for_model(**GEMMA4 | {"num_kv_shared_layers": 3})
    assert shortened(shared, 8) is shared  # which of its layers share counts from the end


def test_no_copy_is_left_that_cannot_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built(LLAMA | {"num_hidden_layers": 1}).save_pretrained(tmp_path / "plain")
    monkeypatch.setattr("ctxext.checkpoints.write.attached", Mock(side_effect=VerificationError("not restored")))
    with pytest.raises(VerificationError, match="not restored"):
        patch_checkpoint(tmp_path / "plain", tmp_path / "long", "ntk", factor=2)
    assert [path.name for path in tmp_path.iterdir()] == ["plain"]


def test_a_copy_with_new_weights_holds_them(tmp_path: Path) -> None:
    built(LLAMA | {"num_hidden_layers": 1}).save_pretrained(tmp_path / "plain")
    written = patch_checkpoint(tmp_path / "plain", tmp_path / "long", "t5_bias", factor=2)
    assert written.rewritten
    assert ctxext.describe(ctxext.load(tmp_path / "long")).method["method"] == "t5_bias"
