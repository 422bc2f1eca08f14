"""``scripts/studies/longppl.py``: key tokens against the authors' loop, transcribed, losses against plain passes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

import ctxext
from ctxext.errors import IncompatibleError, InvalidParameterError, PatchStateError
from ctxext.measuring.checkpoint import Checkpoint
from ctxext.measuring.loss import truncated_loss
from ctxext.texts.corpus import Corpus, corpus_of
from ctxext.texts.documents import Document
from scripts.studies import longppl
from scripts.studies.key_tokens import KeyTokens, ending, prepare_search
from scripts.studies.longppl import LongPplResult
from tests._programs import script

TRAINED = 512
Step = Callable[[str, float], None]
WINDOWS = (128, 256, 384, 512)
# A random model predicts nothing well; these thresholds leave a few key tokens.
LOOSE = {"short": 96, "stride": 32, "alpha": 0.5, "beta": -6.0}
TEXTS = [
    Document(name, "".join(f"{word} {(i * i) % 97} of {word}, " for i in range(100)))
    for name, word in (("one", "rain"), ("two", "river"))
]


@pytest.fixture
def checkpoint(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> Checkpoint:
    return Checkpoint("tiny", model, tokenizer)


def measured(survey: Any, progress: Step = lambda *_: None) -> Any:
    survey.measure(survey.begin(), progress=progress)
    return survey.result()


def find_key_tokens(evaluator: Checkpoint, texts: Corpus, **options: Any) -> KeyTokens:
    return measured(prepare_search(evaluator, texts, **options))


def run(checkpoint: Checkpoint, texts: Corpus, keys: KeyTokens, **options: Any) -> LongPplResult:
    return measured(longppl.prepare(checkpoint, texts, keys, **options))


def corpus(tokenizer: PreTrainedTokenizerFast, length: int = 900) -> Corpus:
    return corpus_of(TEXTS, tokenizer, tokens=length + 1)


@torch.no_grad()
def token_losses(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    """The loss of every token but the first, by its index less one."""
    return functional.cross_entropy(model(ids[None, :-1]).logits[0].float(), ids[1:], reduction="none")


def published(model: LlamaForCausalLM, ids: Tensor, trunc_len: int, sliding_window: int, alpha: float, beta: float):  # type: ignore[no-untyped-def]
    """find_key_token of PKU-ML/LongPPL@1decd2a, by its definition: the indices of key tokens."""
    full = token_losses(model, ids)
    found = []
    for start in range(0, len(ids) - trunc_len, sliding_window):
        stop = min(start + trunc_len + sliding_window, len(ids))
        short = token_losses(model, ids[start:stop])
        for token in range(start + trunc_len, stop):
            gain = short[token - start - 1] - full[token - 1]
            if gain > alpha and full[token - 1] < -beta:
                found.append(token)
    return found


@pytest.mark.parametrize(("window", "stride"), [(TRAINED, 32), (400, 45)])
def test_key_tokens_are_the_published_ones(checkpoint: Checkpoint, window: int, stride: int) -> None:
    texts = corpus(checkpoint.tokenizer)
    found = find_key_tokens(checkpoint, texts, window=window, **{**LOOSE, "stride": stride})
    assert found.tokens > 4
    for document, passage in zip(texts.documents, found.passages, strict=True):
        ids = document.input_ids[0, -window - 1 :]
        expected = published(checkpoint.model, ids, 96, stride, 0.5, -6.0)
        assert sorted(window - from_end for from_end in passage.from_end) == expected
        assert all(96 + stride <= token <= window for token in expected)


@pytest.mark.nightly
def test_a_short_context_keeps_the_prefix(model: LlamaForCausalLM, bos_tokenizer: PreTrainedTokenizerFast) -> None:
    loaded = Checkpoint("tiny", model, bos_tokenizer)
    texts = corpus(bos_tokenizer)
    found = find_key_tokens(loaded, texts, window=300, **LOOSE)
    ids = ending(texts.documents[0], 300).input_ids[0]
    assert len(ids) == 301
    assert ids[0] == bos_tokenizer.bos_token_id
    full = token_losses(model, ids)
    expected = []
    for token in range(96 + 32, 301):
        start = (token - 96) // 32 * 32
        short = token_losses(model, torch.cat([ids[:1], ids[start + 1 : token + 1]]))[-1]
        if short - full[token - 1] > 0.5 and full[token - 1] < 6.0:
            expected.append(token)
    assert sorted(300 - from_end for from_end in found.passages[0].from_end) == expected
    assert expected


@pytest.mark.slow
def test_longppl_by_hand(checkpoint: Checkpoint) -> None:
    model = checkpoint.model
    texts = corpus(checkpoint.tokenizer)
    steps: list[tuple[str, float]] = []
    search = prepare_search(checkpoint, texts, **LOOSE)
    keys = measured(search, lambda *step: steps.append(step))
    assert (keys.window, keys.searched) == (TRAINED, TRAINED - 96 + 1)
    assert sum(done for _, done in steps) == pytest.approx(sum(job.cost for job in search.jobs))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    steps.clear()
    methods = [ctxext.method("pi", factor=2), ctxext.method("dynamic_ntk", factor=2)]
    survey = longppl.prepare(checkpoint, texts, keys, lengths=[900], methods=methods)
    found = measured(survey, lambda *step: steps.append(step))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert sum(done for _, done in steps) == pytest.approx(sum(job.cost for job in survey.jobs))
    truncations = [f"truncated {window}" for window in WINDOWS]
    names = ["unpatched", *truncations, "truncated", "pi x2", "dynamic_ntk x2"]
    assert [reading.name for reading in found.readings] == names
    assert [score.length for score in found.find("pi x2").scores] == [TRAINED, 900]

    def by_hand(length: int) -> tuple[list[Tensor], list[Tensor]]:
        key, everything = [], []
        for document, passage in zip(texts.documents, keys.passages, strict=True):
            losses = token_losses(model, document.input_ids[0, -length - 1 :])
            key.append(torch.stack([losses[-1 - n] for n in reversed(passage.from_end)]))
            everything.append(losses[-keys.searched :])
        return key, everything

    plain = found.find("unpatched").scores[0]
    assert plain.key_loss == pytest.approx(torch.cat(by_hand(TRAINED)[0]).mean().item(), rel=1e-5)
    assert plain.longppl == pytest.approx(math.exp(plain.key_loss))
    cut, on_keys = {}, {}
    for window in WINDOWS:
        whole = [truncated_loss(model, document.input_ids, window=window)[0] for document in texts.documents]
        cut[window] = torch.cat([losses[900 - keys.searched :] for losses in whole]).double().mean().item()
        chosen = zip(whole, keys.passages, strict=True)
        lost = [torch.stack([losses[-1 - n] for n in reversed(one.from_end)]) for losses, one in chosen]
        on_keys[window] = torch.cat(lost).double().mean().item()
        score = found.find(f"truncated {window}").scores[0]
        assert (score.key_loss, score.all_loss) == pytest.approx((on_keys[window], cut[window]), rel=1e-5)
    best = found.find("truncated").scores[0]
    assert (best.key_loss, best.all_loss) == pytest.approx((min(on_keys.values()), min(cut.values())), rel=1e-5)
    assert (best.window, best.window_all) == (min(on_keys, key=on_keys.get), min(cut, key=cut.get))
    for name, method in zip(("pi x2", "dynamic_ntk x2"), methods, strict=True):
        ctxext.patch(model, method)
        for score in found.find(name).scores:
            key, everything = by_hand(score.length)
            assert score.key_loss == pytest.approx(torch.cat(key).mean().item(), rel=1e-5)
            assert score.perplexity == pytest.approx(torch.cat(everything).double().mean().exp().item(), rel=1e-5)
            difference = score.versus_truncation
            assert difference.mean == pytest.approx(torch.cat(key).mean().item() - min(on_keys.values()), abs=1e-5)
            assert (difference.tokens, difference.over) == (keys.tokens, "blocks")
            assert score.versus_truncation_all.tokens == 2 * keys.searched
            assert score.versus_truncation_all.baselines == 4
            lost_all = torch.cat(everything).double().mean().item() - min(cut.values())
            assert score.versus_truncation_all.mean == pytest.approx(lost_all, abs=1e-5)
        ctxext.unpatch(model)
    assert LongPplResult.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    assert sum(len(reading.scores) for reading in found.readings) == 1 + 4 + 1 + 2 * 2
    assert plain.versus_truncation is None


@pytest.mark.slow
@pytest.mark.parametrize("counts", [(0, 3), (3, 0), (0, 1), (1, 1)])
def test_a_text_may_hold_no_key_token(checkpoint: Checkpoint, counts: tuple[int, int]) -> None:
    texts = corpus(checkpoint.tokenizer)
    keys = find_key_tokens(checkpoint, texts, window=300, **LOOSE)
    cut = zip(keys.passages, counts, strict=True)
    passages = [replace(passage, from_end=tuple(range(5, 5 + count))) for passage, count in cut]
    options = {"lengths": [900], "methods": [ctxext.method("pi", factor=2)]}
    result = run(checkpoint, texts, replace(keys, passages=tuple(passages)), **options)
    (extension,) = result.extensions
    assert all(math.isfinite(score.key_loss) for score in extension.scores)
    assert [score.versus_truncation is None for score in extension.scores] == [sum(counts) == 1] * 2


def test_key_tokens_are_kept_and_checked(
    checkpoint: Checkpoint, bos_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    texts = corpus(checkpoint.tokenizer)
    keys = find_key_tokens(checkpoint, texts, window=300, **LOOSE)
    path = tmp_path / "keys.json"
    path.write_text(json.dumps(keys.to_dict()), encoding="utf-8")
    assert KeyTokens.load(path) == keys
    keys.check(checkpoint, texts)
    # Longer texts with the same end are the same texts; the same texts cut elsewhere are not.
    keys.check(checkpoint, Corpus(tuple(replace(d, input_ids=d.input_ids[:, 50:]) for d in texts.documents), "none", 2))
    with pytest.raises(InvalidParameterError, match=r"other texts \(the end of 'one' is another\).*--skip"):
        keys.check(checkpoint, corpus(checkpoint.tokenizer, 800))
    with pytest.raises(InvalidParameterError, match=r"other texts \(2 texts then, 1 now\)"):
        keys.check(checkpoint, replace(texts, documents=texts.documents[:1]))
    with pytest.raises(InvalidParameterError, match="with another tokenizer"):
        replace(keys, tokenizer_sha256="0" * 12).check(checkpoint, texts)
    for content, message in (
        ("{", "Cannot read key tokens"),
        ("[]", "not a file of key tokens"),
        ('{"kind": "longppl", "format": 1}', "found kind 'longppl'"),
    ):
        path.write_text(content, encoding="utf-8")
        with pytest.raises(InvalidParameterError, match=message):
            KeyTokens.load(path)
    with pytest.raises(InvalidParameterError, match=r"Cannot read key tokens.*none\.json"):
        KeyTokens.load(tmp_path / "none.json")
    with pytest.raises(InvalidParameterError, match="not a LongPPL result"):
        LongPplResult.from_dict({"kind": "key tokens"})
    with pytest.raises(InvalidParameterError, match=r"found kind 'longppl', format 1\."):
        LongPplResult.from_dict({"kind": "longppl", "format": 1})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": 600}, "at most the trained 512; found short=150"),
        ({"short": 600}, "found short=600"),
        ({"stride": 0}, "stride=0"),
        ({"alpha": 0.0}, "alpha must be above 0"),
        ({"beta": 1.0}, "beta at most 0"),
        ({"alpha": 50.0}, r"None of 770 tokens is a key token \(alpha=50, beta=-2\).*128 tokens of context"),
    ],
)
def test_finding_refuses(checkpoint: Checkpoint, change: dict[str, float], message: str) -> None:
    with pytest.raises(InvalidParameterError, match=message):
        find_key_tokens(checkpoint, corpus(checkpoint.tokenizer), **change)  # type: ignore[arg-type]


@pytest.mark.slow
def test_measuring_refuses(checkpoint: Checkpoint, model: LlamaForCausalLM) -> None:
    texts = corpus(checkpoint.tokenizer)
    keys = find_key_tokens(checkpoint, texts, window=400, **LOOSE)
    pi, far = (ctxext.method("pi", factor=factor) for factor in (1.5, 8))
    for arguments, message in (
        ({"lengths": [900], "methods": [pi]}, r"900 tokens are more than the 768 that PI .*1\.5 reaches"),
        ({"lengths": [300], "methods": [pi]}, r"at least the 400 tokens in which .* found 300"),
        ({"lengths": [700], "methods": [pi, pi]}, "Give each method once; found pi x1.5, pi x1.5"),
        ({"lengths": [700]}, "Nothing is extended"),
        ({"lengths": [2000], "methods": [far]}, "'one' has 901 tokens; this length needs 2,001"),
    ):
        with pytest.raises(InvalidParameterError, match=message):
            run(checkpoint, texts, keys, **arguments)  # type: ignore[arg-type]
        assert ctxext.describe(model).method is None
    ctxext.patch(model, pi)
    with pytest.raises(PatchStateError, match="tiny is extended"):
        find_key_tokens(checkpoint, texts)
    with pytest.raises(InvalidParameterError, match=r"comes extended.*as the reference"):
        run(checkpoint, texts, keys, lengths=[700])


@pytest.mark.nightly
def test_the_command(
    model: LlamaForCausalLM, bos_tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.save_pretrained(tmp_path / "tiny")
    bos_tokenizer.save_pretrained(tmp_path / "tiny")
    for document in TEXTS:
        (tmp_path / f"{document.name}.txt").write_text(document.text, encoding="utf-8")
    names = [f"longppl.{kind}" for kind in ("json", "md", "png")]
    given = [tmp_path / "tiny", "--dtype", "fp32", "-m", "pi", "-m", "yarn ramp=turns", "-l", 900]
    given += ["-t", tmp_path / "one.txt", "-t", tmp_path / "two.txt", "--keys", tmp_path / "keys.json"]
    given += ["--short", 96, "--stride", 32, "--alpha", 0.5, "--beta", -6]

    shown = script(longppl.main, *given, *(part for name in names for part in ("-o", tmp_path / name)), code=0)
    saved = json.loads((tmp_path / "longppl.json").read_text(encoding="utf-8"))
    report = LongPplResult.from_dict(saved)
    texts = corpus_of(TEXTS, bos_tokenizer, tokens=901)
    loaded = Checkpoint("tiny", model, bos_tokenizer)
    keys = find_key_tokens(loaded, texts, **LOOSE)
    assert KeyTokens.load(tmp_path / "keys.json").passages == keys.passages == report.keys.passages
    factor = 900 / TRAINED
    methods = [ctxext.method("pi", factor=factor), ctxext.method("yarn", factor=factor, ramp="turns")]
    expected = run(loaded, texts, keys, lengths=[900], methods=methods)
    found = [(one.name, [score.key_loss for score in one.scores]) for one in report.readings]
    assert found == [(one.name, pytest.approx([s.key_loss for s in one.scores], rel=1e-5)) for one in expected.readings]
    best = min(report.extensions, key=lambda reading: reading.scores[-1].key_loss)
    assert f"Best at 900: {best.label}." in shown.output
    assert (tmp_path / "longppl.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "longppl.md").read_text(encoding="utf-8")
    assert f"{best.scores[-1].longppl:.2f} |" in page

    monkeypatch.setattr(longppl, "prepare_search", lambda *_, **__: pytest.fail("key tokens were found before"))
    again = script(longppl.main, *given, "--json", code=0)
    printed = json.loads(again.stdout)["readings"]
    assert [one["scores"] for one in printed] == [one["scores"] for one in saved["readings"]]
    assert re.search(r"\d+ key tokens out of .*keys\.json, found by tiny", again.stderr)
    given[given.index("--alpha") + 1] = 1
    other = script(longppl.main, *given, code=1)
    assert "holds key tokens found with alpha=0.5, and alpha=1.0 is asked for" in other.stderr


def test_the_trained_length_that_is_given_is_that_of_the_truncations(checkpoint: Checkpoint) -> None:
    """Of a text as long as the config's window, truncation to that window would drop nothing."""
    given = TRAINED // 2
    texts = corpus(checkpoint.tokenizer)
    keys = find_key_tokens(checkpoint, texts, window=given, **LOOSE)
    methods = [ctxext.method("pi", factor=2)]
    found = run(checkpoint, texts, keys, lengths=[TRAINED], methods=methods, trained_length=given)
    windows = [reading.name for reading in found.readings if reading.name.startswith("truncated ")]
    assert windows == [f"truncated {given * part // 4}" for part in (1, 2, 3, 4)]
    assert found.provenance.trained_length == given


def test_losses_that_are_no_numbers_are_refused_by_name(checkpoint: Checkpoint) -> None:
    with torch.no_grad():
        checkpoint.model.model.layers[1].mlp.up_proj.weight[3, 3] = math.nan
    with pytest.raises(IncompatibleError, match="losses: tiny, which finds key tokens, one"):
        find_key_tokens(checkpoint, corpus(checkpoint.tokenizer), **LOOSE)
