"""Directories that hold an adapter and something of its base: the base's config, or whole weights too."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

import ctxext
from ctxext.adapters import is_adapter
from ctxext.checkpoints.export import export
from ctxext.checkpoints.inspect import inspect_adapter, inspect_checkpoint
from ctxext.checkpoints.write import patch_checkpoint
from ctxext.errors import CheckpointError
from ctxext.evaluation.checkpoint import load_checkpoint
from tests._models import logits, tokens
from tests._tokenizer import make_tokenizer


def adapted(plain: Path, method: str | None) -> Any:
    model = AutoModelForCausalLM.from_pretrained(plain)
    if method is not None:
        ctxext.patch(model, method, factor=4)
    found = get_peft_model(model, LoraConfig(target_modules=["q_proj"], r=2))
    for name, weight in found.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight, std=0.3)
    return found.eval()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["yarn", "self_extend"])
def test_with_the_config_of_its_base_it_is_an_adapter(method: str, plain: Path, tmp_path: Path) -> None:
    """As axolotl writes one."""
    model = adapted(plain, method)
    expected = logits(model, tokens())
    model.save_pretrained(tmp_path)
    model.config.save_pretrained(tmp_path)
    (tmp_path / "optimizer.pt").write_bytes(b"a training run's own")
    assert is_adapter(tmp_path)
    loaded = ctxext.load(tmp_path)
    assert isinstance(loaded, PeftModel)
    assert torch.equal(logits(loaded, tokens()), expected)
    assert inspect_adapter(tmp_path).method is not None
    with pytest.raises(CheckpointError, match="holds an adapter and not a whole model"):
        patch_checkpoint(tmp_path, tmp_path.parent / "out", "yarn", factor=4)


def test_one_of_a_plain_base_is_measured_as_an_adapter(plain: Path, tmp_path: Path) -> None:
    base = Path(shutil.copytree(plain, tmp_path / "base"))
    model, place = adapted(base, None), tmp_path / "adapter"
    expected = logits(model, tokens())
    model.save_pretrained(place)
    model.config.save_pretrained(place)
    for directory in (base, place):
        make_tokenizer(bos=True).save_pretrained(directory)
    found = load_checkpoint(str(place), device="cpu", dtype="fp32").model
    assert torch.equal(logits(found, tokens()), expected)


@pytest.mark.parametrize("weights", ["model.safetensors", "model-00001-of-00002.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("method", ["yarn", None])
def test_whole_weights_and_an_adapter_in_one_directory_are_refused(
    weights: str, method: str | None, plain: Path, tmp_path: Path
) -> None:
    """Stock transformers adds the adapter to the weights; merged ones would have it twice."""
    model = adapted(plain, method)
    model.save_pretrained(tmp_path)
    model.merge_and_unload().save_pretrained(tmp_path)
    if weights != "model.safetensors":
        (tmp_path / "model.safetensors").rename(tmp_path / weights)
    attempts: list[Callable[[], Any]] = [
        lambda: ctxext.load(tmp_path),
        lambda: ctxext.load(tmp_path, "yarn", factor=4),
        lambda: load_checkpoint(str(tmp_path), device="cpu"),
        lambda: patch_checkpoint(tmp_path, tmp_path.parent / "out", "yarn", factor=4),
        lambda: export(tmp_path, to="vllm", method="yarn", factor=4),
        lambda: inspect_checkpoint(tmp_path),
    ]
    for attempt in attempts:
        with pytest.raises(CheckpointError, match=rf"whole model \({weights}\) and an adapter .* Is it merged already"):
            attempt()


@pytest.mark.slow
def test_what_the_refusal_says_helps(plain: Path, tmp_path: Path) -> None:
    model = adapted(plain, "yarn")
    expected = logits(model, tokens())
    model.save_pretrained(tmp_path / "both")
    model.merge_and_unload().save_pretrained(tmp_path / "both")
    shutil.copytree(tmp_path / "both", tmp_path / "merged")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / "merged" / name).unlink()
    assert torch.allclose(logits(ctxext.load(tmp_path / "merged").eval(), tokens()), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("adapter_config.json", "{"),
        ("adapter_config.json", "[]"),
        ("ctxext_config.json", '{"extension": '),
        ("ctxext_config.json", "{}"),
        ("ctxext_config.json", '{"extension": null, "guarded": {}}'),
    ],
)
def test_a_damaged_file_is_named(name: str, content: str, plain: Path, tmp_path: Path) -> None:
    adapted(plain, "yarn").save_pretrained(tmp_path)
    (tmp_path / name).write_text(content)
    for read in (ctxext.load, inspect_adapter):
        with pytest.raises(CheckpointError, match=name):
            read(tmp_path)
