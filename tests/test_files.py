"""JSON that nests too deep, or is otherwise none: one sentence wherever it is read, and never a traceback."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ctxext
from ctxext.attention.heads import HeadScores
from ctxext.checkpoints.source import read_tokenizer
from ctxext.errors import CtxextError, InvalidParameterError
from ctxext.files import DAY, LEVELS, parse_json, read_json, read_json_as, whole_file, whole_files, write_whole
from ctxext.measuring.journal import _parsed
from ctxext.methods import choice_in
from ctxext.quantities import parameter_of
from ctxext.texts.documents import read_documents
from tests._models import byte_model

ROOT = Path(__file__).parents[1]
# Too deep for the parser; deep enough to stop what walks it later; and other things that json refuses.
BAD = {
    "lists": "[" * 100_000,
    "objects": '{"a":' * 100_000,
    "whole": "[" * 400 + "]" * 400,
    "mixed": '[{"a":' * 80 + "1" + "}]" * 80,
    "inside": json.dumps({"model_type": "llama", "method": {"method": "yarn"}})[:-1]
    + ', "x": '
    + "[" * 300
    + "]" * 300
    + "}",
    "digits": '{"a": ' + "9" * 5_000 + "}",
}


@pytest.mark.parametrize("text", BAD.values(), ids=BAD)
@pytest.mark.parametrize(
    "read",
    [
        read_json,
        lambda path: read_json_as(path, list, "a list"),
        HeadScores.read,
        choice_in,
        lambda path: parameter_of(f"short_factor=@{path}"),
        lambda path: ctxext.load(path.parent),
    ],
    ids=["object", "list", "heads", "choice", "parameter", "config"],
)
def test_json_that_nests_too_deep_is_a_sentence(read: Callable[[Path], Any], text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(CtxextError, match=re.escape(str(path))) as refused:
        read(path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("text", BAD.values(), ids=BAD)
def test_what_is_no_json_is_a_plain_text_or_an_empty_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    if text.startswith("[{"):  # a table, in which nothing is text
        with pytest.raises(InvalidParameterError, match=r"no column 'text'|nests more than"):
            list(read_documents([str(tmp_path / "a.json")]))
    else:
        assert [document.text for document in read_documents([str(tmp_path / "a.json")])] == [text]
    assert dict(_parsed(text.encode(), "a journal")) == {}


def test_depth_is_counted() -> None:
    deep: Any = 1
    for levels in range(1, LEVELS + 2):
        deep = [deep] if levels % 2 else {"a": deep}
        if levels <= LEVELS:
            assert parse_json(json.dumps(deep)) == deep
    with pytest.raises(ValueError, match=f"more than {LEVELS} levels"):
        parse_json(json.dumps(deep))
    assert parse_json(json.dumps([[]] * 5_000)) == [[]] * 5_000  # broad is not deep


def test_files_that_transformers_reads_get_a_sentence_too(tmp_path: Path) -> None:
    byte_model().save_pretrained(tmp_path)
    reading: dict[str, Callable[[Path], Any]]
    reading = {"generation_config.json": ctxext.load, "tokenizer_config.json": read_tokenizer}
    for name, read in reading.items():
        (tmp_path / name).write_text(BAD["lists"])
        with pytest.raises(CtxextError, match=re.escape(str(tmp_path))):
            read(tmp_path)


def test_json_of_others_is_parsed_in_one_place() -> None:
    """What remains reads files that ctxext brings along, has just written or replaces."""
    own = {"runtimes/base.py", "checkpoints/adapters.py", "registry.py", "files.py"}
    own |= {"serving/vllm_attention.py", "serving/gate.py", "serving/endpoints.py"}
    parsing = {
        path for path in (ROOT / "ctxext").rglob("*.py") if re.search(r"\bjson\.loads?\(", path.read_text("utf-8"))
    }
    assert {path.relative_to(ROOT / "ctxext").as_posix() for path in parsing} == own


def test_what_a_kill_left_is_removed_a_day_later(tmp_path: Path) -> None:
    for name, age in ((".0a1b2c3d.partial", 2 * DAY), (".4e5f6a7b.partial", 60)):
        (tmp_path / name / "model").mkdir(parents=True)
        os.utime(tmp_path / name, times=(time.time() - age,) * 2)
    with whole_files(tmp_path, last=[]) as half:
        (half / "new").write_text("new")
    assert sorted(os.listdir(tmp_path)) == [".4e5f6a7b.partial", "new"]


def test_two_threads_that_write_one_file_leave_the_whole_of_one(tmp_path: Path) -> None:
    path, errors = tmp_path / "file.json", list[OSError]()

    def write() -> None:
        try:
            write_whole(path, "other")
        except OSError as error:
            errors.append(error)

    thread = threading.Thread(target=write)
    with whole_file(path) as half:
        half.write_text("mine")
        thread.start()
        thread.join()
        assert half.read_text() == "mine"
    assert (path.read_text(), errors, os.listdir(tmp_path)) == ("mine", [], ["file.json"])


@pytest.mark.parametrize("variant", ["", "fp16"])
def test_an_index_goes_with_the_shards_that_it_names(variant: str, tmp_path: Path) -> None:
    between = f".{variant}" if variant else ""
    old = [f"model{between}-0000{n}-of-00002.safetensors" for n in (1, 2)] + [f"model.safetensors.index{between}.json"]
    others = ["model.bf16.safetensors", "model.safetensors.index.bf16.json", "tokenizer.json", "my.index.json"]
    for name in old + others:
        (tmp_path / name).write_text("{}")
    with whole_files(tmp_path, last=["config.json"]) as half:
        for name in (f"model{between}.safetensors", "config.json"):
            (half / name).write_text("{}")
    assert {path.name for path in tmp_path.iterdir()} == {f"model{between}.safetensors", "config.json", *others}
