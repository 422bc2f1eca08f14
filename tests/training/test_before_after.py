"""What a run says about itself, before and after training, against the same numbers by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ctxext
from ctxext.caches.digest import weights_digest
from ctxext.errors import CheckpointError, IncompatibleError, InvalidParameterError
from ctxext.measuring.checkpoint import Checkpoint, load_checkpoint
from ctxext.measuring.loss import loss_by_position, truncated_loss
from ctxext.training import before_after
from ctxext.training.before_after import BeforeAndAfter
from tests.training._recipe import recipe

LONG = (0, 2)  # the documents that are longer than the extended window of 128
PASSKEY = ("--passkey_lengths", "400", "--passkey_depths", "0.5", "--passkey_trials", "2")


def by_position(model: Any, texts: list[Tensor], first: int, stop: int) -> float:
    return torch.cat([loss_by_position(model, ids)[0, first:stop] for ids in texts]).double().mean().item()


@pytest.mark.nightly
def test_before_and_after(settings: Any, corpus: Path, texts: list[str], tmp_path: Path) -> None:
    measured = ("--evaluation.text", str(corpus), "--evaluation.lengths", "96", "128", "--factor", "8", *PASSKEY)
    given = settings(*measured, "--merge")
    recipe.finetune(given)
    report = json.loads((tmp_path / "run" / "run.json").read_text(encoding="utf-8"))
    plain = load_checkpoint(given.checkpoint, dtype="fp32")
    ids = [plain.tokenizer(texts[number], return_tensors="pt").input_ids[:, :129] for number in LONG]
    unextended = by_position(plain.model, ids, 0, 64)
    extended = ctxext.patch(load_checkpoint(given.checkpoint, dtype="fp32").model, "yarn", factor=8)
    trained = ctxext.load(tmp_path / "run" / "adapter").eval()
    for when, model in (("before", extended), ("after", trained)):
        found = report["evaluation"][when]
        *windows, best, own = found["perplexity"]["readings"]
        assert (own["name"], best["name"], len(windows)) == ("extended", "truncated", 4)
        assert own["in_window"]["mean"] == pytest.approx(by_position(model, ids, 0, 64) - unextended, abs=1e-5)
        cut = {}
        for window in (16, 32, 48, 64):
            how = {"window": window, "stride": window // 4, "prefix": 1}
            cut[window] = torch.cat([truncated_loss(model, one, **how)[0, 96:] for one in ids]).double().mean().item()
        last = next(score for score in own["scores"] if score["start"] == 96)
        difference = by_position(model, ids, 96, 128) - min(cut.values())
        assert last["versus_truncation"]["mean"] == pytest.approx(difference, abs=1e-5)
        window = min(cut, key=cut.__getitem__)
        assert f"beat the best truncation, feeding only the last {window} tokens?" in found["perplexity"]["answer"]
        assert [(cell["length"], cell["trials"]) for cell in found["passkey"]["cells"]] == [(400, 2)]
        card = (tmp_path / "run" / "merged" / "README.md").read_text(encoding="utf-8")
        assert f"\n* {when} training: {found['perplexity']['answer']}" in card
    before, after = (report["evaluation"][when]["perplexity"]["readings"][-1] for when in ("before", "after"))
    assert before["in_window"]["mean"] != after["in_window"]["mean"]


def test_nothing_is_measured_of_weights_that_are_shared_out(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed puts an id on each of them, and what is left has no values."""
    loaded = load_checkpoint(settings().checkpoint, dtype="fp32")
    monkeypatch.setattr(before_after, "is_deepspeed_zero3_enabled", lambda: True)
    BeforeAndAfter(loaded, settings())
    with pytest.raises(IncompatibleError, match="before the first step no process has whole weights"):
        BeforeAndAfter(loaded, settings(*PASSKEY))
    assert weights_digest(loaded.model) == loaded.sha256
    next(loaded.model.parameters()).ds_id = 0
    assert weights_digest(loaded.model) == "unknown"


@pytest.mark.slow
def test_heads_that_weights_choose_are_not_looked_for_without_them(settings: Any, corpus: Path) -> None:
    """The recipe checks its measurements on an outline of the model first."""
    text = ("--evaluation.text", str(corpus), "--evaluation.lengths", "96")
    given = settings("--method", "retrieval_heads", "--parameters", "{share: 0.5}", "--factor", "4", *text)
    BeforeAndAfter(load_checkpoint(given.checkpoint, dtype="fp32", weights=False), given)
    measured = BeforeAndAfter(load_checkpoint(given.checkpoint, dtype="fp32"), given)
    assert measured.plan is not None
    assert measured.plan.lengths[-1] == 96


