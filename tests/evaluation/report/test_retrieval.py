"""Pages of questions and needles: the words follow the numbers."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import matplotlib.figure
import pytest
from rich.console import Console
from transformers import LlamaForCausalLM

from ctxext.evaluation.passkey import PasskeyReport, PasskeyResult, PasskeyTrial
from ctxext.evaluation.report.page import NONE
from ctxext.evaluation.report.retrieval import passkey_page, passkey_sentences, ruler_sentences
from ctxext.evaluation.ruler.run import RulerReport, RulerResult, RulerTrial
from ctxext.measuring.checkpoint import Checkpoint
from ctxext.measuring.provenance import provenance_of
from ctxext.measuring.statistics import wilson_interval
from tests._tokenizer import BYTES_AFTER_BOS


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


def test_a_score_is_off_by_as_much_as_its_interval_reaches(model: LlamaForCausalLM) -> None:
    """Of ten prompts, all replied to rightly, 72 of a hundred may be right: more than half of the interval."""
    trials = tuple(RulerTrial("vt", 512, index, 9, "x", ("a",), 100.0) for index in range(10))
    provenance = provenance_of(Checkpoint("tiny", model, BYTES_AFTER_BOS), seed=0)
    about = {"trained_length": 512, "provenance": provenance, "chat": False, "essay": None, "left_out": {}}
    told = ruler_sentences(RulerReport(readings=(RulerResult(trials, "yarn", "yarn"),), **about))
    low, _ = wilson_interval(1.0, 10)
    assert f"a score may be off by {100 - 100 * low:.0f} (95 percent)" in " ".join(told)
    assert f"{100 - 100 * low:.0f}" == "28"
