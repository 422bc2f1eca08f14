"""``ctxext.choose`` and its command on a tiny model: killed and resumed, its choice saved, what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib.figure
import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedModel, pipeline

import ctxext
from ctxext.choosing import choose, halving, losses
from ctxext.choosing.choose import ChoiceSettings, PlannedChoice
from ctxext.choosing.report import choice_page
from ctxext.choosing.verdict import Choice
from ctxext.errors import IncompatibleError, InvalidParameterError, PatchStateError, ResultsError
from ctxext.measuring import loss
from ctxext.measuring.checkpoint import Checkpoint
from ctxext.measuring.journal import Journal
from ctxext.measuring.loss import loss_by_position
from ctxext.measuring.readings import Readings
from ctxext.measuring.statistics import PairedDifference
from ctxext.methods.dynamic_ntk import DynamicNTK
from ctxext.methods.dynamic_pi import DynamicPI
from ctxext.methods.ntk import NTK
from ctxext.methods.pi import PI
from ctxext.methods.self_extend import SelfExtend
from ctxext.methods.yarn import YaRN
from ctxext.runtimes import RUNTIMES
from ctxext.texts.corpus import Corpus
from ctxext.texts.stretches import corpus_from, split_texts
from tests._checkpoints import rain, save_with_tokenizer
from tests._models import byte_model, tiny
from tests._programs import command, launched, ran
from tests._tokenizer import BYTES_AFTER_BOS

TARGET = 1024
FEW = [YaRN(factor=2), PI(factor=2), SelfExtend(factor=2), YaRN(factor=2, divisor=1.5, beta_fast=4, attention_factor=1)]
TEXTS = [rain(name) for name in ("One", "Two", "Three", "Four")]


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four candidates: a hundred on more text are the same, and longer."""
    monkeypatch.setattr(choose, "candidates", lambda *_: tuple(FEW))
    monkeypatch.setattr(halving, "ENOUGH", 1)  # and a single text for each look


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return byte_model()


@pytest.fixture(scope="module")
def choice(model: LlamaForCausalLM) -> Choice:
    """The choice among the four candidates; read it only."""
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(choose, "candidates", lambda *_: tuple(FEW))
        patching.setattr(halving, "ENOUGH", 1)
        before = loss_by_position(model, torch.arange(100)[None])
        made = chosen(model)
        assert torch.equal(loss_by_position(model, torch.arange(100)[None]), before)
    return made


def on_disk(model: PreTrainedModel, folder: Path) -> list[str | Path]:
    """The command's first words about a checkpoint and texts, which are written as files."""
    asked: list[str | Path] = ["choose", save_with_tokenizer(model, folder / "checkpoint")]
    for number, text in enumerate(TEXTS):
        path = folder / f"{number}.txt"
        path.write_text(text, encoding="utf-8")
        asked += ["-t", path]
    return asked


def told(choice: Choice) -> dict[str, Any]:
    """Everything but what a clock says."""
    found = choice.to_dict()
    del found["provenance"]["date"], found["spent"]["seconds"]
    found["sentences"] = [one for one in found["sentences"] if "of computing" not in one]
    return found


def chosen(model: Any, **given: Any) -> Choice:
    asked: dict[str, Any] = {"texts": TEXTS, "target_length": TARGET} | given
    return ctxext.choose(model, BYTES_AFTER_BOS, **asked)