@pytest.fixture
def kept(settings: Any, tmp_path: Path) -> Path:
    """What a run measured before it was interrupted, marked."""
    loaded, place = load_checkpoint(settings().checkpoint, dtype="fp32"), tmp_path / "before.json"
    assert BeforeAndAfter(loaded, settings()).before(loaded.model, place) == {}
    place.write_text(place.read_text(encoding="utf-8").replace('"found": {}', '"found": {"kept": 1}'), encoding="utf-8")
    return place


@pytest.mark.parametrize("words", [("--factor", "4"), ("--method", "pi"), ("--dtype", "bf16"), ("--seed", "1")])
def test_only_what_was_measured_of_another_model_is_measured_again(
    words: tuple[str, ...], settings: Any, kept: Path
) -> None:
    """A run that was killed before its first checkpoint leaves it to a new one, which may be of another extension."""
    loaded = load_checkpoint(settings().checkpoint, dtype="fp32")
    assert BeforeAndAfter(loaded, settings()).before(loaded.model, kept) == {"kept": 1}
    assert BeforeAndAfter(loaded, settings(*words)).before(loaded.model, kept) == {}


def test_what_was_measured_of_other_weights_or_in_another_form_is_measured_again(settings: Any, kept: Path) -> None:
    loaded, given, text = load_checkpoint(settings().checkpoint, dtype="fp32"), settings(), kept.read_text("utf-8")
    assert BeforeAndAfter(replace(loaded, sha256="others"), given).before(loaded.model, kept) == {}
    earlier = json.loads(text)
    for evaluation in (given.evaluation.model_dump(), earlier["evaluation"] | {"format": 1}):
        kept.write_text(json.dumps(earlier | {"evaluation": evaluation}), encoding="utf-8")
        assert BeforeAndAfter(loaded, given).before(loaded.model, kept) == {}


def test_a_run_is_not_resumed_on_other_weights(settings: Any, kept: Path) -> None:
    """The folder of its checkpoint holds another one by now: what another run merged, or a newer download."""
    loaded = load_checkpoint(settings().checkpoint, dtype="fp32")
    assert BeforeAndAfter(loaded, settings()).before(loaded.model, kept, resumes=True) == {"kept": 1}
    loaded.model.config.eos_token_id = 7  # as a newer version of transformers may read a config otherwise
    other_fields = BeforeAndAfter(replace(loaded, sha256=""), settings("--seed", "1"))
    assert other_fields.before(loaded.model, kept, resumes=True) == {}
    loaded.model.model.layers[1].mlp.up_proj.weight.data += 1
    other_weights = BeforeAndAfter(replace(loaded, sha256=""), settings())
    with pytest.raises(CheckpointError, match=r"The run in .* began with other weights than .* has now"):
        other_weights.before(loaded.model, kept, resumes=True)
    assert other_weights.before(loaded.model, kept) == {}, "a new run"


def test_what_was_measured_of_other_texts_is_measured_again(settings: Any, texts: list[str], tmp_path: Path) -> None:
    """The file has the name that it had, and other words."""
    text, kept = tmp_path / "text.txt", tmp_path / "before.json"
    words = ("--evaluation.text", str(text), "--evaluation.lengths", "96", "--factor", "8")
    loaded: Checkpoint = load_checkpoint(settings().checkpoint, dtype="fp32")
    results = []
    for content in (texts[0], texts[0], texts[2], texts[0][1:], texts[0].upper()):
        text.write_text(content, encoding="utf-8")
        results.append(BeforeAndAfter(loaded, settings(*words)).before(loaded.model, kept))
    digests = [result["perplexity"]["provenance"]["corpus_sha256"] for result in results]
    assert digests[0] == digests[1]
    assert json.loads(json.dumps(results[0])) == results[1]
    assert len(set(digests)) == 4


@pytest.mark.slow
def test_what_cannot_be_measured_is_said_before_training(settings: Any, corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidParameterError, match=r"0 of 4 documents have the 1,025 tokens asked for"):
        recipe.finetune(settings("--evaluation.text", str(corpus), "--factor", "16"))
    with pytest.raises(InvalidParameterError, match=r"400 tokens are more than the 128 "):
        recipe.finetune(settings("--passkey_lengths", "400"))
    longer = ("--evaluation.text", str(corpus), "--evaluation.lengths", "128", "--evaluation.window", "96")
    with pytest.raises(InvalidParameterError, match=r"evaluation\.window, 96 tokens, is beyond the trained 64"):
        recipe.finetune(settings(*longer))
    assert not list((tmp_path / "run").glob("checkpoint-*"))
