"""A comparison against the evaluations called by hand, its judgement, what it refuses, and what it keeps on disk."""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib.figure
import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

import ctxext
from ctxext.core.subject import Subject
from ctxext.errors import CtxextError, InvalidParameterError, ResultsError
from ctxext.evaluation import passkey
from ctxext.evaluation.comparison import Comparison, ComparisonResult, prepare
from ctxext.evaluation.report.comparison import comparison_page, headline, sentences, verdict_line
from ctxext.measuring.checkpoint import Checkpoint
from ctxext.measuring.journal import Journal
from ctxext.measuring.loss import loss_by_position, truncated_loss
from ctxext.measuring.loss_table import LossTable
from ctxext.measuring.readings import TIMES, Readings, chosen_methods
from ctxext.measuring.statistics import document_difference
from ctxext.measuring.survey import LossJob, PromptJob, my_share
from ctxext.methods.alibi import ALiBi
from ctxext.methods.pi import PI
from ctxext.methods.yarn import YaRN
from ctxext.texts.corpus import corpus_of
from ctxext.texts.documents import Document
from tests._checkpoints import rain
from tests._models import tiny
from tests._tokenizer import BYTES, BYTES_AFTER_BOS

TRAINED, TARGET, END = 512, 1024, 128
WINDOWS = (128, 256, 384, 512)
Planned = Callable[..., Comparison]
TRUNCATIONS = [f"truncated {window}" for window in WINDOWS] + ["truncated"]
DOCUMENTS = [Document(name, rain(name)) for name in ("One", "Two")]


def plan(model: Any, output: Path | None = None, *, documents: list[Document] = DOCUMENTS, **given: Any) -> Comparison:
    return prepare(
        Checkpoint("tiny", model, BYTES_AFTER_BOS),
        lambda tokens: corpus_of(documents, BYTES_AFTER_BOS, tokens=tokens, whole=True),
        output,
        **{"depths": (), **given},
    )


def measured(comparison: Comparison) -> ComparisonResult:
    comparison.measure(comparison.begin())
    return comparison.result()


@pytest.fixture
def planned(model: LlamaForCausalLM) -> Planned:
    return partial(plan, model)


OF_CONFIG = {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0}}
SAVED: list[tuple[str, dict[str, Any]]] = [("dynamic_ntk", {}), ("", OF_CONFIG)]


@pytest.mark.nightly
@pytest.mark.parametrize(("method", "rope"), SAVED, ids=["saved", "by its config"])
def test_a_checkpoint_that_follows_the_length_is_read_at_each(method: str, rope: dict[str, Any]) -> None:
    length = {"max_position_embeddings": 64, "vocab_size": len(BYTES_AFTER_BOS)}
    own, plain = tiny("llama", **length, **rope), tiny("llama", **length)
    if method:
        ctxext.patch(own, method, factor=4)
    given = {"methods": ["pi"], "factors": (4.0,)}
    before = measured(plan(plain, **given))
    for _ in range(2):  # transformers' frequencies of the longest text so far are those of that text alone
        found = measured(plan(own, **given))
        assert found.row("unpatched").reading.dynamic
        for row in found.rows:
            expected = before.row(row.reading.name if row.reading.is_reference else "pi x4")
            assert row.inside.loss == pytest.approx(expected.inside.loss, abs=1e-5)
        (best,) = [item for item in found.panels[0].series if item.name == "truncated"]
        assert best.buckets[0].loss == pytest.approx(found.row("truncated").inside.loss, abs=1e-6)


