"""Masked-token loss: which tokens are masked, what each window sees, losses against plain forwards, the command."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BertModel

import ctxext
from ctxext.errors import CheckpointError, IncompatibleError, InvalidParameterError
from ctxext.evaluation import masked
from ctxext.evaluation.masked import EVERY, WHOLE, MaskedReport, MaskedText, masked_losses, masked_readers, masked_texts
from ctxext.measuring.checkpoint import Checkpoint, load_checkpoint
from ctxext.measuring.provenance import provenance_of
from ctxext.measuring.survey import Survey
from ctxext.measuring.truncation import TRUNCATED, UNPATCHED
from ctxext.texts.corpus import Corpus, corpus_of
from ctxext.texts.documents import Document
from tests._checkpoints import save_with_tokenizer
from tests._models import bert, tiny
from tests._programs import command
from tests._tokenizer import make_tokenizer
from tests._tokenizer import make_two_sided_tokenizer as tokenizer
from tests.evaluation._masked import saved

TRAINED = 64
MASK = 257


def corpus(tokens: int, documents: int = 2) -> Corpus:
    letters = torch.randint(97, 123, (documents, 400), generator=torch.Generator().manual_seed(3)).tolist()
    texts = [Document(f"text {number}", "".join(map(chr, row))) for number, row in enumerate(letters)]
    return corpus_of(texts, tokenizer(), tokens=masked.tokens_needed(tokenizer(), tokens))


def texts_of(length: int, documents: int = 2, **options: Any) -> tuple[MaskedText, ...]:
    return masked_texts(tokenizer(), corpus(length, documents), length, **options)


def measured(model: Any, methods: Sequence[str] = (), documents: int = 2, **options: Any) -> MaskedReport:
    checkpoint = Checkpoint("tiny", model, tokenizer())
    readers = masked_readers(checkpoint, methods=methods, **options)
    longest = max(length for reader in readers for length in reader.lengths)
    texts = corpus(longest, documents)
    jobs = masked.masked_jobs(readers, lambda n: masked_texts(checkpoint.tokenizer, texts, n, passes=2), checkpoint)
    survey = Survey("test", checkpoint, jobs, corpus=texts)
    survey.measure(survey.begin())
    return masked.masked_report(survey, provenance_of(checkpoint, texts, seed=0), every=EVERY, passes=2)


def test_seven_passes_mask_every_token_of_a_text_once_and_nothing_else() -> None:
    (text, _) = texts_of(100, passes=EVERY)
    assert text.length == 100
    assert text.input_ids[[0, -1]].tolist() == [256, tokenizer().sep_token_id]
    assert sorted(torch.cat(text.passes).tolist()) == list(range(1, 99))
    for positions in text.passes:
        assert set(positions.diff().tolist()) == {EVERY}


def test_a_token_under_a_mask_that_the_model_lacks_is_named() -> None:
    (text,) = texts_of(40, documents=1)
    text.input_ids[text.passes[0][1]] = 260
    with pytest.raises(InvalidParameterError, match="The text has token 260 of its tokenizer, and this bert knows 260"):
        masked_losses(bert(), text)


def test_texts_take_turns_and_the_seed_decides_the_order() -> None:
    one_pass = texts_of(100, documents=EVERY)
    assert sorted(position for text in one_pass for position in text.passes[0].tolist()) == list(range(1, 99))
    first = [texts_of(100, 1, seed=seed)[0].passes[0][0].item() for seed in range(20)]
    assert len(set(first)) > 3
    assert texts_of(100, seed=1)[0].sha256 == texts_of(100, seed=1)[0].sha256
    assert len({texts_of(100, 1, seed=seed)[0].sha256 for seed in range(20)}) == len(set(first))


@pytest.mark.parametrize("window", [16, 32, 47, 64])
@pytest.mark.parametrize("length", [65, 100, 233])
def test_a_window_asks_for_each_masked_token_once_and_shows_it_a_quarter_to_either_side(
    window: int, length: int
) -> None:
    (text, _) = texts_of(length, passes=3)
    views = text.views(window)
    assert sorted(torch.cat([view.asked for view in views]).tolist()) == sorted(torch.cat(text.passes).tolist())
    for view in views:
        assert len(text.row(view)) == window
        quarter = (window - 2) // 4
        for position in view.asked.tolist():
            assert position - view.start >= min(quarter, position - 1)
            assert view.stop - 1 - position >= min(quarter, length - 2 - position)
        row = text.row(view)
        assert (row == MASK).nonzero()[:, 0].tolist() == (view.masked - view.start + 1).tolist()
        assert (row[[0, -1]] == text.input_ids[[0, -1]]).all()


def plain_losses(model: Any, text: MaskedText, start: int, stop: int, masked: Tensor) -> dict[int, float]:
    """By position, read in one row of the text with special tokens around, by the model's own forward."""
    inside = [position for position in masked.tolist() if start <= position < stop]
    ids = [256, *text.input_ids[start:stop].tolist(), tokenizer().sep_token_id]
    for position in inside:
        ids[position - start + 1] = MASK
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)
    return {p: -logits[p - start + 1, text.input_ids[p]].item() for p in inside}


