"""``scripts/studies/compare_checkpoints.py``: its losses are stock transformers', and nothing is read twice."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import ctxext
from ctxext.texts.trained import record_of
from scripts.studies import compare_checkpoints
from tests._checkpoints import rainy, save_with_tokenizer
from tests._models import byte_model
from tests._programs import script

LENGTH = 640
TEXTS = [f"text{number}" for number in range(5)]
EDGES = (0, 512, 544, 576, 608, 640)


def compare(*arguments: object, code: int = 0) -> str:
    """What the comparison prints."""
    return script(compare_checkpoints.main, *arguments, code=code).output


def asked(folder: Path, *words: object, length: int = LENGTH) -> list[object]:
    """The words of a comparison on all texts."""
    texts = [part for name in TEXTS for part in ("-t", folder / f"{name}.txt")]
    return [*words, *texts, "--length", length, "-o", folder / "out"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two checkpoints that were extended and saved, a third as it came, and five texts."""
    for name, noise in {"first": 0.0, "second": 0.02, "plain": 0.0}.items():
        model = byte_model()
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(noise * torch.randn_like(weight))
        if name != "plain":
            ctxext.patch(model, "yarn", factor=2)
        save_with_tokenizer(model, tmp_path / name)
    rainy(tmp_path, TEXTS, lines=25)
    return tmp_path


def read_by(tokenizer: PreTrainedTokenizerFast, folder: Path) -> list[list[int]]:
    return [tokenizer((folder / f"{name}.txt").read_text(encoding="utf-8"))["input_ids"] for name in TEXTS]


@pytest.mark.nightly
def test_losses_are_those_of_stock_transformers_and_are_read_once(
    folder: Path, bos_tokenizer: PreTrainedTokenizerFast
) -> None:
    given = asked(folder, folder / "first", folder / "second", "--dtype", "fp32")
    compare(*given)
    table = (folder / "out" / "table.md").read_text(encoding="utf-8")
    assert "5 texts" in table
    losses = {}
    for name in ("first", "second"):
        model = AutoModelForCausalLM.from_pretrained(folder / name).eval()
        rows = []
        for ids in read_by(bos_tokenizer, folder):
            row = torch.tensor([ids[: LENGTH + 1]])
            with torch.no_grad():
                logits = model(row[:, :-1]).logits[0].double()
            rows.append(torch.nn.functional.cross_entropy(logits, row[0, 1:], reduction="none"))
        losses[name] = torch.stack(rows)
    for start, stop in pairwise(EDGES):
        first, second = (losses[name][:, start:stop].mean(1) for name in ("first", "second"))
        gap = second - first
        error = gap.std() / 5**0.5
        cells = f"{first.mean():.4f} | {second.mean():.4f} | {gap.mean():+.4f} ± {error:.4f}: "
        assert cells in table, (cells, table)
    lines = (folder / "out" / "cells.jsonl").read_text(encoding="utf-8")
    assert len(lines.splitlines()) == 10
    compare(*given)
    assert (folder / "out" / "cells.jsonl").read_text(encoding="utf-8") == lines
    assert (folder / "out" / "table.md").read_text(encoding="utf-8") == table


