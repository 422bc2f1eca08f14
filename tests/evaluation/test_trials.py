"""``ctxext eval passkey`` and ``ruler``: who reads what, trials that survive anything, and what is written."""

from __future__ import annotations

import errno
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.figure
import pytest
import torch
from rich.console import Console
from transformers import LlamaForCausalLM

import ctxext
from ctxext.errors import IncompatibleError, InvalidParameterError, ResultsError
from ctxext.evaluation import passkey
from ctxext.evaluation.passkey import PasskeyReport, PasskeyResult, PasskeyTrial
from ctxext.evaluation.report.page import NONE
from ctxext.evaluation.report.retrieval import passkey_page, passkey_sentences, ruler_sentences
from ctxext.evaluation.ruler import run as ruler
from ctxext.evaluation.ruler.run import RulerReport, RulerResult, RulerTrial
from ctxext.evaluation.ruler.tasks import TASKS
from ctxext.measuring.checkpoint import Checkpoint, load_checkpoint
from ctxext.measuring.journal import Journal
from ctxext.measuring.provenance import from_json, provenance_of
from ctxext.measuring.readers import find_readers
from ctxext.measuring.statistics import wilson_interval
from ctxext.texts.documents import read_documents
from tests._models import tiny
from tests._programs import command
from tests._tokenizer import BYTES_AFTER_BOS

ASKED = ("--dtype", "fp32", "-m", "yarn", "-m", "dynamic_ntk", "--depth", "0", "--depth", "0.9")


@pytest.mark.nightly
def test_passkeys_are_those_of_the_evaluation(checkpoint: str, model: LlamaForCausalLM, tmp_path: Path) -> None:
    outputs = [tmp_path / f"keys.{kind}" for kind in ("json", "md", "png")]
    shown = command("eval", "passkey", checkpoint, *ASKED, *(part for path in outputs for part in ("-o", path)), code=0)
    saved = json.loads(outputs[0].read_text(encoding="utf-8"))
    report = PasskeyReport.from_dict(saved)
    assert json.loads(json.dumps(report.to_dict())) == saved
    names = ["unpatched", "truncated", "yarn x2", "dynamic_ntk x2"]
    assert [reading.reading for reading in report.readings] == names
    grid = [(length, depth) for length in (512, 1024) for depth in (0.0, 0.9)]
    for reading, method in zip(report.readings, (None, None, "yarn", "dynamic_ntk"), strict=True):
        assert [(trial.length, trial.depth) for trial in reading.trials] == grid
        if method is not None:
            ctxext.patch(model, method, factor=2)
        for trial in reading.trials:
            prompt = passkey.build(BYTES_AFTER_BOS, length=trial.length - 8, depth=trial.depth)
            if reading.reading == "truncated" and trial.length > 512:
                last = torch.cat([prompt.prompt[:1], prompt.prompt[-(512 - 8 - 1) :]])
                prompt = replace(prompt, prompt=last, key_position=prompt.key_position - 512)
            expected = passkey.measure(model, prompt)
            assert trial.loss == pytest.approx(expected.loss, rel=1e-5)
            assert (trial.distance, trial.key, trial.correct) == (expected.distance, expected.key, expected.correct)
        if method is not None:
            fingerprint = ctxext.describe(model).fingerprint
            assert report.provenance.extensions[reading.reading].fingerprint == fingerprint
            ctxext.unpatch(model)
    page = outputs[1].read_text(encoding="utf-8")
    for reading in report.readings:
        parts = [reading.only(length=length) for length in (512, 1024)]
        counts = [f"{sum(trial.correct for trial in part.trials)}/2 ({part.loss:.2f})" for part in parts]
        assert f"| {reading.label} | {' | '.join(counts)} |" in page
    assert "](keys.png)" in page
    assert saved["provenance"]["checkpoint_sha256"] in page
    assert outputs[2].read_bytes().startswith(b"\x89PNG")
    assert "14 jobs" in shown.output
    assert re.search(r"Beyond the trained 512 tokens, found: unpatched 0 of 2 \(0% to 66%\)", shown.output)