@pytest.mark.parametrize("kind", ["bert", "modernbert"])
def test_losses_are_those_of_the_models_own_forward(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = bert() if kind == "bert" else tiny("modernbert", vocab_size=260)
    ctxext.patch(model, "pi", factor=4)
    monkeypatch.setattr("ctxext.evaluation.masked.head_chunk", lambda _: 5)  # more than one piece
    (text, _) = texts_of(130, passes=2)
    found = masked_losses(model, text)
    expected: dict[int, float] = {}
    for positions in text.passes:
        expected |= plain_losses(model, text, 1, 129, positions)
    assert (~found.isnan()).nonzero()[:, 0].tolist() == sorted(expected)
    for position, loss in expected.items():
        assert found[position].item() == pytest.approx(loss, abs=1e-4)


def test_losses_in_windows_are_those_of_each_window_read_by_itself() -> None:
    model = bert()
    (text, _) = texts_of(200, passes=2)
    found = masked_losses(model, text, window=48)
    for view in text.views(48):
        masked = next(one for one in text.passes if view.asked[0] in one)
        expected = plain_losses(model, text, view.start, view.stop, masked)
        for position in view.asked.tolist():
            assert found[position].item() == pytest.approx(expected[position], abs=1e-4)
    assert found.isnan().sum() == text.length - len(torch.cat(text.passes))


@pytest.mark.slow
def test_the_report_compares_within_the_window_with_the_model_as_it_was_and_beyond_with_the_best_window() -> None:
    report = measured(bert(), ["hierarchical", "pi"], factors=[4.0], documents=4)
    assert report.lengths == (TRAINED, 4 * TRAINED)
    names = [reading.name for reading in report.readings]
    assert names[:2] == [UNPATCHED, TRUNCATED]
    assert names[2:] == [*(f"truncated {n}" for n in (16, 32, 48, 64)), "hierarchical x4", "pi x4"]
    plain, best, kept, squeezed = (report.find(name) for name in (UNPATCHED, TRUNCATED, "hierarchical x4", "pi x4"))
    assert plain.lengths == (TRAINED,)  # its table has no rows beyond
    (inside,) = kept.at(TRAINED, WHOLE)
    assert inside.loss == plain.at(TRAINED, WHOLE)[0].loss  # its first rows are the trained ones
    assert inside.versus.mean == 0
    (other,) = squeezed.at(TRAINED, WHOLE)
    assert other.versus.mean == pytest.approx(other.loss - inside.loss, abs=1e-6)
    for kind in (WHOLE, masked.POSITION):
        for ours, theirs in zip(squeezed.at(4 * TRAINED, kind), best.at(4 * TRAINED, kind), strict=True):
            single = report.find(f"truncated {theirs.window}")
            losses = {s.start: s.loss for s in single.at(4 * TRAINED, kind)}
            assert theirs.loss == losses[theirs.start]
            assert ours.versus.mean == pytest.approx(ours.loss - theirs.loss, abs=1e-6)
            assert ours.versus.baselines == 4
            assert ours.versus.over == "blocks"
    whole = squeezed.at(4 * TRAINED, WHOLE)[0]
    scores = squeezed.at(4 * TRAINED, masked.POSITION)
    assert sum(score.tokens for score in scores) == whole.tokens
    mean = math.fsum(score.loss * score.tokens for score in scores) / whole.tokens
    assert mean == pytest.approx(whole.loss, abs=1e-6)


@pytest.mark.nightly
def test_of_enough_documents_each_weighs_the_same() -> None:
    """Documents have about as many masked tokens, so that the difference is near that of the losses, and not it."""
    report = measured(bert(), ["pi"], factors=[2.0], documents=6)
    reading, unextended = report.find("pi x2"), report.find(UNPATCHED)
    (score,), (plain,) = reading.at(TRAINED, WHOLE), unextended.at(TRAINED, WHOLE)
    assert (score.versus.over, score.versus.units, score.versus.tokens) == ("documents", 6, score.tokens)
    assert score.versus.mean == pytest.approx(score.loss - plain.loss, rel=0.1)


@pytest.mark.slow
def test_a_rotary_encoder_is_read_beyond_its_window_unextended_as_a_control() -> None:
    report = measured(tiny("modernbert", vocab_size=260), ["yarn"], factors=[2.0], lengths=[128])
    plain = report.find(UNPATCHED)
    assert plain.lengths == (64, 128)
    assert plain.at(128, WHOLE)[0].versus is not None


@pytest.mark.slow
def test_a_report_is_read_as_it_was_written_and_says_what_it_found() -> None:
    report = measured(bert(), ["pi"], factors=[2.0])
    assert MaskedReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report
    told = masked.masked_sentences(report)
    assert told[0].startswith("Does PI \N{MULTIPLICATION SIGN}2 beat the best window around each masked token at 128")
    assert "on these texts" in told[0] or "not measurably" in told[0]
    # Two texts in two passes mask four places of seven, each another one.
    assert "0.571 times on average, and 43% of them never." in told[-1]


@pytest.mark.nightly
def test_the_command_writes_its_result_and_goes_on_where_it_was(tmp_path: Path) -> None:
    model = saved(tmp_path / "model")
    (tmp_path / "a.txt").write_text("The quick brown fox jumps over the lazy dog. " * 12)
    outputs = [tmp_path / f"loss{ending}" for ending in (".json", ".md", ".png")]
    named = [word for path in outputs for word in ("-o", path)]
    arguments = ["eval", "masked", model, "-t", tmp_path / "a.txt", "-m", "tile", "-m", "pi", "-f", "4", *named]
    first = command(*arguments, code=0)
    assert "Loss of masked tokens" in first.stdout
    assert outputs[2].read_bytes().startswith(b"\x89PNG")
    page = outputs[1].read_text()
    assert "Loss of masked tokens" in page
    assert "| Checkpoint | model; sha256 " in page
    written = json.loads(outputs[0].read_text())
    outputs[0].unlink()
    again = command(*arguments)
    assert "9 of them finished before" in again.stdout
    assert json.loads(outputs[0].read_text())["readings"] == written["readings"]


@pytest.mark.nightly
def test_new_rows_that_were_trained_are_measured_and_survive_other_methods(tmp_path: Path) -> None:
    model = bert()
    ctxext.patch(model, "hierarchical", factor=2)
    with torch.no_grad():
        model.bert.embeddings.position_embeddings.weight[TRAINED:].normal_(0, 0.3)
    ctxext.save(model, tmp_path / "trained")
    tokenizer().save_pretrained(tmp_path / "trained")
    checkpoint = load_checkpoint(str(tmp_path / "trained"), dtype="fp32", masked=True)
    (text, _) = texts_of(2 * TRAINED)
    expected = masked_losses(model, text).nan_to_num(-1)
    readers = masked_readers(checkpoint, methods=["pi"], factors=[2.0])
    names = [reader.reading.name for reader in readers]
    assert "as saved" in names
    for reader in (*readers, *readers):
        with reader.applied():
            found = masked_losses(reader.model, text).nan_to_num(-1)
        assert torch.equal(found, expected) == (reader.reading.name != "pi x2"), reader.reading.name
    assert torch.equal(masked_losses(checkpoint.model, text).nan_to_num(-1), expected)


@pytest.mark.slow
def test_what_fills_in_no_masked_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"lack cls\.predictions"):
        load_checkpoint(str(saved(tmp_path / "headless", BertModel)), masked=True)
    causal = save_with_tokenizer(tiny(), tmp_path / "causal", tokenizer())
    for weights in (True, False):
        with pytest.raises(IncompatibleError, match=r"holds a llama, for which transformers has no masked language m"):
            load_checkpoint(str(causal), masked=True, weights=weights)
    tiny("t5").save_pretrained(tmp_path / "t5")
    with pytest.raises(IncompatibleError, match=r"holds a t5, for which transformers has no causal language model\."):
        load_checkpoint(str(tmp_path / "t5"))
    headless = bert(BertModel)
    ctxext.patch(headless, "pi", factor=2)
    ctxext.save(headless, tmp_path / "extended")
    with pytest.raises(CheckpointError, match=r"lack cls\.predictions.* which a BertForMaskedLM needs"):
        load_checkpoint(str(tmp_path / "extended"), masked=True)


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(InvalidParameterError, match="has no mask token"):
        masked_texts(make_tokenizer(bos=True), corpus(100), 100)
    for options, says in (({"every": 1}, "every must be at least 2"), ({"passes": 8}, "passes must be from 1 to 7")):
        with pytest.raises(InvalidParameterError, match=says):
            texts_of(100, **options)
    for every, length in ((1000, 100), (99, 100), (7, 8)):
        says = rf"Of {length} tokens, {length - 2} can be masked.*in {every}\."
        with pytest.raises(InvalidParameterError, match=says):
            texts_of(length, every=every)
    assert [len(one.passes[0]) for one in texts_of(100, every=98)] == [1, 1]
    checkpoint = Checkpoint("tiny", bert(), tokenizer())
    with pytest.raises(InvalidParameterError, match="128 tokens are more than the 64"):
        masked_readers(checkpoint, lengths=[128])
    with pytest.raises(IncompatibleError, match="learned positions"):
        masked_readers(checkpoint, methods=["yarn"], lengths=[128])
    with pytest.raises(IncompatibleError, match="training mode"):
        masked_losses(bert().train(), texts_of(60)[0])