@pytest.mark.nightly
def test_a_choice_says_what_was_measured(choice: Choice, model: LlamaForCausalLM) -> None:
    assert not ctxext.describe(model).method
    assert [one.method for one in choice.candidates] == FEW
    assert choice.usual == "yarn x2"
    held = choice.held_out
    assert (held.texts, len(choice.texts)) == (5, 2)
    assert not {name.partition(",")[0] for name in choice.texts} & set(held.names)
    # The verdict by hand, on the texts that the seed keeps for it.
    split = split_texts(corpus_from(TEXTS, BYTES_AFTER_BOS).documents, tokens=TARGET + 1, seed=0)
    read: dict[str, list[torch.Tensor]] = {}
    for name in (choice.finish.choice, choice.finish.runner_up):
        ctxext.patch(model, choice.candidate(name).method)
        read[name] = [loss_by_position(model, one.text.input_ids)[0, 512:].double() for one in split.held_out[:5]]
        ctxext.unpatch(model)
    gap = torch.cat(read[choice.finish.choice]) - torch.cat(read[choice.finish.runner_up])
    assert held.versus_runner_up is not None
    assert held.versus_runner_up.mean == pytest.approx(gap.mean().item(), rel=1e-9)
    finalist = choice.finish.course(choice.finish.choice)
    assert len(finalist.keys) == 3
    assert choice.sentence.startswith("Chosen for 1K tokens: ")
    assert choice.spent.passes > 5
    rows = choice.rows()
    assert len(rows) == len(FEW)
    assert len({tuple(row) for row in rows}) == 1
    json.dumps(choice.to_dict())
    # Had the rounds chosen another, texts that show it to be worse, all of it or at the end, would say so.
    good, bad = (PairedDifference(mean, 0.001, 160, 5, "documents") for mean in (-0.1, 0.1))
    other = replace(choice.finish, choice=choice.finish.runner_up)
    for beyond, end, where in ((bad, good, "on"), (good, bad, "at the end of"), (good, good, "")):
        read = replace(held, versus_usual=beyond, end_versus_usual=end)
        judged = replace(choice, finish=other, held_out=read)
        assert judged.name == (choice.usual if where else choice.finish.runner_up)
        assert (f"which {where} 5 stretches of" in judged.sentence) == bool(where)
    ctxext.patch(model, choice.method)
    assert ctxext.describe(model).target_length == TARGET
    with pytest.raises(PatchStateError, match="extended already"):
        chosen(model)
    ctxext.unpatch(model)