def test_a_checkpoint_that_was_saved_extended_is_read_as_saved(checkpoint: str, tmp_path: Path) -> None:
    """The original reads for the references; without it, the extended model itself reads the last tokens."""
    ctxext.patch(LlamaForCausalLM.from_pretrained(checkpoint), "yarn", factor=2).save_pretrained(tmp_path)
    BYTES_AFTER_BOS.save_pretrained(tmp_path)
    loaded, plain = (load_checkpoint(str(place), dtype="fp32") for place in (tmp_path, checkpoint))
    readers = find_readers(loaded, reference=plain)
    assert [one.reading.name for one in readers] == ["unpatched", "truncated", "as saved"]
    assert readers[2].lengths == (512, 1024)
    with pytest.raises(InvalidParameterError, match=r"The reference .* is extended itself; give the original"):
        find_readers(loaded, reference=loaded)
    readers = find_readers(loaded, methods=["pi"], factors=[4.0])
    assert [one.reading.name for one in readers] == ["truncated", "as saved", "pi x4"]
    assert [one.lengths for one in readers] == [(512, 1024, 2048), (512, 1024), (512, 1024, 2048)]


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"lengths": [600]}, InvalidParameterError, r"600 tokens are more than the 512 that this model is trained for"),
        (
            {"lengths": [2048], "methods": ["pi"], "factors": [2.0]},
            InvalidParameterError,
            r"2,048 tokens are more than the 1,024 that what is extended here reaches.*--beyond",
        ),
        ({"lengths": [400], "methods": ["pi"]}, InvalidParameterError, r"inside the trained 512.*Give a --factor"),
        ({"factors": [2.0]}, InvalidParameterError, r"factor of 2 is for a method"),
        (
            {"lengths": [2048], "methods": ["pi"], "factors": [2.0, 4.0]},
            InvalidParameterError,
            r"PI .2 reaches 1,024 tokens, fewer than every length",
        ),
        ({"lengths": [400], "methods": ["pi factor=4", "yarn"]}, InvalidParameterError, r"inside the trained 512"),
        ({"methods": ["pi"], "factors": [2.0, 2.0000001]}, InvalidParameterError, r"each method once; found 'pi x2'"),
        ({"methods": ["alibi", "table inv_freq=[1.0]"]}, IncompatibleError, r"given frequencies"),
    ],
)
def test_what_cannot_be_read_is_refused(
    model: LlamaForCausalLM, given: dict[str, Any], kind: type[Exception], message: str
) -> None:
    loaded = Checkpoint("tiny", model, BYTES_AFTER_BOS)
    with pytest.raises(kind, match=message):
        find_readers(loaded, **given)
    with pytest.raises(InvalidParameterError, match="is its own reference"):
        find_readers(loaded, methods=["pi"], reference=loaded)
    assert ctxext.describe(model).method is None


@pytest.mark.slow
def test_lengths_follow_from_methods_and_factors_from_lengths(model: LlamaForCausalLM) -> None:
    loaded = Checkpoint("tiny", model, BYTES_AFTER_BOS)

    def readers(**given: Any) -> dict[str, tuple[int, ...]]:
        return {one.reading.name: one.lengths for one in find_readers(loaded, **given)}

    assert readers() == {"unpatched": (512,)}
    assert readers(lengths=[600], beyond=True) == {"unpatched": (600,), "truncated": (600,)}
    both = {"unpatched": (512, 1024), "truncated": (512, 1024), "yarn x2": (512, 1024)}
    assert readers(methods=["yarn"]) == both
    assert readers(methods=["yarn"], unpatched=False) == both | {"unpatched": (512,)}
    assert readers(methods=["yarn"], lengths=[400, 768])["yarn x1.5"] == (400, 768)
    assert readers(methods=["pi factor=4"], lengths=[400]) == {"unpatched": (400,), "pi x4": (400,)}
    several = readers(methods=["pi", "dynamic_ntk"], factors=[2.0, 4.0])
    assert several["pi x2"] == (512, 1024)
    assert several["pi x4"] == several["dynamic_ntk x2"] == several["truncated"] == (512, 1024, 2048)


