"""``ctxext eval ruler`` writes what the evaluation finds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM

import ctxext
from ctxext.evaluation.ruler import run as ruler
from ctxext.evaluation.ruler.run import RulerReport, RulerTrial
from ctxext.evaluation.ruler.tasks import TASKS
from ctxext.texts.documents import read_documents
from tests._programs import command
from tests._tokenizer import BYTES_AFTER_BOS


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
    (asked, *_) = ruler.ruler_prompts(BYTES_AFTER_BOS, lengths=[1400], tasks=["niah_single_2"], essay=essay)
    sample = ruler.draw(asked.task, index=1, seed=42)
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