def test_every_text_is_truncated_behind_its_own_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversations, whose template writes no BOS token, and texts are judged on together."""
    seen, whole = [], losses.tail_windows

    def watched(window: int, **span: Any) -> Any:
        seen.append(span["prefix"])
        return whole(window, **span)

    monkeypatch.setattr(losses, "tail_windows", watched)
    texts = enumerate(corpus_from(TEXTS, BYTES_AFTER_BOS).documents)
    mixed = [replace(one, input_ids=one.input_ids[:, n % 2 :], prefix=1 - n % 2) for n, one in texts]
    loaded = Checkpoint("tiny", tiny("llama", vocab_size=257), BYTES_AFTER_BOS)
    settings = ChoiceSettings(target_length=96, keys=False, trained_length=64)
    planned = PlannedChoice(loaded, Corpus(tuple(mixed), "mixed", len(mixed)), settings)
    held = planned.run().held_out
    prefixes = [one.text.prefix for one in planned.split.held_out[: held.texts]]
    assert len(set(prefixes)) == 2
    assert seen == prefixes * len(planned.readings.windows)


@pytest.mark.nightly
def test_killed_anywhere_the_same_call_goes_on_to_the_same_choice(
    model: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose, "candidates", lambda *_: (FEW[0], FEW[3]))
    given: dict[str, Any] = {"keys": False, "budget": "40 passes"}
    whole = chosen(model, folder=tmp_path / "whole", **given)
    cells = (tmp_path / "whole" / "cells.jsonl").read_text().splitlines()
    real, kept = Journal.append, 0
    for last in (3, 5):
        kept = 0

        def dying(self: Journal, line: Any, last: int = last) -> None:
            nonlocal kept
            kept += 1
            if kept == last:
                raise KeyboardInterrupt
            real(self, line)

        monkeypatch.setattr(Journal, "append", dying)
        with pytest.raises(KeyboardInterrupt):
            chosen(model, folder=tmp_path / "killed", **given)
        assert not ctxext.describe(model).method
    monkeypatch.setattr(Journal, "append", real)
    again = chosen(model, folder=tmp_path / "killed", **given)
    assert told(again) == told(whole), "the same seed makes the same choice"
    assert again.spent.passes == pytest.approx(whole.spent.passes)
    assert len((tmp_path / "killed" / "cells.jsonl").read_text().splitlines()) == len(cells)
    with pytest.raises(ResultsError, match="another corpus"):
        chosen(model, folder=tmp_path / "whole", **given | {"texts": TEXTS[:3]})


@pytest.mark.nightly  # a whole command with a hundred candidates, twice
def test_two_processes_choose_what_one_does(tmp_path: Path) -> None:
    asked = on_disk(byte_model(), tmp_path)
    asked = [*asked, "--target", TARGET, "--dtype", "fp32", "--stock", "--budget", "60 passes"]
    words = [str(word) for word in asked]
    said = launched([*words, "-o", str(tmp_path / "two.json")], tmp_path)
    assert said.count("Chosen for 1K tokens") == 1, "one process talks"
    ran(["-m", "ctxext", *words, "-o", str(tmp_path / "one.json")], tmp_path, code=0)
    one, two = (json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8")) for name in ("one", "two"))
    for found in (one, two):
        del found["sentences"], found["spent"]["seconds"], found["provenance"]
    assert one == two
    shares = [path.read_text(encoding="utf-8").count("\n") for path in (tmp_path / "two.rounds").glob("cells*.jsonl")]
    assert len(shares) == 2
    assert min(shares) >= sum(shares) // 4


@pytest.mark.nightly
def test_a_budget_in_time_is_turned_into_passes(
    model: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose, "candidates", lambda *_: (FEW[0], FEW[3]))
    found = chosen(model, keys=False, budget="2h")
    assert found.spent.allowed is not None
    assert found.spent.allowed > 100
    assert any("of computing, of the budget of 2h" in one for one in found.to_dict()["sentences"])
    with pytest.raises(InvalidParameterError, match=r"at least, some \d+ (s|min) here\. Allow more"):
        chosen(model, keys=False, budget="0.00001s", folder=tmp_path / "hopeless")
    lines = (tmp_path / "hopeless" / "cells.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 2, "a budget that a short reading of each exceeds is refused after these"


@pytest.mark.nightly
def test_only_what_stock_transformers_loads(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "candidates", lambda *_: (*FEW, NTK(factor=2, clip=1000)))
    found = chosen(model, keys=False, stock=True, budget="12 passes")
    [refusal] = found.refusals
    assert "clip must be at most" in refusal.reason, "what does not fit the model is refused with its reason"
    assert [one.method for one in found.candidates] == [one for one in FEW if not isinstance(one, SelfExtend)]
    assert found.rope_parameters is not None
    assert {one.name: one.exact for one in found.runtimes} == dict.fromkeys(("transformers", *RUNTIMES), True)


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"target_length": 512}, InvalidParameterError, "needs no extension: the checkpoint was trained for 512"),
        ({"target_length": 100}, InvalidParameterError, "static scaling .yarn, pi. costs them quality.*self_extend"),
        ({"target_length": 9000}, InvalidParameterError, "No text is as long as the target: 4 texts, the longest of"),
        ({"texts": [TEXTS[0][:1500]]}, InvalidParameterError, "too little for a verdict"),
        ({"texts": TEXTS[0]}, InvalidParameterError, "texts must be a list"),
        ({"texts": []}, InvalidParameterError, "texts must be a list"),
        ({"budget": "1 pass"}, InvalidParameterError, "budget is too small: it comes to 1.0 passes"),
        ({"budget": "soon"}, InvalidParameterError, "written like 30min"),
    ],
)
def test_what_cannot_be_right_is_said_before_the_first_pass(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], error: type[Exception], says: str
) -> None:
    def read(*_: Any, **__: Any) -> None:
        raise AssertionError("a text was read")

    monkeypatch.setattr(loss, "loss_by_position", read)
    monkeypatch.setattr(losses, "loss_while", read)
    with pytest.raises(error, match=says):
        chosen(model, **given)


@pytest.mark.usefixtures("_any_types")
@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"texts": [*TEXTS, {"text": TEXTS[0]}]}, r"^texts holds \{'text': .*a data set as its column of texts"),
        ({"texts": {"one": TEXTS[0], "two": TEXTS[1]}}, r"^texts holds \{'one': "),
        ({"texts": None}, "^texts holds None, which is not a text"),
        ({"texts": [*TEXTS, __file__]}, r"^texts holds .* the name of a file and not its text"),
        ({"tokenizer": "smol"}, r"found 'smol'\. Load it: AutoTokenizer\.from_pretrained\('smol'\)"),
        ({"seed": "0"}, "^seed must be a whole number, found '0'"),
    ],
)
def test_what_holds_no_text_no_tokenizer_and_no_seed_is_refused(
    model: LlamaForCausalLM, given: dict[str, Any], says: str
) -> None:
    asked: dict[str, Any] = {"tokenizer": BYTES_AFTER_BOS, "texts": TEXTS, "target_length": TARGET} | given
    with pytest.raises(InvalidParameterError, match=says):
        ctxext.choose(model, **asked)


@pytest.mark.nightly
@pytest.mark.usefixtures("_any_types")
def test_a_pipeline_a_processor_an_array_of_texts_and_a_seed_of_numpy(choice: Choice, model: LlamaForCausalLM) -> None:
    holder = pipeline("text-generation", model=model, tokenizer=BYTES_AFTER_BOS)
    processor = SimpleNamespace(tokenizer=BYTES_AFTER_BOS)
    texts = np.array(TEXTS)
    found = ctxext.choose(holder, processor, texts=texts, target_length=np.int64(TARGET), seed=np.int64(0))
    assert json.dumps(told(found)) == json.dumps(told(choice))


def test_dropout_is_refused_before_a_candidate_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(*_: Any, **__: Any) -> None:
        raise AssertionError("candidates were tried")

    monkeypatch.setattr(Readings, "find", find)
    with pytest.raises(IncompatibleError, match=r"is in training mode.* Call model\.eval\(\) first"):
        chosen(byte_model().train())


def test_other_positions_than_rotary_ones_are_refused() -> None:
    with pytest.raises(IncompatibleError, match="a bloom without rotary positions"):
        chosen(tiny("bloom"))


def test_a_scaling_that_a_checkpoint_was_trained_with_has_no_original() -> None:
    """As Llama 3.1's: there is nothing to take off, but other commands go on from it."""
    scaled = tiny(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0})
    with pytest.raises(PatchStateError, match=r"extended already \(.*linear.*`ctxext eval compare`\.$"):
        chosen(scaled)