@pytest.mark.parametrize("family", ["gpt2", "opt", "mpt"])
def test_a_model_whose_positions_end_is_asked_no_further(family: str) -> None:
    loaded, method = Checkpoint("tiny", tiny(family), BYTES_AFTER_BOS), "alibi" if family == "mpt" else "pi"
    readers = [one.lengths for one in find_readers(loaded, methods=[method], lengths=[64, 128])]
    assert readers == [(64,), (64, 128), (64, 128)], "the control stays in its window"
    for given in ({}, {"methods": [method], "factors": [1.5]}, {"trained_length": 128}):
        with pytest.raises(InvalidParameterError, match=r"are more than|cannot read 128"):
            find_readers(loaded, lengths=[128], beyond=True, **given)


def test_the_file_of_trials_belongs_to_one_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, mine = tmp_path / "keys.trials.jsonl", {"name": "tiny", "sha256": "1"}
    journal = Journal(path)
    journal.claim({"made_by": "ctxext eval passkey", "checkpoint": mine})
    journal.keep({"key": "k0", "reading": "unpatched", "trial": {"loss": 0.1 + 0.2}})
    Journal(path, process=1).keep({"key": "k1", "reading": "yarn x2", "trial": {"loss": 1.0}})
    (tmp_path / "keys.trials.old.jsonl").write_text('{"key": "k9", "trial": {}}\n')
    again = Journal(path)
    again.claim({"made_by": "ctxext eval passkey", "checkpoint": mine})
    trials = {key: line["trial"] for key, line in again.finished().items()}
    assert trials == {"k0": {"loss": 0.1 + 0.2}, "k1": {"loss": 1.0}}
    with pytest.raises(ResultsError, match=r"another checkpoint: tiny \(sha256 1\), and this is other \(sha256 2\)"):
        again.claim({"made_by": "ctxext eval passkey", "checkpoint": {"name": "other", "sha256": "2"}})
    with pytest.raises(ResultsError, match=r"no jobs of `ctxext eval ruler`.*found made_by='ctxext eval passkey'"):
        again.claim({"made_by": "ctxext eval ruler", "checkpoint": mine})

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ResultsError, match=r"The disk is full\. Finished jobs are kept \(2 of them\)"):
        again.keep({"key": "k2", "reading": "unpatched", "trial": {"loss": 2.0}})
    monkeypatch.undo()
    assert set(Journal(path).finished()) == {"k0", "k1"}


GOOD = {"key": "k0", "reading": "unpatched", "seconds": 1.0, "trial": {"found": [True]}}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (json.dumps(GOOD | {"key": ["k0"]}).encode(), r"holds \['k0'\] as 'key'"),
        (json.dumps(GOOD | {"file": 3}).encode(), "holds 3 as 'file'"),
        (json.dumps({"key": "k0", "seconds": 1.0}).encode(), "lacks the field 'trial'"),
        (json.dumps(GOOD | {"trial": {"length": 9}}).encode(), "lacks the field 'depth'"),
        (json.dumps(GOOD).encode(), "lacks the field 'passes'"),
    ],
)
def test_a_damaged_line_is_an_error_that_names_it(tmp_path: Path, line: bytes, says: str) -> None:
    path = tmp_path / "keys.trials.jsonl"
    journal = Journal(path)
    journal.claim({"made_by": "ctxext eval passkey"})
    path.write_bytes(path.read_bytes() + line + b"\n")
    place = rf"Line 2 of '.*keys\.trials\.jsonl' is damaged.*{says}.*Delete it and run the same command again"
    with pytest.raises(ResultsError, match=place):
        _used(Journal(path).finished()["k0"], says)


