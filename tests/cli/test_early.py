"""What is wrong and cheap to see is said before a checkpoint is loaded or the network is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ctxext.errors import CheckpointError, InvalidParameterError
from ctxext.evaluation import checkpoint, survey
from ctxext.evaluation.checkpoint import load_checkpoint
from ctxext.texts.documents import require_sources
from recipes import finetune
from tests._programs import command


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def loading(*_: Any, **__: Any) -> Any:
        pytest.fail("a checkpoint is loaded, or processes are counted")

    monkeypatch.setattr(checkpoint, "_load", loading)
    monkeypatch.setattr(survey, "launched_processes", loading)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["eval", "perplexity", "org/model", "-m", "yran"], "Unknown method 'yran'. Did you mean 'yarn'?"),
        (["eval", "compare", "org/model", "-m", "yarn", "-m", "yran ramp=turns"], "Did you mean 'yarn'?"),
        (["eval", "passkey", "org/model", "-m", "selfextend"], "Did you mean 'self_extend'?"),
        (["patch", "here", "there", "-m", "yran", "-f", "4"], "Did you mean 'yarn'?"),
        (["show", "yran", "--model", "org/model"], "Did you mean 'yarn'?"),
        (["choose", "org/model", "--target", "4096", "--budget", "small"], "budget"),
        (["choose", "org/model", "--target", "4096", "-t", "./nowhere.txt"], "Cannot read the text './nowhere.txt'"),
        (["eval", "perplexity", "org/model", "-o", "loss.svg"], "give a file that ends in .json, .md or .png"),
        (["eval", "passkey", "org/model", "-o", "nowhere/keys.json"], "there is no directory nowhere"),
        (
            ["eval", "retrieval", "org/model", "--task", "round"],
            "Unknown retrieval task 'round'. Did you mean 'rounds'?",
        ),
        (["eval", "retrieval", "org/model", "-l", "2048", "--base", "1024"], "Give --length 1024 too"),
        (["eval", "retrieval", "org/model", "--export-lm-eval", "tasks"], "Give a --length"),
        (["eval", "masked", "org/model", "-t", "no/such/text.txt"], "Cannot read the text 'no/such/text.txt'"),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, list) else "",
)
def test_a_command_says_it_before_anything_is_loaded(words: list[str], says: str) -> None:
    done = command(*words)
    assert done.exit_code == 1
    assert says in done.output


@pytest.mark.parametrize(
    "place", ["./nowhere", "/no/where", "no/such/folder", "~/nowhere", "nowhere.gguf", "tests/nowhere"]
)
def test_what_looks_like_a_path_is_not_asked_of_the_hub(place: str) -> None:
    with pytest.raises(CheckpointError, match=r"There is no (checkpoint|directory)|No checkpoint at"):
        load_checkpoint(place)


def test_a_name_on_the_hub_may_hold_a_full_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def loading(source: str, *_: Any, **__: Any) -> Any:
        asked.append(source)
        raise OSError("offline")

    monkeypatch.setattr(checkpoint, "_load", loading)
    with pytest.raises(CheckpointError, match="offline"):
        load_checkpoint("meta-llama/Llama-3.1-8B")
    assert asked == ["meta-llama/Llama-3.1-8B"]


def test_missing_sources_are_told_from_names_on_the_hub(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    require_sources(["-", str(tmp_path / "a.txt"), "owner/name", "owner/name:config"])
    for missing in (str(tmp_path / "b.txt"), "b.txt", "./b", "x/y/z"):
        with pytest.raises(InvalidParameterError, match="No such file or directory"):
            require_sources([missing])


def test_the_recipe_misses_a_training_file_before_the_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def loading(*_: Any, **__: Any) -> Any:
        pytest.fail("the model is loaded")

    monkeypatch.setattr(finetune, "load_base", loading)
    values = {
        "checkpoint": "org/model",
        "output": str(tmp_path / "out"),
        "dtype": "fp32",
        "extension": {"method": "yarn", "factor": 2},
        "data": {"train": ["./nowhere.txt"], "length": 32},
        "training": {"steps": 1, "learning_rate": 1e-4},
    }
    settings = finetune.Settings.model_validate(values)
    with pytest.raises(InvalidParameterError, match=r"Cannot read the text './nowhere\.txt'"):
        finetune.finetune(settings)