def test_auto_is_no_method_and_the_error_says_how_to_measure(model: LlamaForCausalLM) -> None:
    with pytest.raises(InvalidParameterError, match=r"ctxext choose CHECKPOINT -t mine\.txt --target"):
        ctxext.patch(model, "auto", factor=2)
    assert not ctxext.describe(model).method


@pytest.mark.nightly
@pytest.mark.parametrize("count", [2, 3, 4])
def test_the_legend_of_the_figure_leaves_its_caption_readable(
    choice: Choice, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """However many candidates got so far that they have a name in it."""
    finish = replace(choice.finish, finalists=choice.finish.finalists[: count - 1])
    shown = replace(choice, finish=finish, candidates=choice.candidates[:count])
    canvases: list[Any] = []
    (figure,) = choice_page(shown).figures
    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", lambda canvas, *_, **__: canvases.append(canvas))
    figure.save(BytesIO())
    (canvas,) = canvases
    canvas.draw_without_rendering()
    (caption,) = (text for text in canvas.texts if text.get_text().startswith("Left: "))
    legends = [*canvas.legends, *filter(None, (axes.get_legend() for axes in canvas.axes))]
    assert legends
    assert not any(legend.get_window_extent().overlaps(caption.get_window_extent()) for legend in legends)


@pytest.mark.slow
def test_dynamic_candidates_spend_no_more_than_is_planned(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of them the verdict reads the window alone too, which is nearly the whole of a target just beyond it."""
    monkeypatch.setattr(choose, "candidates", lambda *_: (FEW[0], DynamicNTK(factor=2), DynamicPI(factor=2)))
    corpus = corpus_from([rain(name, 80) for name in "abcdef"], BYTES_AFTER_BOS)
    settings = ChoiceSettings(target_length=600, keys=False)
    planned = PlannedChoice(Checkpoint("tiny", model, BYTES_AFTER_BOS), corpus, settings)
    made = planned.run()
    assert all(made.candidate(name).method.dynamic for name in (made.finish.choice, made.finish.runner_up))
    assert made.spent.passes <= planned.passes


@pytest.mark.slow
def test_of_a_number_of_documents_each_is_long_enough(model: LlamaForCausalLM, tmp_path: Path) -> None:
    """As in every command. Shorter ones would be counted, and nothing could be chosen on them."""
    (tmp_path / "short.txt").write_text("Too short.")
    verb, checkpoint, *texts = on_disk(model, tmp_path)
    asked = (verb, checkpoint, "-t", tmp_path / "short.txt", *texts, "--target", TARGET, "-n")
    assert "4 of 5 documents have the 1,025 tokens asked for, and 5" in command(*asked, 5, code=1).stderr
    assert "too small: it comes to 4.0 passes" in command(*asked, 2, "--budget", "4 passes", code=1).stderr


@pytest.mark.slow
def test_the_command_writes_everything_and_saves_what_stock_transformers_loads(
    model: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose, "candidates", lambda *_: (YaRN(factor=2), FEW[3]))
    about = on_disk(model, tmp_path)
    outputs = [tmp_path / f"choice.{ending}" for ending in ("json", "md", "png")]
    asked = [*about, "--target", TARGET, "--dtype", "fp32", "--no-passkey", "--budget", "30 passes"]
    asked += [word for path in outputs for word in ("-o", path)]
    done = command(*asked, "--save", tmp_path / "extended", code=0)
    assert "Chosen for 1K tokens: YaRN" in done.output
    found = json.loads(outputs[0].read_text(encoding="utf-8"))
    saved = json.loads((tmp_path / "extended" / "config.json").read_text(encoding="utf-8"))
    assert saved["ctxext"]["method"] == found["method"] == YaRN.from_dict(found["method"]).to_dict()
    assert saved["ctxext"]["chosen"] == found["record"]
    assert found["sentences"][0] in (tmp_path / "extended" / "README.md").read_text(encoding="utf-8")
    assert saved["ctxext"]["chosen"]["texts_sha256"] == found["provenance"]["corpus_sha256"]
    assert saved["rope_parameters"] == found["rope_parameters"]
    again = ctxext.load(tmp_path / "extended")
    assert again.config.ctxext["chosen"] == found["record"]
    page = outputs[1].read_text(encoding="utf-8")
    assert found["sentences"][0] in page
    assert "![The rounds](choice.png)" in page
    assert outputs[2].read_bytes().startswith(b"\x89PNG")
    # The same command again reads what is there, and never writes over a checkpoint.
    refused = command(*asked, "--save", tmp_path / "extended", code=1)
    assert "already exists" in refused.output
    before = (tmp_path / "choice.rounds" / "cells.jsonl").read_bytes()
    assert command(*asked).exit_code == 0
    assert (tmp_path / "choice.rounds" / "cells.jsonl").read_bytes() == before
    wrong = command(*about, "--target", TARGET, "-o", tmp_path / "choice.docx", code=1)
    assert "docx" in wrong.output