def _used(line: Any, says: str) -> None:
    """Read a line as a race does, or as passkeys do."""
    if "passes" in says:
        line["passes"]
    from_json(PasskeyTrial, line["trial"])


@pytest.mark.parametrize("torn", [1, 12, 13, 40, -1])
def test_a_kill_may_tear_the_line_that_claims_a_journal(tmp_path: Path, torn: int) -> None:
    path, identity = tmp_path / "out.trials.jsonl", {"made_by": "ctxext eval passkey"}
    Journal(path).claim(identity)
    whole = path.read_bytes()
    path.write_bytes(whole[:torn])
    journal = Journal(path)
    journal.claim(identity)
    journal.keep({"key": "k0", "trial": {"loss": 1.0}})
    assert path.read_bytes().startswith(whole)
    assert set(Journal(path).finished()) == {"k0"}


@pytest.mark.parametrize("content", ['{"loss": 1.0}', "notes", "\n", "[]"])
def test_a_file_that_is_no_journal_stays_what_it_is(tmp_path: Path, content: str) -> None:
    path = tmp_path / "out.trials.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ResultsError, match="holds no jobs of"):
        Journal(path).claim({"made_by": "ctxext eval passkey"})
    assert path.read_text(encoding="utf-8") == content


def test_a_damaged_identity_is_an_error_that_names_it(tmp_path: Path) -> None:
    identity, mine = tmp_path / "comparison.json", {"name": "tiny", "sha256": "1"}
    identity.write_bytes(b'{"made_by": "caf\xe9"}')
    journal = Journal(tmp_path / "cells.jsonl", identity=identity)
    with pytest.raises(ResultsError, match=r"holds no jobs of"):
        journal.claim({"made_by": "ctxext eval compare"})
    identity.write_text(json.dumps({"made_by": "ctxext eval compare", "format": 1, "checkpoint": "tiny"}))
    with pytest.raises(ResultsError, match="another checkpoint"):
        journal.claim({"made_by": "ctxext eval compare", "checkpoint": mine})


