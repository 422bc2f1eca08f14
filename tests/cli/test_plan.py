"""``ctxext plan``: what it prints and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GptOssConfig, LlamaConfig, Mamba2Config

from ctxext.planning.plan import plan_serving
from tests._checkpoints import SHAPE
from tests._programs import command

KV = 2 * 2 * SHAPE["num_key_value_heads"] * 16 * 2  # bytes per token: two layers, keys and values, bfloat16


@pytest.mark.nightly
def test_what_a_length_takes(llama: Path) -> None:
    found = json.loads(command("plan", llama, "--length", 4096, "--memory", "1GiB", "--no-embeddings", "--json").stdout)
    assert (found["dtype"], found["memory"], found["training"]["fits"]) == ("bf16", 2**30, True)
    training, serving = found["training"], found["serving"]
    assert 4096 * KV <= serving["cache"] < 4096 * KV * 1.01
    at_work = max(training["layer"], training["loss"])
    fixed = training["weights"] + training["adapters"] + training["gradients"] + training["optimizer"]
    assert training["total"] == fixed + training["kept"] + at_work
    printed = command("plan", llama, "--length", 4096, "--memory", "1MiB").stdout
    assert "AdamW's moments" in printed
    assert "training: 4,096 tokens take" in printed
    assert "more than there is" in printed


@pytest.mark.nightly
def test_a_length_beyond_the_window_is_said_in_plain_words(llama: Path) -> None:
    """Nobody asked which length some memory holds."""
    printed = command("plan", llama, "--length", 4096).stdout
    assert "4,096 tokens exceed its 256-token window. Extend it first (ctxext patch)." in printed
    assert "Memory holds" not in printed
    assert "exceed" not in command("plan", llama, "--length", 256).stdout


@pytest.mark.nightly
def test_the_longest_of_an_extended_checkpoint(llama: Path, tmp_path: Path) -> None:
    command("patch", llama, tmp_path / "long", "--method", "yarn", "--factor", 4)
    found = json.loads(command("plan", tmp_path / "long", "--memory", "16MiB", "--no-embeddings", "--json").stdout)
    assert 0 < found["training"]["length"] < found["serving"]["length"]
    assert found["serving"]["total"] <= 16 * 2**20


@pytest.mark.slow
def test_no_weights_and_no_training(tmp_path: Path) -> None:
    """A state space alone has no attention to adapt."""
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 128, "num_heads": 4, "head_dim": 32}
    Mamba2Config(**shape, n_groups=1, state_size=8).save_pretrained(tmp_path)
    printed = command("plan", tmp_path, "--length", 512).stdout
    assert "training: Mamba2ForCausalLM has no linear layers of the kind 'attention' to adapt." in printed
    assert "peak" in printed


def gpt_oss(**changes: Any) -> GptOssConfig:
    packing = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    return GptOssConfig(**{"quantization_config": packing} | changes)


@pytest.mark.slow
def test_the_published_weights_of_gpt_oss() -> None:
    """``total_size`` of openai/gpt-oss-20b's and -120b's model.safetensors.index.json."""
    for layers, experts, published in ((24, 32, 13_761_264_768), (36, 128, 65_248_815_744)):
        shape = gpt_oss(num_hidden_layers=layers, num_local_experts=experts)
        assert plan_serving(shape, dtype=torch.bfloat16).fixed.weights == published


@pytest.mark.nightly
def test_weights_that_come_packed_are_named(llama: Path, tmp_path: Path) -> None:
    small = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 32, "num_local_experts": 4}
    gpt_oss(**small, vocab_size=128).save_pretrained(tmp_path / "mxfp4")
    printed = command("plan", tmp_path / "mxfp4", "--length", 512).stdout
    assert "Its experts are stored as mxfp4 and counted so in use" in printed
    LlamaConfig(**SHAPE, quantization_config={"quant_method": "fp8"}).save_pretrained(tmp_path / "fp8")
    said = "stored as fp8, 8 bits a weight, and counted so in use. Training is counted with them in bf16"
    assert said in command("plan", tmp_path / "fp8", "--length", 512).stdout
    refused = command("plan", tmp_path / "fp8", "--length", 512, "--quantisation", "nf4")
    assert (refused.exit_code, "come quantised (fp8)" in refused.stderr) == (1, True)
    assert json.loads(command("plan", llama, "--length", 512, "--json").stdout)["stored_as"] is None


@pytest.mark.nightly
def test_a_quantised_cache_of_a_plain_checkpoint_as_extended(llama: Path) -> None:
    """Of four groups two read far; the others see 4 first tokens and 32 of the newest, with 32 to spare."""
    retrieval = ("--method", "retrieval_heads", "--factor", 4, "-p", "heads=[0,3]", "-p", "window=32")
    asked = ("--length", 4096, "--cache-bits", "8", "--prompt-chunk", 512)
    found = json.loads(command("plan", llama, *asked, *retrieval, "--json").stdout)
    assert found["serving"]["cache"] == (2 * 4096 + 2 * (4 + 31 + 32)) * KV / 4 * 8.5 / 16
    assert (found["reach"], found["serving"]["draft"], found["training"]["draft"]) == (1024, 0, 0)
    assert "retrieval_heads, bf16, 8-bit cache" in command("plan", llama, *asked, *retrieval).stdout


@pytest.mark.nightly
def test_draft_heads_are_named_beside_the_peak(tmp_path: Path) -> None:
    LlamaConfig(**SHAPE, num_nextn_predict_layers=1).save_pretrained(tmp_path)
    printed = command("plan", tmp_path, "--length", 4096).stdout
    assert printed.index("peak") < printed.index("draft heads (MTP), on servers only") < printed.index("their keys and")
    found = json.loads(command("plan", tmp_path, "--length", 4096, "--json").stdout)
    assert found["serving"]["draft_cache"] == 4096 * KV / 2


def test_options_of_a_method_need_its_name(llama: Path) -> None:
    refused = command("plan", llama, "--length", 256, "--factor", 4, "-p", "heads=[0]")
    assert (refused.exit_code, "--factor, --param: only with --method" in refused.stderr) == (1, True)
    refused = command("plan", llama, "--length", 256, "--prompt-chunk", 0)
    assert "0 tokens are too few. Give 1 or more." in refused.stderr


def test_an_adapter_is_planned_by_its_base(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "meta-llama/Llama-3.1-8B"}')
    said = " ".join(command("plan", tmp_path, "--length", 256).stderr.split())
    assert "is an adapter. Plan its base model, meta-llama/Llama-3.1-8B" in said
