"""``ctxext plan``: what it prints and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from conftest import SHAPE
from transformers import LlamaConfig, MixtralConfig
from typer.testing import Result

Cli = Callable[..., Result]
KV = 2 * 2 * SHAPE["num_key_value_heads"] * 16 * 2  # bytes per token: two layers, keys and values, bfloat16


def test_what_a_length_takes(cli: Cli, llama: Path) -> None:
    found = json.loads(cli("plan", llama, "--length", 4096, "--memory", "1GiB", "--no-embeddings", "--json").stdout)
    assert (found["dtype"], found["memory"], found["training"]["fits"]) == ("bf16", 2**30, True)
    training, serving = found["training"], found["serving"]
    assert 4096 * KV <= serving["cache"] < 4096 * KV * 1.01
    at_work = max(training["layer"], training["loss"])
    fixed = training["weights"] + training["adapters"] + training["gradients"] + training["optimizer"]
    assert training["total"] == fixed + training["kept"] + at_work
    printed = cli("plan", llama, "--length", 4096, "--memory", "1MiB").stdout
    assert "AdamW's moments" in printed
    assert "training: 4,096 tokens take" in printed
    assert "more than there is" in printed


def test_the_longest_of_an_extended_checkpoint(cli: Cli, llama: Path, tmp_path: Path) -> None:
    cli("patch", llama, tmp_path / "long", "--method", "yarn", "--factor", 4)
    found = json.loads(cli("plan", tmp_path / "long", "--memory", "16MiB", "--no-embeddings", "--json").stdout)
    assert 0 < found["training"]["length"] < found["serving"]["length"]
    assert found["serving"]["total"] <= 16 * 2**20


def test_no_weights_and_no_training(cli: Cli, tmp_path: Path) -> None:
    shape = SHAPE | {"num_local_experts": 4, "num_experts_per_tok": 2}
    MixtralConfig(**shape).save_pretrained(tmp_path)
    printed = cli("plan", tmp_path, "--length", 512).stdout
    assert "training: MixtralForCausalLM has no linear layers of the kind 'mlp' to adapt." in printed
    assert "keys and values of all layers" in printed


def test_refused(cli: Cli, llama: Path, tmp_path: Path) -> None:
    LlamaConfig(**SHAPE).save_pretrained(tmp_path)
    for arguments, said in (
        ((), "Give --memory (80GiB), for the longest context, or --length"),
        (("--memory", "1KiB"), "256 tokens take"),
        (("--memory", "eighty"), "An amount of memory is written like 2GiB"),
        (("--length", 64, "--dtype", "bf61"), "Did you mean 'bf16'"),
        (("--length", 64, "--mlp-tile", 0), "mlp_tile must be at least 1 token, found 0"),
        (("--length", 64, "--no-checkpointing", "--offload"), "offload is about what checkpointing keeps"),
        (("--length", 64, "--quantisation", "int2"), "Unknown quantisation 'int2'"),
    ):
        result = cli("plan", tmp_path, *arguments)
        assert (result.exit_code, said in result.stderr) == (1, True), result.stderr
    assert cli("plan", tmp_path, "--length", 0).exit_code == 2
    assert "There is no checkpoint at" in cli("plan", tmp_path / "none", "--length", 64).stderr