@pytest.mark.parametrize("trained", [None, 390])
def test_a_table_of_positions_is_read_no_further_than_it_has_rows(trained: int | None) -> None:
    model = tiny("gpt2", vocab_size=len(BYTES_AFTER_BOS), n_positions=400)
    found = measured(plan(model, methods=["pi"], depths=(0.0,), trained_length=trained))
    length = trained or 400
    assert found.lengths == (length, 2 * length)
    lengths = {row.reading.name: [score.length for score in row.scores] for row in found.rows}
    assert lengths["unpatched"] == [length]
    assert lengths["truncated"] == lengths["pi x2"] == [*found.lengths]
    assert "unpatched" not in [item.name for item in found.panels[0].series]
    page = comparison_page(found)
    for figure in page.figures:
        figure.draw(matplotlib.figure.Figure(layout="constrained"))
    text = page.markdown()
    assert "Unpatched, the perplexity goes" not in text
    assert re.search(r"Of 1 passkey that truncation cuts off, .* finds? \w+\.", text), "of those who were asked"


def test_the_page_of_an_extended_checkpoint_compares_with_it_as_saved() -> None:
    model = tiny("llama", max_position_embeddings=64, vocab_size=len(BYTES_AFTER_BOS))
    plain = measured(plan(model, methods=["ntk"]))
    saved = measured(plan(ctxext.patch(model, "pi", factor=2), methods=["ntk"]))
    for found, read in ((plain, "unpatched"), (saved, "as saved")):
        text = comparison_page(found).markdown()
        assert f"| inside 64 | vs {read} |" in text
        assert f"The model, {read}, sees only the last" in text
        best = replace(found, verdicts=(replace(found.verdicts[0], best="ntk x2"),))
        (cost,) = [line for line in sentences(best) if "inside the trained window" in line]
        assert ("against the model as saved" in cost) == (read == "as saved")
        assert "as saved (pi" not in cost, "it changes nothing of itself"


def test_losses_that_no_perplexity_can_hold_make_a_report() -> None:
    model = tiny("llama", max_position_embeddings=64, vocab_size=len(BYTES_AFTER_BOS))
    with torch.no_grad():
        model.lm_head.weight.mul_(3000)
    found = measured(plan(model, methods=["pi"]))
    page = comparison_page(found)
    for figure in page.figures:
        figure.draw(matplotlib.figure.Figure(layout="constrained"))
    assert "| inf |" in page.markdown()
    assert not re.search(r"\bnan\b", page.markdown())
    json.dumps(found.to_dict(), allow_nan=False)


@pytest.mark.parametrize("documents", [1, 2])
def test_too_little_beyond_the_window_is_refused_before_anything_is_read(documents: int) -> None:
    model = tiny("llama", max_position_embeddings=64, vocab_size=len(BYTES_AFTER_BOS))
    given = {"methods": ["pi"], "documents": DOCUMENTS[:documents]}
    for length in (65, 68, 71):
        with pytest.raises(InvalidParameterError, match=r"reads beyond the trained 64 .* of 72 or more"):
            plan(model, lengths=[length], **given)
    assert comparison_page(measured(plan(model, lengths=[72], **given))).markdown()
    few = measured(plan(model, lengths=[30], trained_length=6, factors=(6.0,), **given))  # a quarter is one token
    assert few.verdicts[0].versus_truncation.tokens == 2 * documents


@pytest.mark.nightly
def test_figures_do_not_depend_on_the_order_of_methods() -> None:
    small = tiny("llama", max_position_embeddings=64, vocab_size=len(BYTES_AFTER_BOS))
    given = {"factors": (2.0, 4.0)}
    for order in itertools.permutations(["rerope", "yarn"]):
        panels = measured(plan(small, methods=order, **given)).panels
        assert [panel.length for panel in panels] == [128, 256]
        assert [f"yarn x{panel.factor:g}" in [item.name for item in panel.drawn] for panel in panels] == [True, True]


def test_the_page_names_the_windows_that_were_asked_for() -> None:
    model = tiny("llama", max_position_embeddings=64, vocab_size=len(BYTES_AFTER_BOS))
    text = comparison_page(measured(plan(model, methods=["pi"], windows=(10, 20)))).markdown()
    assert text.count("the last 10 or 20 tokens") == 2


