"""What a run needs of the machine is checked before anything is loaded."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import ctxext
from ctxext.errors import BackendUnavailableError, CheckpointError, IncompatibleError, install_line
from ctxext.training.checkpoint import four_bits, in_fast_dtype, load_base, require_device, try_step
from ctxext.training.lora import attach_lora
from ctxext.training.memory import Memory
from tests.training._recipe import recipe


def test_a_run_that_one_process_reads_the_weights_of_is_refused(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As accelerate's questions suggest for FSDP: transformers leaves the others without data."""
    monkeypatch.setattr("ctxext.training.checkpoint.is_fsdp_enabled", lambda: True)
    with pytest.raises(IncompatibleError, match=r"fsdp_cpu_ram_efficient_loading leaves .* set it to false"):
        load_base(settings(), torch.device("cpu"))


def test_a_step_that_is_tried_draws_nothing_and_leaves_the_model_as_it_was(settings: Any) -> None:
    """The adapter of the run begins with the numbers that the seed gives."""
    for whole in ("true", "false"):
        made = settings("--lora.whole", whole)
        model = load_base(made, torch.device("cpu"), weights=False).model
        drawn, names = torch.get_rng_state(), list(model.state_dict())
        try_step(model, made, Memory(mlp_tile=8))
        assert torch.equal(torch.get_rng_state(), drawn)
        assert (list(model.state_dict()), "forward" in vars(model)) == (names, False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["--device", "cuda"], r"meant for a GPU \(device: cuda\), but torch .* sees no CUDA device here"),
        (["--quantisation", "nf4"], r"meant for a GPU \(quantisation: nf4\)"),
        (["--checkpointing", "--offload"], r"meant for a GPU \(memory.offload: true\).* take a config for the CPU"),
    ],
)
def test_a_run_for_a_gpu_is_refused_without_one(overrides: list[str], said: str, settings: Any, tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailableError, match=said):
        recipe.finetune(settings(*overrides))
    assert not (tmp_path / "run").exists(), "nothing was begun"


def test_with_a_gpu(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert require_device(settings("--device", "cuda")) == "cuda"
    assert require_device(settings()) == "cuda"
    assert require_device(settings("--device", "cpu")) == "cpu"
    with pytest.raises(BackendUnavailableError, match=r"\(quantisation: nf4\), but the device is set to cpu"):
        require_device(settings("--quantisation", "nf4", "--device", "cpu"))
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "bitsandbytes" else find(name))
    with pytest.raises(BackendUnavailableError, match=f"needs bitsandbytes. Run {re.escape(install_line('qlora'))}"):
        require_device(settings("--quantisation", "nf4"))


@pytest.mark.parametrize(("emulated", "fast"), [(True, "fp32"), (False, "bf16")])
def test_a_run_computes_in_what_its_device_is_fast_in(
    emulated: bool, fast: str, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ctxext.training.checkpoint.emulates_bf16", lambda: emulated)
    automatic = settings("--dtype", "auto")
    assert [in_fast_dtype(automatic, device).dtype for device in ("cpu", "cuda")] == [fast, "bf16"]
    assert in_fast_dtype(settings("--dtype", "bf16"), "cpu").dtype == "bf16"


def test_a_run_begins_from_a_plain_checkpoint(settings: Any, checkpoint: Path, tmp_path: Path) -> None:
    model = ctxext.patch(AutoModelForCausalLM.from_pretrained(checkpoint), "ntk", factor=2)
    ctxext.save(model, tmp_path / "extended")
    ctxext.save(attach_lora(model, rank=4), tmp_path / "adapter")
    said = r"extended was saved extended by ntk, and extensions are never stacked\. .* extension\.trained_length 64\.$"
    for quantisation in ("null", "nf4"):  # each has a way of its own to load
        extended = settings("--checkpoint", str(tmp_path / "extended"), "--quantisation", quantisation)
        with pytest.raises(CheckpointError, match=said):
            load_base(extended, torch.device("cpu"))
    with pytest.raises(CheckpointError, match=r"adapter is an adapter on .*, perhaps of another extension\. A run beg"):
        load_base(settings("--checkpoint", str(tmp_path / "adapter")), torch.device("cpu"))
    with pytest.raises(CheckpointError, match="no such directory"):
        load_base(settings("--checkpoint", str(tmp_path / "none")), torch.device("cpu"))


@pytest.mark.nightly
def test_a_run_goes_on_from_what_another_one_merged(
    settings: Any, checkpoint: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    plain = AutoModelForCausalLM.from_pretrained(checkpoint)
    expected = ctxext.describe(ctxext.patch(plain, "yarn", factor=2)).fingerprint
    first = ctxext.patch(AutoModelForCausalLM.from_pretrained(checkpoint), "ntk", factor=4)
    ctxext.save(first, tmp_path / "first")
    tokenizer.save_pretrained(tmp_path / "first")
    run = settings("--checkpoint", str(tmp_path / "first"), "--trained_length", "64", "--merge")
    assert ctxext.describe(load_base(run, torch.device("cpu")).model).method is None
    recipe.finetune(run)
    adapted, whole = ctxext.load(tmp_path / "run" / "adapter"), ctxext.load(tmp_path / "run" / "merged")
    assert ctxext.describe(adapted).fingerprint == ctxext.describe(whole).fingerprint == expected
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        torch.testing.assert_close(adapted.eval()(tokens).logits, whole(tokens).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("said", "storage"), [("true", torch.bfloat16), (None, None), ("false", None)])
def test_fsdp_gets_numbers_that_it_can_shard(
    monkeypatch: pytest.MonkeyPatch, said: str | None, storage: torch.dtype | None
) -> None:
    monkeypatch.delenv("ACCELERATE_USE_FSDP", raising=False)
    if said is not None:
        monkeypatch.setenv("ACCELERATE_USE_FSDP", said)
    found = four_bits("nf4", torch.bfloat16)
    assert found.get("bnb_4bit_quant_storage") == storage
    assert found["bnb_4bit_compute_dtype"] == torch.bfloat16
    assert found["load_in_4bit"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_qlora_on_a_gpu(settings: Any, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    recipe.finetune(settings("--quantisation", "nf4", "--dtype", "bf16", "--merge"))
    assert (tmp_path / "run" / "merged" / "model.safetensors").is_file()
