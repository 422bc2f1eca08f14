"""Weights that a checkpoint brings in few bits: counted as they are stored, and no advice that would be refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, LlamaConfig

from ctxext.checkpoints.load import load
from ctxext.checkpoints.source import quantised_beside
from ctxext.errors import CheckpointError, InvalidParameterError
from ctxext.planning.plan import longest, plan_serving, plan_training
from ctxext.planning.quantised import stored_as
from tests._checkpoints import SHAPE
from tests._programs import command

LAYERS, HIDDEN, INNER = 3, 64, 96
# Four heads of 16, two of keys and values.
LINEAR = LAYERS * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * 32 + 3 * HIDDEN * INNER)
MLP = LAYERS * 3 * HIDDEN * INNER


def llama(quantised: dict[str, Any] | None, **changes: Any) -> LlamaConfig:
    packing = {} if quantised is None else {"quantization_config": quantised}
    return LlamaConfig(**(SHAPE | {"num_hidden_layers": LAYERS} | packing | changes))


def group(bits: int, **weights: Any) -> dict[str, Any]:
    return {"group_0": {"targets": ["Linear"], "weights": {"num_bits": bits, **weights}, "input_activations": None}}


# As published checkpoints have them, and the bits of a weight: its own, and its share of scales and zero points.
FORMS: list[tuple[dict[str, Any], float]] = [
    ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}, 4 + 20 / 128),
    ({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True, "sym": True}, 4 + 20 / 128),
    ({"quant_method": "gptq", "bits": 8, "group_size": 32}, 8),
    ({"quant_method": "gptq", "bits": 3, "group_size": -1}, 3),
    ({"quant_method": "auto-round", "bits": 2, "group_size": 64}, 2 + 18 / 64),
    ({"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}, 8),
    ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, 8),
    ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, 4.5),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True}, 4 + 1 / 8 + 1 / 512),
    ({"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": group(8)}, 8),
    ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}, "config_groups": group(4)}, 4),
    ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
      "config_groups": group(4, group_size=16)}, 4.5),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}, 4.5),
    ({"quant_method": "modelopt", "quant_algo": "FP8"}, 8),
    ({"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 64}}}, 4 + 20 / 64),
    ({"quant_method": "quanto", "weights": "int2"}, 2),
    ({"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4WeightOnlyConfig", "_data":
      {"group_size": 128}}}}, 4 + 20 / 128),
    ({"quant_method": "torchao", "quant_type": "int8_dynamic_activation_int4_weight"}, 4),
    ({"quant_method": "aqlm", "nbits_per_codebook": 16, "num_codebooks": 1, "in_group_size": 8,
      "out_group_size": 1}, 2),
    ({"quant_method": "eetq", "weights": "int8"}, 8),
    ({"quant_method": "bitnet"}, 2),
    ({"quant_method": "higgs", "bits": 4, "group_size": 256, "p": 2}, 4 + 20 / 256),
]  # fmt: skip


@pytest.mark.parametrize(("form", "bits"), FORMS)
def test_in_use_weights_are_counted_as_they_are_stored(form: dict[str, Any], bits: float) -> None:
    config, plain = llama(form), plan_serving(llama(None)).fixed.weights
    stored = stored_as(config)
    assert stored is not None
    assert stored.bits == pytest.approx(bits)
    found = plan_serving(config)
    assert found.fixed.weights == plain - 2 * LINEAR + int(LINEAR * bits / 8)
    assert found.dequantised == (2 * HIDDEN * INNER if bits < 8 else 0)


@pytest.mark.nightly
@pytest.mark.parametrize("form", [form for form, _ in FORMS if form["quant_method"] not in ("aqlm", "bitnet")][:12])
def test_advice_leads_into_no_refusal(form: dict[str, Any]) -> None:
    """Where nothing fits: nf4 is advised for plain weights alone, and is there taken."""
    for plan in (plan_serving(llama(form)), plan_training(llama(form))):
        with pytest.raises(
            InvalidParameterError, match=r"found .* GiB\. Allow more, or (train the plain|take a small)"
        ):
            longest(plan, 1000)
    if form["quant_method"] != "bitsandbytes":
        with pytest.raises(InvalidParameterError, match="come quantised"):
            plan_serving(llama(form), quantisation="nf4")


@pytest.mark.slow
def test_advice_for_plain_weights_helps() -> None:
    with pytest.raises(InvalidParameterError, match=r"or quantise \(--quantisation nf4\)"):
        longest(plan_serving(llama(None)), 1000)
    assert plan_serving(llama(None), quantisation="nf4").fixed.weights < plan_serving(llama(None)).fixed.weights
    with pytest.raises(InvalidParameterError, match="its weights are quantised already"):
        longest(plan_serving(llama(None), quantisation="nf4"), 1000)


@pytest.mark.slow
def test_training_unpacks_what_it_cannot_train_packed() -> None:
    plain = plan_training(llama(None)).fixed.weights
    assert plan_training(llama(FORMS[0][0])).fixed.weights == plain
    packed = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True}
    assert plan_training(llama(packed)).fixed.weights == plan_training(llama(None), quantisation="nf4").fixed.weights


@pytest.mark.parametrize(
    ("named", "left"),
    [
        ({"modules_to_not_convert": ["mlp", "lm_head"]}, LINEAR - MLP),
        ({"ignore": ["re:.*mlp.*", "lm_head"]}, LINEAR - MLP),
        ({"ignored_layers": ["model.layers.0.mlp"]}, LINEAR - MLP // LAYERS),
        ({"modules_to_not_convert": ["lm_head"]}, LINEAR),
    ],
)
def test_modules_that_a_config_leaves_plain(named: dict[str, Any], left: int) -> None:
    plain = plan_serving(llama(None)).fixed.weights
    found = plan_serving(llama({"quant_method": "fp8"} | named)).fixed.weights
    assert plain - found == left


def test_experts_that_are_one_tensor() -> None:
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
             "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "vocab_size": 128,
             "intermediate_size": 96, "head_dim": 16}  # fmt: skip
    plain, packed = (
        plan_serving(AutoConfig.for_model("qwen3_moe", **shape, **more)).fixed.weights
        for more in ({}, {"quantization_config": {"quant_method": "fp8"}})
    )
    experts, attention = 2 * 4 * 3 * 64 * 32, 2 * (2 * 64 * 64 + 2 * 64 * 32)
    assert plain - packed == experts + attention


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_experts_are_planned_in_any_dtype(dtype: torch.dtype, capfd: pytest.CaptureFixture[str]) -> None:
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
             "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "vocab_size": 128}  # fmt: skip
    config = AutoConfig.for_model("qwen3_moe", **shape, intermediate_size=96, head_dim=16)
    for plan in (plan_serving, plan_training):
        found, usual = (plan(config, dtype=kind).at(64) for kind in (dtype, torch.bfloat16))
        assert found.layer / usual.layer == pytest.approx(dtype.itemsize / 2, rel=0.35)
    assert not capfd.readouterr().err


def test_bitsandbytes_packs_the_transposed_layers_of_gpt2() -> None:
    config = AutoConfig.for_model("gpt2", n_embd=64, n_layer=2, n_head=4, vocab_size=128, n_positions=64)
    plain, packed = (plan_serving(config, quantisation=kind).fixed.weights for kind in (None, "nf4"))
    assert plain - packed == pytest.approx(2 * 12 * 64 * 64 * (16 - 4.127) / 8, rel=1e-3)


# Files beside config.json, as quantisers write them, and the bits of a weight.
BESIDE: dict[str, tuple[str, dict[str, Any], float]] = {
    "AutoGPTQ": ("quantize_config.json", {"bits": 4, "group_size": 128, "desc_act": False}, 4 + 20 / 128),
    "AutoAWQ": ("quant_config.json", {"zero_point": True, "q_group_size": 128, "w_bit": 4}, 4 + 20 / 128),
    "ModelOpt": (
        "hf_quant_config.json",
        {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8",
         "group_size": 16, "exclude_modules": ["lm_head"]}}, 4.5),
    "AutoRound": ("quantization_config.json", {"bits": 2, "group_size": 64, "sym": False}, 2 + 18 / 64),
}  # fmt: skip


@pytest.mark.parametrize("name", BESIDE)
def test_a_file_beside_the_config_says_how_weights_are_stored(name: str, tmp_path: Path) -> None:
    file, said, bits = BESIDE[name]
    config = llama(None)
    assert quantised_beside(tmp_path, config) is None
    (tmp_path / file).write_text(json.dumps(said))
    config.quantization_config = quantised_beside(tmp_path, config)
    stored = stored_as(config)
    assert stored is not None
    assert stored.bits == pytest.approx(bits)
    assert quantised_beside(tmp_path, llama({"quant_method": "gptq", "bits": 4})) is None
    config = llama(None, architectures=["LlamaForCausalLM"])
    config.save_pretrained(tmp_path)
    with pytest.raises(
        CheckpointError, match=rf"in a file that transformers does not read that its weights are quantised.*{file}"
    ):
        load(tmp_path, "yarn", factor=2)


def test_a_file_about_the_cache_alone_says_nothing_of_weights(tmp_path: Path) -> None:
    said = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(said))
    assert quantised_beside(tmp_path, llama(None)) is None


@pytest.mark.nightly
def test_plan_counts_what_such_a_file_says(tmp_path: Path) -> None:
    llama(None, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    asked = ["plan", tmp_path, "--length", "128", "--json"]
    plain = json.loads(command(*asked).stdout)
    (tmp_path / "quantize_config.json").write_text(json.dumps({"bits": 8, "group_size": 128}))
    packed = json.loads(command(*asked).stdout)
    assert packed["stored_as"] == "quantize_config.json"
    assert plain["serving"]["weights"] - packed["serving"]["weights"] == LINEAR


def test_a_config_that_says_no_width() -> None:
    stored = stored_as(llama({"quant_method": "vptq", "config_for_layers": {}}))
    assert stored is not None
    assert (stored.bits, plan_serving(llama({"quant_method": "vptq"})).fixed.weights) == (
        None,
        plan_serving(llama(None), dtype=torch.bfloat16).fixed.weights,
    )