@pytest.mark.parametrize(("depth", "hidden"), [(0.3, True), (0.9, False)])
def test_a_key_is_hidden_where_truncation_does_not_show_it(planned: Planned, depth: float, hidden: bool) -> None:
    found = planned(methods=["pi"], depths=(depth,), trials=2)
    prompts = [prompt for prompt in found.prompts if prompt.length == TARGET]
    places = [prompt.passkey.key_position - prompt.dropped(TRAINED) - prompt.prefix for prompt in prompts]
    assert [place < 0 for place in places] == [hidden] * 2
    found.measure(found.begin())
    scores = [score for score in found.result().row("pi x2").passkeys if score.length == TARGET]
    assert [score.hidden for score in scores] == [2 * hidden]


def test_keys_at_the_border_of_truncation_are_counted_one_by_one(
    planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of four seeds hides the key where truncation cuts it off; the model finds that one and another."""
    found = planned(methods=["pi"], depths=(0.477,), trials=4)
    prompts = [prompt for prompt in found.prompts if prompt.length == TARGET]
    hidden = [prompt.passkey.key_position < prompt.dropped(TRAINED) + prompt.prefix for prompt in prompts]
    assert hidden == [False, True, False, False]
    known = {prompt.passkey.key for prompt in prompts[1:3]}

    def answer(model: Any, asked: passkey.Passkey, *, seed: int) -> passkey.PasskeyTrial:
        return passkey.PasskeyTrial(asked.length, asked.depth, 0, seed, asked.key, asked.key in known, 1.0)

    monkeypatch.setattr(passkey, "measure", answer)
    result = measured(found)
    score = result.row("pi x2").passkeys[-1]
    assert (score.found, score.trials, score.hidden, score.hidden_found) == (2, 4, 1, 1)
    assert f"Of 1 passkey that truncation cuts off, PI {TIMES}2 finds 1 (unpatched 1)." in sentences(result)


@pytest.mark.nightly
def test_every_number_is_that_of_the_evaluations(planned: Planned, model: LlamaForCausalLM, tmp_path: Path) -> None:
    found = measured(planned(tmp_path, methods=["yarn ramp=turns", "dynamic_ntk"], depths=(0.0, 0.9)))
    names = [row.reading.name for row in found.rows]
    assert names == ["unpatched", *TRUNCATIONS, "yarn x2 ramp=turns", "dynamic_ntk x2"]
    assert (found.trained_length, found.lengths, found.unit) == (TRAINED, (TRAINED, TARGET), "blocks of tokens")
    tokens = [corpus_of([one], BYTES_AFTER_BOS, tokens=TARGET + 1).documents[0].input_ids for one in DOCUMENTS]
    plain = torch.cat([loss_by_position(model, ids) for ids in tokens])
    cut = {
        window: torch.cat(
            [truncated_loss(model, ids, window=window, stride=window // 4, prefix=1)[:, TRAINED:] for ids in tokens]
        )
        for window in WINDOWS
    }
    window = min(cut, key=lambda window: cut[window][:, -END:].double().mean())
    truncated = torch.cat([plain[:, :TRAINED], cut[window]], dim=1)
    assert not ctxext.describe(model).method
    yarn = _row_by_hand(ctxext.patch(model, YaRN(factor=2, ramp="turns")), tokens)
    prompt = passkey.build(BYTES_AFTER_BOS, length=TARGET - 8, depth=0.0, seed=0)
    key = passkey.measure(model, prompt)
    ctxext.unpatch(model)
    row = found.row("yarn x2 ramp=turns")
    last = row.at(TARGET)
    gap = (yarn - truncated)[:, -END:].double()
    blocks = torch.cat([gap[:, i : i + 32].mean(dim=1) for i in range(0, END, 32)])
    assert last.end.loss == pytest.approx(yarn[:, -END:].double().mean().item(), rel=1e-12)
    assert (last.end.start, last.end.stop, last.end.tokens) == (TARGET - END, TARGET, 2 * END)
    assert last.whole.loss == pytest.approx(yarn.double().mean().item(), rel=1e-12)
    assert last.versus_truncation.mean == pytest.approx(gap.mean().item(), rel=1e-9)
    error = (blocks.var() / len(blocks)).sqrt().item()
    assert last.versus_truncation.standard_error == pytest.approx(error, rel=1e-9)
    assert last.by_document == pytest.approx(gap.mean(dim=1).tolist())
    assert (last.versus_truncation.baselines, found.verdicts[0].window) == (4, window)
    # Every window is there, and the best is that of the tokens compared: of the end and of the whole.
    for size in WINDOWS:
        score = found.row(f"truncated {size}").at(TARGET)
        assert (score.end.loss, score.window) == (pytest.approx(cut[size][:, -END:].double().mean().item()), size)
        joined = torch.cat([plain[:, :TRAINED], cut[size]], dim=1)
        assert score.whole.loss == pytest.approx(joined.double().mean().item())
    best = found.row("truncated").at(TARGET)
    assert (best.end, best.window) == (found.row(f"truncated {window}").scores[-1].end, window)
    whole = min(cut, key=lambda size: cut[size].double().mean())
    assert (best.whole, best.window_of_whole) == (found.row(f"truncated {whole}").scores[-1].whole, whole)
    assert (best.versus_truncation.mean, found.row("truncated").inside) == (0.0, found.row("unpatched").inside)
    panel = {item.name: item for item in found.panels[0].series}
    assert list(panel) == ["unpatched", *TRUNCATIONS, "yarn x2 ramp=turns", "dynamic_ntk x2"]
    for place, stretch in enumerate((slice(0, 128), slice(128, 256), slice(256, 384), slice(384, 512))):
        losses = {size: own[:, stretch].double().mean().item() for size, own in cut.items()}
        assert panel["truncated"].windows[place] == min(losses, key=losses.__getitem__)
        assert panel["truncated"].buckets[place + 1].loss == pytest.approx(min(losses.values()))
    assert row.inside.loss == pytest.approx(yarn[:, :TRAINED].double().mean().item(), rel=1e-12)
    assert row.short_context.mean == pytest.approx((yarn - plain)[:, :TRAINED].double().mean().item(), rel=1e-9)
    assert (row.passkeys[2].loss, row.passkeys[2].hidden) == (pytest.approx(key.loss), 1)
    assert [(score.length, score.depth) for score in row.passkeys] == [(n, d) for n in (512, 1024) for d in (0.0, 0.9)]
    # A dynamic method is measured at each length by itself: inside the window it changes nothing.
    dynamic = found.row("dynamic_ntk x2")
    assert (dynamic.short_context.mean, dynamic.inside) == (0.0, found.row("unpatched").inside)
    beyond = _row_by_hand(ctxext.patch(model, "dynamic_ntk", factor=2), tokens)
    ctxext.unpatch(model)
    assert dynamic.scores[-1].end.loss == pytest.approx(beyond[:, -END:].double().mean().item(), rel=1e-12)
    # What truncation sees is the end of the prompt; inside the window it sees all of it.
    shown = replace(prompt, prompt=torch.cat([prompt.prompt[:1], prompt.prompt[-(TRAINED - 8 - 1) :]]))
    longest = found.row(f"truncated {TRAINED}")
    assert longest.passkeys[2].loss == pytest.approx(passkey.measure(model, shown).loss)
    assert longest.passkeys[:2] == found.row("unpatched").passkeys[:2]
    assert [bool(row.passkeys) for row in found.rows] == [True, False, False, False, True, False, True, True]


def _row_by_hand(model: Any, tokens: list[Tensor]) -> Tensor:
    with torch.no_grad():
        logits = [model(ids[:, :-1], use_cache=False).logits for ids in tokens]
    pairs = zip(logits, tokens, strict=True)
    return torch.cat([-one.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0] for one, ids in pairs])


@pytest.mark.slow
def test_chosen_chunks_are_a_baseline_too(planned: Planned, tmp_path: Path) -> None:
    found = measured(planned(tmp_path, methods=["yarn"], depths=(0.5,), select=True))
    names = [row.reading.name for row in found.rows]
    assert names == ["unpatched", *TRUNCATIONS[:-1], "selected", "truncated", "yarn x2"]
    ends = {name: found.row(name).scores[-1] for name in names}
    least = min((*TRUNCATIONS[:-1], "selected"), key=lambda name: ends[name].end.loss)
    best, verdict = ends["truncated"], found.verdicts[0]
    assert (best.end, best.selected, verdict.selected) == (ends[least].end, least == "selected", least == "selected")
    assert verdict.versus_truncation.baselines == 5
    assert found.row("selected").passkeys == ()
    assert ends["selected"].whole.loss != ends["unpatched"].whole.loss
    assert "selected" not in [item.name for item in found.panels[0].drawn]
    chosen = replace(found, verdicts=(replace(verdict, beats="no", selected=True, window=512),))
    assert "chunks chosen within 512 tokens, the best of truncations and selection" in headline(chosen)
    assert "beats the best truncation (selected chunks within" in verdict_line(chosen, chosen.verdicts[0])
    captions = [getattr(part, "caption", "") for part in comparison_page(chosen).parts]
    assert any("tokens, or of selected chunks, predicts those best" in caption for caption in captions)


@pytest.mark.nightly
def test_the_verdict_follows_the_losses(planned: Planned, tmp_path: Path) -> None:
    """The same words for every outcome would be a brochure."""
    noise = torch.randn(3, 2, 1024, generator=torch.Generator().manual_seed(0)) * 0.1
    base = 3 + noise[0]
    near, far = base + 0.001 + 0.5 * noise[1], base + 0.5 + 0.5 * noise[2]  # standard errors of about 0.001

    def told(**losses: Tensor) -> Any:
        cut = {"truncated 256": base + 0.2, "truncated 384": base, "truncated 512": base + 0.1}
        table = {name: [*rows] for name, rows in (cut | losses).items()}
        return LossTable.of(table).judge(list(losses), TARGET)

    worse = told(near=near + 0.1, far=far)
    assert (worse.best, worse.beats, worse.as_good, worse.candidates) == ("near", "no", (), 2)
    assert (worse.window, worse.versus_truncation.baselines) == (384, 3), "the best of the truncations"
    assert told(near=near - 0.1, far=far).beats == "yes"
    tied = told(near=near, twin=near + 0.5 * noise[2], far=far)
    assert (tied.beats, {tied.best, *tied.as_good}) == ("undecided", {"near", "twin"})
    # What one candidate alone shows, the best of hundreds may owe to luck.
    slight = base - 0.003 + 0.5 * noise[1]
    many = {f"other{n}": far for n in range(300)}
    assert (told(slight=slight).beats, told(slight=slight, **many).beats) == ("yes", "undecided")
    # Luck cannot make the best of many look worse than truncation; but which truncation is the best may be luck.
    assert told(slight=base + 0.006 + 0.5 * noise[1], **many).beats == "no"
    lost = base + 0.5 * noise[1]
    gap = document_difference([*lost], [*base])
    lost += 2.7 * gap.standard_error - gap.mean
    assert told(slight=lost).beats == "undecided"
    assert LossTable.of({"truncated 512": [*base], "slight": [*lost]}).judge(["slight"], TARGET).beats == "no"
    result = measured(planned(tmp_path, methods=["yarn"]))
    versus = told(near=near - 0.1).versus_truncation
    words = {
        beats: headline(replace(result, verdicts=(replace(result.verdicts[0], beats=beats, versus_truncation=versus),)))
        for beats in ("yes", "no", "undecided")
    }
    window = result.verdicts[0].window
    truncation = f"than the best truncation, seeing only the last {window} tokens"
    assert f"on these texts: it predicts better {truncation}, by {-versus.mean:.3f} ±" in words["yes"]
    assert f"It predicts worse on these texts {truncation}" in words["no"]
    assert f"was found on these texts: {versus} nats" in words["undecided"]
    line = verdict_line(result, replace(result.verdicts[0], beats="no", versus_truncation=versus))
    told_best = f"beats the best truncation (the last {window}): no on these texts, by {versus} nats"
    assert line.startswith(f"1K: best zero-shot: YaRN {TIMES}2; {told_best}")
    alone = replace(result, provenance=dict(result.provenance) | {"documents": ["One"]})
    assert "no on this text, by" in verdict_line(alone, replace(result.verdicts[0], beats="no"))
    many_texts = replace(result.verdicts[0], beats="no", versus_truncation=replace(versus, over="documents"))
    assert "no, if effects are not strongly skewed, by" in verdict_line(result, many_texts)
    inside = "inside the trained window"
    assert any(inside in sentence for sentence in sentences(result))


@pytest.mark.slow
def test_methods_that_are_tried(planned: Planned, model: LlamaForCausalLM, tmp_path: Path) -> None:
    subject = Subject.of(model)
    names = [(method.name, method.factor) for method in chosen_methods(subject, [], [4.0, 2.0])]
    assert {("yarn", 2.0), ("yarn", 4.0), ("dynamic_yarn", 4.0)} <= set(names)
    assert ("dynamic_yarn", 2.0) not in names, "its factor changes nothing but the reach"
    assert not {"alibi", "longrope", "table"} & {name for name, _ in names}
    (file := tmp_path / "choice.json").write_text(json.dumps({"method": YaRN(factor=2.5).to_dict()}))
    assert chosen_methods(subject, ["pi", str(file)], [2.0]) == (PI(factor=2.0), YaRN(factor=2.5))
    file.write_text(json.dumps({"method": YaRN(factor=2.5).to_dict(), "provenance": {"trained_length": 128}}))
    assert chosen_methods(subject, [str(file)], [2.0], 128) == (YaRN(factor=2.5),)
    with pytest.raises(InvalidParameterError, match="chosen with trained_length=128, found 256"):
        chosen_methods(subject, [str(file)], [2.0], 256)
    own = chosen_methods(subject, ["pi factor=3", "yarn"], [4.0, 2.0])
    assert own == (PI(factor=3.0), YaRN(factor=2.0), YaRN(factor=4.0)), "a factor of its own goes first"
    bloom = chosen_methods(Subject.of(tiny("bloom")), [], [2.0])
    assert {method.name for method in bloom} == {"alibi", "pi", "dynamic_pi"}
    comparison = planned(tmp_path / "out", methods=["yarn", "abf base=20000", "table inv_freq=[1,2]"])
    assert [reading.label for reading in comparison.readings[6:]] == [f"YaRN {TIMES}2", "ABF (base=20000.0)"]
    assert [(refusal.label[:5], "inv_freq" in refusal.reason) for refusal in comparison.refusals] == [("given", True)]


@pytest.mark.nightly
def test_a_checkpoint_saved_extended_competes_as_it_is(model: LlamaForCausalLM, tmp_path: Path) -> None:
    ctxext.save(ctxext.patch(model, "yarn", factor=2), tmp_path / "saved")
    expected = model(torch.arange(200)[None], use_cache=False).logits
    loaded = ctxext.load(tmp_path / "saved").eval()
    result = measured(plan(loaded, tmp_path / "out", methods=["pi", "yarn"]))
    row = result.row("unpatched")
    assert (row.reading.label, row.reading.is_candidate) == (f"as saved (yarn {TIMES}2)", True)
    assert result.trained_length == TRAINED
    assert row.scores == result.row("yarn x2").scores != result.row("pi x2").scores
    assert result.verdicts[0].candidates == 3
    assert torch.equal(loaded(torch.arange(200)[None], use_cache=False).logits, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"lengths": [4096]}, InvalidParameterError, r"4,096 tokens is beyond .* reaches 1,024.* --factor"),
        ({"lengths": [256]}, InvalidParameterError, r"reads beyond the trained 512 tokens.*found lengths of 256, 512"),
        ({"factors": [1.0]}, InvalidParameterError, "or a greater --factor"),
        ({"factors": [8.0]}, InvalidParameterError, "0 of 2 documents have the 4,097 tokens asked for.*longest has 2,"),
        ({"methods": [ALiBi(factor=2)], "depths": [2.0]}, InvalidParameterError, "depth must be"),
        ({"methods": ["table inv_freq=[1,2]"], "lengths": [1024]}, InvalidParameterError, "No method.*inv_freq"),
        ({"documents": [Document("blank", "")]}, InvalidParameterError, "0 of 1 documents"),
    ],
)
def test_bad_input(planned: Planned, tmp_path: Path, given: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        planned(tmp_path / "out", **given)
    assert not (tmp_path / "out").exists()


def test_a_model_without_a_trained_length_is_asked_about() -> None:
    stretched = tiny(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0})
    with pytest.raises(InvalidParameterError, match="--trained-length"):
        Readings(Checkpoint("tiny", stretched, BYTES))
    assert Readings(Checkpoint("tiny", stretched, BYTES), trained_length=32).trained_length == 32


def test_a_model_extended_from_a_trained_length_of_its_own_is_given_back_as_it_was() -> None:
    """Measured from that length too, and not from the one in the config."""
    model = ctxext.patch(tiny(), "yarn", factor=4, trained_length=32)
    before = model.config.ctxext
    (*_, pi), _ = Readings(Checkpoint("tiny", model, BYTES)).find([ctxext.method("pi", factor=2)])
    assert pi.reach == 64
    assert model.config.ctxext == before


@pytest.mark.slow
def test_another_folder_is_refused_by_name(planned: Planned, model: LlamaForCausalLM, tmp_path: Path) -> None:
    output = tmp_path / "out"
    planned(output, methods=["pi"]).begin()
    planned(output, methods=["yarn"], seed=3).begin()
    with pytest.raises(ResultsError, match=r"another corpus: One, Two \(sha256 .* this is One \(sha256"):
        planned(output, methods=["pi"], documents=DOCUMENTS[:1]).begin()
    with torch.no_grad():
        model.lm_head.weight[0] += 1
    with pytest.raises(ResultsError, match=r"another checkpoint: tiny in torch.float32 \(sha256 .* Choose another"):
        planned(output, methods=["pi"]).begin()
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(ResultsError, match="not empty and holds no earlier comparison"):
        planned(tmp_path, methods=["pi"]).begin()


@pytest.mark.slow
def test_a_full_disk_keeps_what_is_finished(planned: Planned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    comparison = planned(tmp_path, methods=["pi"])
    cells = comparison.begin()
    real, calls = os.fsync, 0

    def full(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls > 5:  # two per cell: its losses, its line; so the third cell's line
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ResultsError, match=r"disk is full.*kept \(2 of them\).*run the same command again"):
        comparison.measure(cells)
    assert len((tmp_path / "cells.jsonl").read_text(encoding="utf-8").splitlines()) == 2
    assert not [path for path in tmp_path.rglob(".*") if path.is_file()]
    monkeypatch.undo()
    again = planned(tmp_path, methods=["pi"])
    assert [cell.key for cell in again.begin()] == [cell.key for cell in cells[2:]]
    again.measure(again.begin())
    assert again.begin() == ()


@pytest.mark.nightly
def test_cells_are_found_again_only_for_what_they_were(planned: Planned, tmp_path: Path) -> None:
    def pending(**given: Any) -> int:
        return len(planned(tmp_path, **{"methods": ["pi"], "depths": (0.0,), **given}).begin())

    comparison = planned(tmp_path, methods=["pi"], depths=(0.0,))
    every = comparison.begin()
    assert len(every) == len({cell.key for cell in every}) == 6 * 2 + 5
    comparison.measure(every)
    assert (pending(), pending(seed=1), pending(lengths=[1000]), pending(methods=["pi", "ntk"])) == (0, 5, 15, 4)
    assert pending(trained_length=500) == len(every)
    lines = (tmp_path / "cells.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    entry = json.loads(lines[0])
    (tmp_path / entry["file"]).unlink()
    assert pending() == 1, "losses that are gone are computed again"
    (tmp_path / entry["file"]).write_bytes(b"")
    with pytest.raises(ResultsError, match=r"is damaged .*Delete it and run the command again"):
        planned(tmp_path, methods=["pi"]).result()


@pytest.mark.nightly
def test_passkeys_that_were_judged_otherwise_are_asked_again(
    planned: Planned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was kept of losses is still right."""

    def keys(kind: type) -> dict[str, str]:
        jobs = planned(tmp_path, methods=["dynamic_ntk"], depths=(0.0,)).jobs
        return {job.name: job.key for job in jobs if isinstance(job, kind)}

    losses, passkeys = keys(LossJob), keys(PromptJob)
    monkeypatch.setattr("ctxext.evaluation.passkey.JUDGED", "in one pass")
    assert keys(LossJob) == losses
    assert keys(PromptJob).keys() == passkeys.keys()
    assert not set(keys(PromptJob).values()) & set(passkeys.values())


@pytest.mark.nightly
def test_a_comparison_without_a_folder_finds_the_same(planned: Planned, tmp_path: Path) -> None:
    kept, found = (measured(planned(output, methods=["pi"])) for output in (tmp_path, None))
    assert replace(found, made={}) == replace(kept, made={})


def test_a_torn_line_costs_its_cell_only(tmp_path: Path) -> None:
    def journal(process: int = 0) -> Journal:
        return Journal(tmp_path / "cells.jsonl", process, identity=tmp_path / "comparison.json")

    first = journal()
    first.claim({"made_by": "ctxext eval compare", "checkpoint": {"name": "a", "sha256": "1"}})
    first.keep({"key": "k0", "correct": True})
    with open(tmp_path / "cells.jsonl", "a", encoding="utf-8") as file:
        file.write('{"key": "k1", "corr')
    again = journal()
    assert set(again.finished()) == {"k0"}
    again.keep({"key": "k1"})
    journal(process=1).keep({"key": "k2"})
    assert set(again.finished()) == {"k0", "k1", "k2"}
    with open(tmp_path / "cells.jsonl", "ab") as file:
        file.write(b'\xff\xfe\n{"key": "k3"}\n')
    assert set(journal().finished()) == {"k0", "k1", "k2", "k3"}


def test_processes_share_all_cells_evenly(planned: Planned, tmp_path: Path) -> None:
    some = planned(tmp_path, methods=["pi"]).jobs[0]
    cells = [replace(some, key=f"k{n}", cost=float(1 + n % 7)) for n in range(40)]
    shares = [my_share(cells, process, 3) for process in range(3)]
    assert sorted(cell.key for share in shares for cell in share) == sorted(cell.key for cell in cells)
    loads = [sum(cell.cost for cell in share) for share in shares]
    assert max(loads) - min(loads) <= 7


def test_losses_that_are_no_numbers_are_an_error(planned: Planned, model: LlamaForCausalLM, tmp_path: Path) -> None:
    with torch.no_grad():
        model.model.norm.weight[0] = math.nan
    comparison = planned(tmp_path, methods=["pi"])
    with pytest.raises(CtxextError, match=r"infinite losses: unpatched, One, 1,024 tokens.*--dtype"):
        comparison.measure(comparison.begin())