@pytest.mark.nightly
def test_ruler_is_that_of_the_evaluation(checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = json.loads((Path(checkpoint) / "config.json").read_text(encoding="utf-8"))
    config["max_position_embeddings"] = 1024
    (Path(checkpoint) / "config.json").write_text(json.dumps(config), encoding="utf-8")
    prose = tmp_path / "prose.txt"
    prose.write_text(" ".join(f"On day {day} it rained, and nobody came." for day in range(40)), encoding="utf-8")
    short = {"niah_single_1": 8, "niah_single_2": 8}
    for task, tokens in short.items():
        monkeypatch.setattr(TASKS[task], "tokens_to_generate", tokens)
    output = tmp_path / "ruler.json"
    given = ["ruler", checkpoint, "--dtype", "fp32", "-m", "pi", "-l", "1024", "-l", "1400", "--samples", "2"]
    given += ["--task", "niah_single_1", "--task", "niah_single_2", "-t", prose, "-o", output]
    command("eval", *given, "-o", tmp_path / "ruler.png", code=0)
    report = RulerReport.from_dict(json.loads(output.read_text(encoding="utf-8")))
    assert (report.essay, report.chat, report.left_out) == ("prose", False, {})
    model = LlamaForCausalLM.from_pretrained(checkpoint).eval()
    essay = next(read_documents([prose]))
    prompts = ruler.ruler_prompts(BYTES_AFTER_BOS, lengths=[1024, 1400], tasks=list(short), samples=2, essay=essay)

    def answers() -> tuple[RulerTrial, ...]:
        return tuple(ruler.ask(model, BYTES_AFTER_BOS, each.task, each.question()) for each in prompts)

    by_name = {reading.reading: reading for reading in report.readings}
    assert set(by_name) == {"unpatched", "truncated", "pi x1.36719"}
    assert by_name["unpatched"].trials == answers()
    last = by_name["truncated"].trials[-1]
    sample = ruler.draw(
        ruler.ruler_prompts(BYTES_AFTER_BOS, lengths=[1400], tasks=["niah_single_2"], essay=essay)[0].task,
        index=1,
        seed=42,
    )
    whole = BYTES_AFTER_BOS(sample.prompt).input_ids
    reply = ruler.reply_to(model, BYTES_AFTER_BOS, [whole[0], *whole[-(1024 - 8 - 1) :]], tokens=8)
    assert (last.reply, last.prompt_tokens) == (reply, 1024 - 8)
    assert by_name["truncated"].trials[:4] == by_name["unpatched"].trials[:4]
    ctxext.patch(model, "pi", target_length=1400)
    assert by_name["pi x1.36719"].trials == answers()
    # Another sample more asks for what is new only; a text that is another asks again only what is hidden in it.
    prose.write_text("It snowed. " * 60, encoding="utf-8")
    again = command("eval", *given)
    assert "20 jobs, 10 of them finished before" in again.output


@pytest.mark.slow
def test_the_words_follow_the_numbers(model: LlamaForCausalLM, tmp_path: Path) -> None:
    def keys(name: str, found: str, lengths: tuple[int, ...]) -> PasskeyResult:
        cells = [(length, depth) for length in lengths for depth in (0.0, 1.0)]
        trials = [PasskeyTrial(n, d, 9, 0, "12345", c == "y", 0.5) for (n, d), c in zip(cells, found, strict=True)]
        return PasskeyResult(tuple(trials), name, name)

    provenance = provenance_of(Checkpoint("tiny", model, BYTES_AFTER_BOS), seed=0)
    readings = (keys("unpatched", "yynn", (512, 1024)), keys("yarn", "nyyy", (512, 1024)), keys("pi", "yy", (512,)))
    report = PasskeyReport(readings=readings, trained_length=512, provenance=provenance)
    low, high = wilson_interval(1.0, 2)
    (sentence,) = passkey_sentences(report)
    assert sentence.startswith("Beyond the trained 512 tokens, found: unpatched 0 of 2 (0% to 66%); yarn 2 of 2")
    assert f"({low:.0%} to {high:.0%})." in sentence
    assert "pi" not in sentence
    inside = replace(report, readings=readings[2:])
    assert passkey_sentences(inside)[0].startswith("Within the trained 512 tokens, found: pi 2 of 2")
    console = Console(record=True, width=100)
    page = passkey_page(report)
    page.show(console)
    text = console.export_text()
    assert re.search(r"yarn +1/2 \(0\.50\) +2/2 \(0\.50\)", text)
    assert re.search(rf"pi +2/2 \(0\.50\) +{NONE}", text)
    drawn = matplotlib.figure.Figure(layout="constrained")
    page.figures[0].draw(drawn)
    assert drawn.axes[1].get_title("left").startswith("yarn: 75% found")
    assert "yarn: 75% found" in page.figures[0].alternative
    dashed = [line for line in drawn.axes[1].get_lines() if line.get_linestyle() == "--"]
    assert [line.get_xdata()[0] for line in dashed] == [0.5], "the trained window ends between 512 and 1024"

    def scored(name: str, scores: dict[int, float]) -> RulerResult:
        trials = [RulerTrial("vt", length, 0, 9, "x", ("a",), score) for length, score in scores.items()]
        return RulerResult(tuple(trials), name, name)

    told = ruler_sentences(
        RulerReport(
            readings=(scored("yarn", {512: 80.0, 1024: 70.0, 2048: 60.0}), scored("pi", {512: 0.0, 1024: 0.0})),
            chat=False,
            essay=None,
            trained_length=512,
            left_out={"cwe": "it needs words"},
            provenance=provenance,
        )
    )
    assert told[0] == "yarn: relative effective length 1K (70.0 there, 80.0 at 512)."
    assert told[1] == "pi: no relative effective length, since the shortest length scores 0."
    assert any("not RULER's effective length" in sentence for sentence in told)
    assert told[-1] == "Not measured: cwe: it needs words."
