"""``ctxext heads``: files that the library reads, a table, a picture, and mistakes said before torch is imported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import ctxext
from ctxext.attention.heads import HeadScores, heads
from ctxext.measuring.checkpoint import load_checkpoint
from tests._checkpoints import save_with_tokenizer
from tests._models import byte_model
from tests._programs import command
from tests._tokenizer import make_tokenizer


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("heads")
    save_with_tokenizer(byte_model(), folder / "model")
    save_with_tokenizer(ctxext.patch(byte_model(), "yarn", factor=2), folder / "extended")
    (folder / "book.txt").write_text("It was a bright cold day in April, and the clocks were striking. " * 40)
    return folder


@pytest.mark.slow
def test_files_hold_what_the_library_returns(place: Path, tmp_path: Path) -> None:
    files = [tmp_path / f"heads.{ending}" for ending in ("json", "md", "png")]
    asked = [word for file in files for word in ("-o", file)]
    command("heads", place / "model", "--dtype", "fp32", "--seeds", 2, "--text", place / "book.txt", *asked, code=0)
    scores = HeadScores.read(files[0])
    text, model = (place / "book.txt").read_text(), load_checkpoint(str(place / "model"), dtype="fp32").model
    same = heads(model, make_tokenizer(bos=True), text=text, seeds=range(2))
    for name in ("kv_heads", "probes", "spread", "fingerprint"):
        assert getattr(scores, name) == getattr(same, name)
    assert scores.settings["provenance"]["documents"] == ["book"]
    assert "![induction: best are layer" in files[1].read_text()
    assert files[2].read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_patch_takes_the_file_that_was_written(place: Path, tmp_path: Path) -> None:
    file, extended = tmp_path / "heads.json", tmp_path / "extended"
    assert command("heads", place / "model", "-o", file).exit_code == 0
    command("patch", place / "model", extended, "-m", "retrieval_heads", "-f", 4, "-p", f"heads={file}", code=0)
    chosen = json.loads((extended / "config.json").read_text())["ctxext"]["method"]["heads"]
    assert chosen == list(HeadScores.read(file).chosen(share=0.2))


@pytest.mark.slow
def test_an_extension_is_taken_off_first(place: Path) -> None:
    asked = ("--dtype", "fp32", "--seeds", 1, "--json")
    plain, extended = (json.loads(command("heads", place / name, *asked).stdout) for name in ("model", "extended"))
    assert extended["probes"] == plain["probes"]
    assert extended["fingerprint"] == plain["fingerprint"]
