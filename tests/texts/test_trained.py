"""A loss is not measured on texts that the checkpoint was trained on, and names of texts tell their split."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from ctxext.cli.app import app
from ctxext.cli.options import StrictCommand
from ctxext.errors import InvalidParameterError
from ctxext.texts.documents import read_documents
from ctxext.texts.trained import record_of, refuse_shared, refuse_trained
from scripts.studies import next_lines, second_model

Trained = Callable[..., Path]


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trained:
    """A run in a folder with ``books/train.jsonl`` and ``books/test.jsonl``; makes it, and returns its checkpoint."""
    monkeypatch.chdir(tmp_path)
    for split in ("train", "test"):
        (tmp_path / "books").mkdir(exist_ok=True)
        row = json.dumps({"text": f"A text of the {split} set.", "title": "Moby Dick"})
        (tmp_path / "books" / f"{split}.jsonl").write_text(row)

    def make(*sources: str, split: str | None = None, folder: str = "merged", weights: bool = False) -> Path:
        place = tmp_path / "run" / folder
        place.mkdir(parents=True, exist_ok=True)
        for name in ("config.json", "model.safetensors") if weights else ():
            (place / name).write_text("{}" if name == "config.json" else "")
        (tmp_path / "run" / "run.json").write_text(json.dumps({"texts": record_of(sources, split)}))
        return place

    return make


@pytest.mark.parametrize(
    ("learned", "learned_split", "measured", "split"),
    [
        ("books", "train", "books", "train"),
        ("books", "train", "books/train.jsonl", None),
        ("books/train.jsonl", None, "books", "train"),
        ("books/test.jsonl", None, "books/../books/test.jsonl", None),
        ("owner/name", None, "owner/name", "train"),
        ("owner/name:config", "train", "owner/name:config", "train"),
    ],
)
@pytest.mark.parametrize("folder", ["adapter", "merged", "checkpoint-40", "."])
def test_texts_that_were_trained_on_are_refused(
    learned: str, learned_split: str | None, measured: str, split: str | None, folder: str, trained: Trained
) -> None:
    place = trained(learned, split=learned_split, folder=folder)
    with pytest.raises(InvalidParameterError, match=rf"was trained on .*{Path(learned).name}.*another text or split"):
        refuse_trained(str(place), ["elsewhere.txt", measured], split)
    with pytest.raises(InvalidParameterError, match=rf"evaluation.text .* is trained on: .*{Path(learned).name}"):
        refuse_shared(["elsewhere.txt", measured], split, [learned], learned_split)


@pytest.mark.parametrize(
    ("learned", "learned_split", "measured", "split"),
    [
        ("books", "train", "books", "test"),
        ("books", "train", "books/test.jsonl", None),
        ("books/train.jsonl", None, "books", "test"),
        ("books/train.jsonl", None, "books/test.jsonl", None),
        ("owner/name", "train", "owner/name", "test"),
        ("owner/name", "train", "owner/other", "train"),
    ],
)
def test_other_texts_are_measured(
    learned: str, learned_split: str | None, measured: str, split: str | None, trained: Trained
) -> None:
    place = trained(learned, split=learned_split)
    refuse_trained(str(place), [measured], split)
    refuse_shared([measured], split, [learned], learned_split)
    refuse_trained(str(place.parent.parent), [learned], learned_split)  # no run's own folder


@pytest.mark.parametrize("command", [["eval", "perplexity"], ["eval", "compare"], ["choose", "--target", "16"]])
def test_commands_refuse_before_anything_is_loaded(command: list[str], trained: Trained) -> None:
    place = trained("books", split="train", weights=True)
    found = CliRunner().invoke(app, [*command, str(place), "--text", "books", "--split", "train"])
    assert "was trained on" in " ".join(found.output.split())
    assert found.exit_code == 1


@pytest.mark.parametrize("split", ["train", "test"])
def test_names_of_rows_tell_their_split(split: str, trained: Trained) -> None:
    trained("books")
    named = [*read_documents(["books"], split=split), *read_documents([f"books/{split}.jsonl"])]
    assert [document.name for document in named] == [f"Moby Dick ({split})"] * 2


@pytest.mark.parametrize("folder", ["adapter", "merged", "checkpoint-40", "."])
def test_texts_of_a_run_that_is_not_finished_are_refused(folder: str, trained: Trained, tmp_path: Path) -> None:
    place = trained("books", split="train", folder=folder)
    (tmp_path / "run" / "run.json").rename(tmp_path / "run" / "settings.json")
    with pytest.raises(InvalidParameterError, match=r"was trained on .*books, split train, as .*settings\.json tells"):
        refuse_trained(str(place), ["books/train.jsonl"], None)
    refuse_trained(str(place), ["books/test.jsonl"], None)


def test_a_checkpoint_is_known_from_inside_of_its_folder(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    place = trained("owner/name")
    monkeypatch.chdir(place)
    with pytest.raises(InvalidParameterError, match="was trained on owner/name"):
        refuse_trained(".", ["owner/name"], None)


def test_texts_of_the_runs_before_are_refused_too(trained: Trained, tmp_path: Path) -> None:
    """A run may begin with what another one merged."""
    place, checkpoint = trained("books/train.jsonl"), tmp_path / "run" / "merged"
    for number, learned in enumerate(["owner/name", "owner/other"]):
        record = record_of([learned], "train", str(checkpoint))
        checkpoint = tmp_path / str(number) / "merged"
        checkpoint.mkdir(parents=True)
        (checkpoint.parent / "run.json").write_text(json.dumps({"texts": record}))
    shutil.rmtree(place.parent)  # what is written down does not need it any more
    for measured in ("books/train.jsonl", "owner/name", "owner/other"):
        with pytest.raises(InvalidParameterError, match=rf"was trained on .*{measured}"):
            refuse_trained(str(checkpoint), [measured], None)
    refuse_trained(str(checkpoint), ["books/test.jsonl"], None)


@pytest.mark.parametrize("content", ["{} // of an editor", "[1]", '{"texts": "none"}', '{"texts": 3}'])
@pytest.mark.parametrize("name", ["run.json", "settings.json"])
def test_files_of_another_program_say_nothing(name: str, content: str, trained: Trained) -> None:
    place = trained("books", split="train")
    (place.parent / "run.json").unlink()
    (place.parent / name).write_text(content)
    refuse_trained(str(place), ["books"], "train")


@pytest.mark.parametrize("study", [next_lines, second_model], ids=["next_lines", "second_model"])
def test_studies_with_other_options_refuse_too(study: Any, trained: Trained) -> None:
    """Their text is one file, and they have no splits."""
    place = trained("books/train.jsonl", weights=True)
    program = typer.Typer()
    program.command(cls=StrictCommand)(study.main)
    for text, said in (("train", "was trained on"), ("test", "merged")):  # the second has no weights
        found = CliRunner().invoke(program, [str(place), "--text", f"books/{text}.jsonl", "-o", "out"])
        assert said in " ".join(found.output.split())
        assert isinstance(found.exception, SystemExit)
