"""Settings are read strictly: what is not understood is refused with the place, the value and a suggestion."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments

from ctxext.errors import InvalidParameterError, UnknownNameError
from ctxext.methods.base import resolve
from ctxext.methods.yarn import YaRN
from ctxext.texts.trained import refuse_trained
from ctxext.training import Memory
from ctxext.training.checkpoints import COMPLETE, resume_point
from ctxext.training.settings import Settings, read_settings, refuse_mistakes

FILE = """
output: runs/x
extension: {method: yarn, factor: 2, parameters: {beta_fast: 16}}
data: {length: 4096, positions: pose}
training:
  steps: 10
  learning_rate: 2e-5
"""


@pytest.fixture
def read(tmp_path: Path) -> Any:
    def run(*overrides: str, text: str = FILE) -> Settings:
        path = tmp_path / "settings.yaml"
        path.write_text(text, encoding="utf-8")
        return read_settings(path, overrides)

    return run


def test_file_and_command_line(read: Any) -> None:
    settings = read("--data.train", "a.parquet", "--factor", "8")
    assert settings.training.learning_rate == 0.00002
    assert settings.extension.factor == 8
    assert settings.data.train == ["a.parquet"]
    assert settings.lora.targets == ["attention", "mlp"]
    several = read("--train", "a", "b", "--learning_rate=3E-4", "--targets", "mlp", "--merge", "--norms", "no")
    assert several.data.train == ["a", "b"]
    assert several.training.learning_rate == 0.0003
    assert several.lora.targets == ["mlp"]
    assert several.merge
    assert not several.lora.norms
    free = read("--train", "a", "--extension.parameters.beta_slow", "1e0").extension.parameters
    assert free == {"beta_fast": 16, "beta_slow": 1.0}
    assert isinstance(free["beta_slow"], float)
    assert read("--train", "a", "--checkpointing", "no").memory.checkpointing is False
    assert Memory(**settings.memory.model_dump(exclude={"return_freed"})) == Memory(), "the library's defaults"
    by_length = read("--train", "a", "--target_length", "32768").extension
    assert (by_length.factor, by_length.target_length) == (None, 32768), "what is said last holds"
    assert read("--train", "a", text=FILE + "lora: {rank: 8}").lora.rank == 8


def test_a_list_may_be_given_in_several_options(read: Any) -> None:
    """As every repeatable option of the command line; the one that came last used to be all that was trained on."""
    trained = ("--data.train", "a", "--data.train=b", "--train", "c", "d")
    settings = read(*trained, "--evaluation.text", "e", "--lengths", "[8, 16]", "--lengths", "32")
    assert settings.data.train == ["a", "b", "c", "d"]
    assert settings.evaluation.lengths == [8, 16, 32]
    measured = FILE + "evaluation: {text: [e], lengths: [2]}"
    assert read("--train", "a", text=measured).evaluation.lengths == [2]
    changed = read("--train", "a", "--lengths", "3", text=measured)
    assert changed.evaluation.lengths == [3], "the command line takes the place of the file"
    stage = "[{steps: 1, length: 64, factor: 2}]"
    assert len(read("--train", "a", "--stages", stage, "--stages", stage).stages) == 2


def test_a_run_starts_from_a_choice(read: Any, tmp_path: Path) -> None:
    method = YaRN(factor=2, beta_slow=2.0, divisor=3.0, attention_factor=1.01)
    path = tmp_path / "choice.json"
    about = {"trained_length": 128, "sliding_window": "lift"}
    path.write_text(json.dumps({"method": method.to_dict(), "provenance": about}), encoding="utf-8")
    plain = FILE.replace("{method: yarn, factor: 2, parameters: {beta_fast: 16}}", f"{{method: {path}}}")
    extension = read("--train", "a", text=plain).extension
    with pytest.raises(InvalidParameterError, match="leave out factor, parameters"):
        read("--train", "a", "--method", str(path))
    with pytest.raises(InvalidParameterError, match="chosen with trained_length=128, found 64"):
        read("--train", "a", "--trained_length", "64", text=plain)
    path.unlink()
    assert (extension.trained_length, extension.sliding_window) == (128, "lift"), "as it was measured"
    assert extension.method == "yarn", "a run records the method itself, not a file that may change"
    assert resolve(extension.method, extension.factor, None, 64, extension.parameters) == method


def test_words_are_themselves_and_numbers_those_of_yaml_1_2(read: Any) -> None:
    settings = read("--train", "texts #2/a.txt", "--steps", "010", "--output", "2026-11-27")
    assert settings.data.train == ["texts #2/a.txt"]
    assert (settings.training.steps, settings.output) == (10, "2026-11-27")
    assert read("--train", "a", "--output", "'it #1'").output == "it #1"


def test_all_of_a_run_is_in_one_folder(read: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Trainer takes a tilde for the user's folder, where its checkpoints then are: nothing else would find them."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for settings in (read("--train", "a", text=FILE.replace("runs/x", "~/x")), read("--train", "a", "--output=~/x")):
        assert settings.output == str(tmp_path / "x") == TrainingArguments(settings.output).output_dir


TRAIN = ("--train", "a")
BETA = "--extension.parameters.beta_slow"
BOOLEAN, TWICE, SAME = "input should not be true or false", "is given more than once", "set the same value"
FILES = "a run reads its texts more than once: give files, not standard input"
REFUSED: dict[type[Exception], list[tuple[list[str], str]]] = {
    UnknownNameError: [
        ([*TRAIN, "--fator", "3"], r"Unknown setting 'fator'\. Did you mean 'factor'\?"),
        ([*TRAIN, "--training.step", "3"], r"Unknown setting 'training.step'\. Did you mean 'training.steps'\?"),
        ([*TRAIN, "--lora.parameters.x", "3"], r"Unknown setting 'lora.parameters.x'"),
        ([*TRAIN, "--extension", "yarn"], r"Unknown setting 'extension'|extension: "),
    ],
    InvalidParameterError: [
        # What is no list is given once.
        ([*TRAIN, "--factor", "4", "--factor", "8"], rf"--factor {TWICE}, and takes one value\. Give it"),
        ([*TRAIN, "--factor", "4", "--extension.factor=4"], rf"--factor and --extension\.factor {SAME}"),
        ([*TRAIN, "--seed", "1", "--steps", "2", "--seed", "2"], f"--seed {TWICE}"),
        ([*TRAIN, "--merge", "--merge", "no"], f"--merge {TWICE}"),
        ([*TRAIN, "--factor", "4", "--target_length", "32"], f"--factor and --target_length {SAME}"),
        (
            [*TRAIN, BETA, "1", "--extension.parameters", "{beta_slow: 2}"],
            rf"{BETA} and --extension\.parameters {SAME}",
        ),
        ([*TRAIN, *[BETA, "1"] * 2], r"parameters\.beta_slow is given more than once"),
        # Values that cannot be.
        ([], r"data.train is missing; set it in the file or with --data.train\.$"),
        ([*TRAIN, "--length", "x", "--rank=0"], r"data.length: input should be a valid integer.*'x'; lora.rank: "),
        ([*TRAIN, "--learning_rate", "nan"], r"training.learning_rate: input should be a finite number, found"),
        ([*TRAIN, "--factor", "null"], r"extension: give one of factor and target_length, found"),
        ([*TRAIN, "--positions", "skip"], r"data.positions: .* be 'consecutive', 'pose' or 'packed', found 'skip'"),
        (["train", "a"], r"Expected --key value on the command line, found 'train'"),
        ([*TRAIN, "--steps"], rf"training.steps: {BOOLEAN}, found True"),
        ([*TRAIN, "--steps", "1:30"], r"training.steps: .*, found '1:30'"),
        ([*TRAIN, "--retrieval"], rf"data.retrieval: {BOOLEAN}, found True"),
        ([*TRAIN, "--learning_rate", "yes"], rf"training.learning_rate: {BOOLEAN}"),
        (["--train", "[draft] a"], r"(?s)--train \[draft\] a is not valid YAML: .*--train '\"\[draft\] a\"'"),
        (["--train", "@a"], r"--train @a is not valid YAML"),
        ([*TRAIN, "--keep", "1"], r"training.keep: input should be greater than or equal to 2, found 1"),
        ([*TRAIN, "--checkpointing", "no", "--save_attention", "yes"], "save_attention requires checkpointing=True"),
        # Values that do not go together.
        ([*TRAIN, "--quantisation", "nf4", "--lora.whole", "true"], r"set lora\.whole to false"),
        ([*TRAIN, "--quantisation", "nf4", "--checkpoint", "model.gguf"], "needs a checkpoint of safetensors"),
        ([*TRAIN, "--positions", "packed", "--training.batch", "2"], r"to 1 and raise training.accumulation\.$"),
        ([*TRAIN, "--retrieval", "0.2", "--positions", "packed", "--training.batch", "1"], "one text in a sequence"),
        ([*TRAIN, "--retrieval", "1.2"], "less than or equal to 1"),
        ([*TRAIN, "--retrieval", "0.2", "--retrieval_kinds", "riddles"], "keys"),
        (
            [*TRAIN, "--stages", "[{steps: 10, factor: 2}]"],
            "the stages take 10 steps, which leaves none of training.st",
        ),
        ([*TRAIN, "--stages", "[{steps: 1}]"], "stages.0: give one of factor and target_length"),
        ([*TRAIN, "--window", "64"], "evaluation: window needs lengths"),
        ([*TRAIN, "--lengths", "64"], "evaluation: lengths needs text: give that, or leave lengths out"),
        ([*TRAIN, "--evaluation.documents", "2"], "evaluation: documents needs text"),
        ([*TRAIN, "--passkey_trials", "2"], "evaluation: passkey_trials needs passkey_lengths"),
        ([*TRAIN, "--seed", "4294967296"], "seed: input should be less than 4294967296, found 4294967296"),
        *(([*words, "'-'"], FILES) for words in ([*TRAIN, "--evaluation.text"], ["--data.train"])),
    ],
}


@pytest.mark.parametrize(
    ("error", "words", "said"),
    [pytest.param(error, *row, id=" ".join(row[0])) for error, rows in REFUSED.items() for row in rows],
)
def test_command_lines_that_cannot_be(read: Any, error: type[Exception], words: list[str], said: str) -> None:
    with pytest.raises(error, match=said):
        read(*words)


STAGE = "stages: [{steps: 1, factor: 1, lenght: 8}]"


@pytest.mark.parametrize(
    ("error", "text", "said"),
    [
        (UnknownNameError, FILE + "lora: {rnak: 8}", r"in .*settings.yaml: 'lora.rnak'\. Did you mean 'lora.rank'\?"),
        (UnknownNameError, FILE + "sede: 3", r"'sede'\. Did you mean 'seed'\?"),
        (UnknownNameError, FILE + STAGE, r"'stages.0.lenght'\. Did you mean 'stages.0.length'\?"),
        (InvalidParameterError, FILE + "output: other", r"is not valid YAML: 'output' is set twice"),
        (InvalidParameterError, "- a", r"must hold settings by name, found list"),
        (InvalidParameterError, "a: [", r"is not valid YAML"),
    ],
    ids=["lora", "seed", "stages", "twice", "list", "no YAML"],
)
def test_files_that_cannot_be(read: Any, error: type[Exception], text: str, said: str) -> None:
    with pytest.raises(error, match=said):
        read("--train", "a", text=text)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameterError, match=r"Cannot read the settings in '.*none.yaml': No such file"):
        read_settings(tmp_path / "none.yaml")


@pytest.mark.parametrize("package", ["accelerate", "datasets", "matplotlib", "peft"])
def test_a_package_that_the_end_of_a_run_takes_is_missed_before_it(
    read: Any, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_text("text")
    settings = read("--train", str(tmp_path / "text.txt"), "--output", str(tmp_path / "run"))
    refuse_mistakes(settings)
    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == package else found(name))
    with pytest.raises(InvalidParameterError, match=rf"^A run takes the package {package}, which is not installed"):
        refuse_mistakes(settings)
    with contextlib.nullcontext() if package == "peft" else pytest.raises(InvalidParameterError):
        refuse_mistakes(settings.model_copy(update={"table": "whole"}))


def test_texts_of_the_run_before_are_not_measured(settings: Any, checkpoint: Path, tmp_path: Path) -> None:
    """A run writes down what it reads before its first step, and the next one may begin with its checkpoint."""
    (text := tmp_path / "measured.txt").write_text("Once upon a time.", encoding="utf-8")
    first = settings("--data.train", str(text), "--output", str(tmp_path / "first"))
    assert resume_point(first, resume=False) is None
    merged = shutil.copytree(checkpoint, tmp_path / "first" / "merged")
    second = settings("--checkpoint", str(merged), "--evaluation.text", str(text))
    with pytest.raises(InvalidParameterError, match=r"merged was trained on .*measured\.txt"):
        refuse_mistakes(second)
    assert resume_point(second, resume=False) is None
    with pytest.raises(InvalidParameterError, match=r"checkpoint-2 was trained on .*measured\.txt"):
        refuse_trained(str(tmp_path / "run" / "checkpoint-2"), [str(text)], None)
    (tmp_path / "run" / "checkpoint-2").mkdir()
    (tmp_path / "run" / "checkpoint-2" / COMPLETE).write_text("")
    assert resume_point(second, resume=True) == tmp_path / "run" / "checkpoint-2"