def truncated(model: torch.nn.Module, ids: list[int], window: int, start: int) -> torch.Tensor:
    """Losses from ``start`` on where the model sees the first token and the last ones, scored a quarter at a time."""
    found, quarter = [], window // 4
    for group in range(start // quarter, -(-LENGTH // quarter)):
        at, stop = max(start, group * quarter), min((group + 1) * quarter, LENGTH)
        row = torch.tensor([ids[:1] + ids[stop - window + 1 : stop + 1]])
        with torch.no_grad():
            logits = model(row[:, :-1]).logits[0].double()
        found.append(torch.nn.functional.cross_entropy(logits, row[0, 1:], reduction="none")[at - stop :])
    return torch.cat(found)


@pytest.mark.nightly
def test_the_ends_of_texts_against_the_best_truncation(folder: Path, bos_tokenizer: PreTrainedTokenizerFast) -> None:
    given = asked(folder, folder / "first", folder / "second", "--dtype", "fp32")
    compare(*given)
    drawn = (folder / "out" / "figure.png").read_bytes()
    compare(*given, "--truncated")  # goes on with what was read
    left, both = (int.from_bytes(png[16:20]) for png in (drawn, (folder / "out" / "figure.png").read_bytes()))
    assert both == 2 * left, "the width of the second table's picture, beside the first's"
    lines = (folder / "out" / "cells.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 2 * 5 * (1 + 4)
    table = (folder / "out" / "table.md").read_text(encoding="utf-8").split("against the best truncation")[1]
    means = {}
    for name in ("first", "second"):
        model = AutoModelForCausalLM.from_pretrained(folder / name).eval()
        for window in (128, 256, 384, 512):
            parts = [truncated(model, ids, window, start=512) for ids in read_by(bos_tokenizer, folder)]
            means[name, window] = torch.cat(parts).mean().item()
    best = min(means, key=lambda one: means[one])
    assert f"{means[best]:.4f} (last {best[1]} of {folder / best[0]})" in table
    for name in ("first", "second"):
        own, window = min((means[name, window], window) for window in (128, 256, 384, 512))
        assert f"{own:.4f} (last {window})" in table


@pytest.mark.parametrize(
    ("paths", "labels"),
    [
        (["runs/a/merged", "runs/b/merged"], ["a", "b"]),
        (["runs/a/merged"], ["runs/a/merged"]),
        (["model.gguf", "b/merged"], ["model.gguf", "b/merged"]),
        (["runs/a", "runs/a/merged"], ["runs/a", "merged"]),
    ],
)
def test_what_they_are_called(paths: list[str], labels: list[str]) -> None:
    assert compare_checkpoints.labels_of(paths) == dict(zip(paths, labels, strict=True))


def test_a_checkpoint_that_does_not_reach_is_refused_before_it_reads(folder: Path) -> None:
    refused = compare(*asked(folder, folder / "plain", "--dtype", "fp32"), code=1)
    assert "640 tokens are more than the 512 that this model is trained for" in refused
    assert not (folder / "out" / "cells.jsonl").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "length", "said"),
    [
        (["first", "nothing"], LENGTH, "There is no checkpoint at .*nothing"),
        (["first", "second"], 512, "length=512 leaves too little beyond the trained length of 512"),
        (["first", "second", "first/"], LENGTH, "Every checkpoint is named once; .*first stands there twice"),
    ],
)
def test_what_could_not_be_compared_in_the_end_is_refused_before_it_is_read(
    names: list[str], length: int, said: str, folder: Path
) -> None:
    paths = [f"{folder}/{name}" for name in names]
    assert re.search(said, compare(*asked(folder, *paths, length=length), code=1))
    assert not (folder / "out" / "cells.jsonl").exists()


@pytest.mark.slow
def test_what_is_read_says_of_which_run_it_is(folder: Path) -> None:
    for run, name in {"a": "first", "b": "second"}.items():
        (folder / run).mkdir()
        (folder / run / "merged").symlink_to(folder / name)
    runs = (folder / "a" / "merged", folder / "b" / "merged")
    found = compare(*runs, "-t", folder / "text0.txt", "--length", LENGTH, "-o", folder / "out")
    assert {*re.findall(r"[ab], text0", found)} == {"a, text0", "b, text0"}


@pytest.mark.slow
def test_texts_that_one_of_them_was_trained_on_are_refused(folder: Path) -> None:
    (folder / "run").mkdir()
    (folder / "run" / "merged").symlink_to(folder / "second")
    learned = {"texts": record_of([str(folder / "text1.txt")], None)}
    (folder / "run" / "run.json").write_text(json.dumps(learned), encoding="utf-8")
    assert "run/merged was trained on" in compare(*asked(folder, folder / "first", folder / "run" / "merged"), code=1)
    assert not (folder / "out" / "cells.jsonl").exists()
