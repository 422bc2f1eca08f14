"""Directories that hold an adapter and something of its base: the base's config, or whole weights too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

import ctxext
from ctxext.checkpoints.adapters import is_adapter
from ctxext.checkpoints.export import export
from ctxext.checkpoints.inspect import inspect_adapter, inspect_checkpoint
from ctxext.checkpoints.load import load_saved
from ctxext.checkpoints.write import patch_checkpoint
from ctxext.errors import CheckpointError
from ctxext.measuring.checkpoint import load_checkpoint
from tests._checkpoints import rewrite
from tests._models import logits, tiny, tokens
from tests._peft import lora
from tests._tokenizer import make_tokenizer


def adapted(plain: Path, method: str | None) -> Any:
    model = AutoModelForCausalLM.from_pretrained(plain)
    if method is not None:
        ctxext.patch(model, method, factor=4)
    return get_peft_model(model, lora(task_type=None, target_modules=["q_proj"], r=2, init_lora_weights=False)).eval()


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


PARTS = ['{"extension": ', "{}", '{"extension": null, "guarded": {}}', '{"extension": {}, "guarded": {}}']
PARTS += ['{"extension": {"format": 1}, "guarded": {"peft_type": "LORA"}}']
DAMAGED = [*(("adapter_config.json", part) for part in ("{", "[]")), *(("ctxext_config.json", part) for part in PARTS)]


@pytest.mark.parametrize(("name", "content"), DAMAGED)
def test_a_damaged_file_is_named(name: str, content: str, plain: Path, tmp_path: Path) -> None:
    adapted(plain, "yarn").save_pretrained(tmp_path)
    (tmp_path / name).write_text(content)
    for read in (ctxext.load, inspect_adapter):
        with pytest.raises(CheckpointError, match=name):
            read(tmp_path)


@pytest.mark.parametrize("is_extended", [False, True])
def test_a_type_that_this_peft_does_not_know_is_named(is_extended: bool, plain: Path, tmp_path: Path) -> None:
    model = ctxext.patch(tiny(), "yarn", factor=2) if is_extended else tiny()
    get_peft_model(model, LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path)
    file = tmp_path / ("ctxext_config.json" if is_extended else "adapter_config.json")
    rewrite(file, lambda saved: saved.get("guarded", saved).update(peft_type="OF_TOMORROW"))
    with pytest.raises(CheckpointError, match=r"^PEFT .* cannot read .*adapter_config\.json: 'OF_TOMORROW'"):
        load_saved(tmp_path, plain_class=True, base=plain)


@pytest.mark.slow
@pytest.mark.parametrize("inside", ["", "second"])
def test_an_adapter_on_the_hub(inside: str, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its model card says to load it so. One in a subfolder has a name."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--me--lora"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    base = ctxext.load(plain, "yarn", factor=4)
    model = get_peft_model(base, lora(init_lora_weights=False), inside or "default").eval()
    ctxext.save(model, repository / "snapshots" / "abc", tokenizer=make_tokenizer(bos=True))
    where = {"local_files_only": True} | ({"subfolder": inside} if inside else {})
    loaded = ctxext.load("me/lora", **where)
    assert isinstance(loaded, PeftModel)
    assert torch.equal(logits(loaded, tokens()), logits(model, tokens()))
    with pytest.raises(CheckpointError, match="carries its own extension"):
        ctxext.load("me/lora", "pi", factor=2, **where)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    if not inside:
        measured = load_checkpoint("me/lora", device="cpu", dtype="fp32")
        assert (measured.name, ctxext.describe(measured.model).target_length) == ("me/lora", 256)
    for name in ("me/other", "me/lora"):
        with pytest.raises(CheckpointError, match=f"There is no directory {name}. The hub did not give it either"):
            ctxext.load(name, revision="of nobody", local_files_only=True)
