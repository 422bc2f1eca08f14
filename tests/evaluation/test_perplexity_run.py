"""A whole measurement: what is read by whom, every length from one pass, references, and the command."""

from __future__ import annotations

import errno
import io
import json
import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.figure
import pytest
import torch
from tokenizers import processors
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

import ctxext
from ctxext.cli.app import app
from ctxext.cli.options import OutputOptions
from ctxext.errors import InvalidParameterError
from ctxext.evaluation.perplexity import inside_survey, make_plan, prepare
from ctxext.evaluation.perplexity_result import LENGTH, POSITIONS, PerplexityResult, perplexity_page
from ctxext.evaluation.report.figures import COLOURS
from ctxext.measuring.checkpoint import Checkpoint
from ctxext.measuring.loss import loss_by_position, truncated_loss
from ctxext.progress import terminal
from ctxext.texts.corpus import Corpus, corpus_of
from ctxext.texts.documents import Document, read_documents
from tests._models import byte_model, tiny, trained_for
from tests._products import some
from tests._programs import command, launched
from tests._tokenizer import make_tokenizer
from tests.texts._conversations import PLAIN, chat_tokenizer

TRAINED = 64
WINDOWS = (16, 32, 48, 64)
TRUNCATIONS = [*(f"truncated {window}" for window in WINDOWS), "truncated"]
Make = Callable[..., tuple[Checkpoint, Corpus]]
LONG = {"short_factor": [1.0] * 16, "long_factor": [4.0] * 16, "original_max_position_embeddings": 64}


@pytest.fixture
def make(model: LlamaForCausalLM, bos_tokenizer: PreTrainedTokenizerFast) -> Make:
    """A checkpoint trained for 64 tokens, and texts of so many tokens."""
    trained_for(model, TRAINED)

    def made(tokens: int, documents: int = 2, **options: Any) -> tuple[Checkpoint, Corpus]:
        generator = torch.Generator().manual_seed(3)
        texts = []
        for number in range(documents):
            letters = torch.randint(97, 123, (400,), generator=generator).tolist()
            texts.append(Document(f"text {number}", "".join(map(chr, letters))))
        return Checkpoint("tiny", model, bos_tokenizer), corpus_of(texts, bos_tokenizer, tokens=tokens, **options)

    return made


def run(
    checkpoint: Checkpoint,
    corpus: Corpus,
    plan: Any,
    *,
    progress: Callable[[str, float], None] = lambda *_: None,
    **options: Any,
) -> PerplexityResult:
    survey = prepare(checkpoint, corpus, plan, **options)
    survey.measure(survey.begin(), progress=progress)
    return survey.result()


def mean(parts: Sequence[torch.Tensor]) -> float:
    return torch.cat([part.flatten() for part in parts]).double().mean().item()


def cut_to(model: Any, ids: Sequence[torch.Tensor], prefix: int = 1) -> dict[int, list[torch.Tensor]]:
    """By window: whole texts read inside the trained window, and beyond it with so many of the last tokens."""
    heads = [loss_by_position(model, one[:, : TRAINED + 1]) for one in ids]
    found = {}
    for window in WINDOWS:
        options = {"window": window, "stride": window // 4, "prefix": prefix}
        tails = [truncated_loss(model, one, **options)[:, TRAINED:] for one in ids]
        found[window] = [torch.cat([head, tail], dim=1) for head, tail in zip(heads, tails, strict=True)]
    return found


def best_of(cut: dict[int, list[torch.Tensor]], start: int, stop: int) -> tuple[int, list[torch.Tensor]]:
    """The window that predicts those positions best, and its losses."""
    parts = {window: [part[:, start:stop] for part in own] for window, own in cut.items()}
    best = min(parts, key=lambda window: (round(mean(parts[window]), 9), -window))
    return best, parts[best]


@pytest.mark.nightly
@pytest.mark.parametrize("method", some(["yarn", "ntk"], "yarn"))
def test_every_length_from_one_pass_is_what_a_pass_of_its_own_gives(make: Make, method: str) -> None:
    checkpoint, corpus = make(257)
    plan = make_plan(checkpoint.model, method=method, lengths=[256], arguments={"factor": 4.0})
    assert plan.lengths == (16, 32, 64, 112, 160, 208, 256)
    found = run(checkpoint, corpus, plan)
    assert [reading.name for reading in found.readings] == ["unpatched", *TRUNCATIONS, method]
    assert "_ctxext" not in checkpoint.model.__dict__
    extension = found.extension
    assert (extension.passes, extension.tokens) == (2, 512)
    ctxext.patch(checkpoint.model, method, factor=4.0)
    for score in extension.at(LENGTH):
        own = [loss_by_position(checkpoint.model, one.input_ids[:, : score.stop + 1]) for one in corpus.documents]
        assert score.loss - mean(own) == 0.0  # not close: equal, at multiples of what kernels take at a time
    whole = [loss_by_position(checkpoint.model, one.input_ids) for one in corpus.documents]
    assert extension.at(POSITIONS)[4].loss == pytest.approx(mean([part[:, 112:160] for part in whole]))


@pytest.mark.nightly
def test_references_and_differences_by_hand(make: Make) -> None:
    checkpoint, corpus = make(257)
    plan = make_plan(checkpoint.model, method="pi", lengths=[128, 256], arguments={"factor": 4.0})
    assert plan.lengths == (64, 128, 256)
    found = run(checkpoint, corpus, plan)
    model, ids = checkpoint.model, [one.input_ids for one in corpus.documents]
    plain = [loss_by_position(model, one) for one in ids]
    cut = cut_to(model, ids)
    ctxext.patch(model, "pi", factor=4.0)
    patched = [loss_by_position(model, one) for one in ids]
    unpatched, *windows, truncated, extension = found.readings
    assert [reading.name for reading in (*windows, truncated)] == TRUNCATIONS
    expected = [mean([p[:, :n] for p in plain]) for n in plan.lengths]
    assert [score.loss for score in unpatched.at(LENGTH)] == pytest.approx(expected)
    for kind, spans in ((POSITIONS, ((0, 64), (64, 128), (128, 256))), (LENGTH, ((0, 64), (0, 128), (0, 256)))):
        for index, (start, stop) in enumerate(spans):
            window, best = best_of(cut, start, stop)
            assert truncated.at(kind)[index].loss == pytest.approx(mean(best))
            assert truncated.at(kind)[index].window == (None if stop == TRAINED else window)
            for size, reading in zip(WINDOWS, windows, strict=True):
                score = reading.at(kind)[index]
                assert score.loss == pytest.approx(mean([part[:, start:stop] for part in cut[size]]))
                assert (score.window is None, score.versus_truncation is None) == (stop == TRAINED, stop == TRAINED)
                if score.versus_truncation is not None:
                    assert score.versus_truncation.mean == pytest.approx(score.loss - mean(best), abs=1e-7)
                    assert score.versus_truncation.mean >= 0
    assert truncated.at(POSITIONS)[0] == unpatched.at(POSITIONS)[0]
    assert not any(score.versus_truncation for score in truncated.scores)
    assert [score.versus_truncation is None for score in extension.scores] == [True, False, False, True, False, False]
    last = extension.at(POSITIONS)[-1].versus_truncation
    assert (last.tokens, last.over, last.baselines) == (256, "blocks", 4)
    window, best = best_of(cut, 128, 256)
    assert last.mean == pytest.approx(mean([p[:, 128:] - c for p, c in zip(patched, best, strict=True)]), abs=1e-6)
    inside = mean([p[:, :64] - q[:, :64] for p, q in zip(patched, plain, strict=True)])
    assert extension.in_window.mean == pytest.approx(inside, abs=1e-6)
    assert (unpatched.in_window, truncated.in_window) == (None, None)
    assert f"beat the best truncation, feeding only the last {window} tokens?" in found.sentence()
    assert " on these texts: " in found.sentence()
    assert not any("read by the extended model" in note for note in found.notes)


@pytest.mark.parametrize("lengths", [[65], [66], [67], [64, 65], [65, 66]])
def test_a_single_token_has_no_standard_error(make: Make, lengths: list[int]) -> None:
    checkpoint, corpus = make(lengths[-1] + 1, 1)
    plan = make_plan(checkpoint.model, method="pi", lengths=lengths, arguments={"factor": 2.0})
    result = run(checkpoint, corpus, plan)
    for score in result.extension.scores:
        assert (score.versus_truncation is None) == (score.stop <= TRAINED or score.tokens == 1)
    assert f"pi at length {lengths[-1]} beat the best truncation" in result.sentence()
    assert perplexity_page(result).markdown({})


@pytest.mark.nightly
def test_the_original_may_be_remembered(make: Make) -> None:
    """A model in training has no original beside it: what that read inside the window is kept from before."""
    checkpoint, corpus = make(129)
    plan = make_plan(checkpoint.model, method="pi", lengths=[128], arguments={"factor": 2.0})
    known = run(checkpoint, corpus, plan).extension
    before = inside_survey(checkpoint, corpus, plan)
    before.measure(before.begin())
    inside = [before.losses()[job.key] for job in before.jobs]
    ctxext.patch(checkpoint.model, "pi", factor=2.0)
    found = run(checkpoint, corpus, replace(plan, method=None, arguments={}), inside=inside, name="now")
    assert [reading.name for reading in found.readings] == [*TRUNCATIONS, "now"]
    assert found.extension.in_window == known.in_window
    assert any("read by the extended model itself" in note for note in found.notes)


@pytest.mark.nightly
def test_a_dynamic_method_has_a_pass_per_length(make: Make) -> None:
    checkpoint, corpus = make(129)
    plan = make_plan(checkpoint.model, method="dynamic_ntk", lengths=[32, 64, 96, 128], arguments={"factor": 2.0})
    found = run(checkpoint, corpus, plan)
    extension = found.extension
    # 32 and 64 tokens have the same positions, those of the unpatched model.
    assert (extension.passes, extension.tokens, extension.dynamic) == (6, 2 * (64 + 96 + 128), True)
    assert any("a pass of its own" in note for note in found.notes)
    assert extension.in_window.mean == 0.0
    ctxext.patch(checkpoint.model, "dynamic_ntk", factor=2.0)
    for score in extension.at(POSITIONS):
        own = [loss_by_position(checkpoint.model, one.input_ids[:, : score.stop + 1]) for one in corpus.documents]
        assert score.loss == pytest.approx(mean([part[:, score.start :] for part in own]), abs=1e-6)


@pytest.mark.nightly
def test_a_saved_extension_is_measured_as_saved(make: Make, bos_tokenizer: PreTrainedTokenizerFast) -> None:
    checkpoint, corpus = make(129)
    ctxext.patch(checkpoint.model, "yarn", factor=2.0)
    plan = make_plan(checkpoint.model)
    assert (plan.trained_length, plan.length) == (64, 128)
    alone = run(checkpoint, corpus, plan)
    assert [reading.name for reading in alone.readings] == [*TRUNCATIONS, "as saved"]
    assert alone.extension.in_window is None
    assert any("--reference" in note for note in alone.notes)
    cut = cut_to(checkpoint.model, [one.input_ids for one in corpus.documents])
    assert alone.readings[3].at(LENGTH)[-1].loss == pytest.approx(mean(cut[64]))
    assert alone.readings[4].at(LENGTH)[-1].loss == pytest.approx(mean(best_of(cut, 0, 128)[1]))
    beside = run(checkpoint, corpus, plan, reference=Checkpoint("original", tiny(vocab_size=257), bos_tokenizer))
    assert [reading.name for reading in beside.readings] == ["unpatched", *TRUNCATIONS, "as saved"]
    assert beside.extension.in_window is not None
    with pytest.raises(InvalidParameterError, match="extended itself"):
        run(checkpoint, corpus, plan, reference=checkpoint)


ANSWERS = ((30, 20), (110, 40), (5, 60), (70, 12), (20, 25))  # letters of a question, and of its answer


def chats(folder: Path) -> Path:
    letters = random.Random(1)
    sizes = [[letters.choices("abcdefghijklmnop", k=size) for size in pair] for pair in ANSWERS]
    rows = [
        [{"role": role, "content": "".join(said)} for role, said in zip(("user", "assistant"), pair, strict=True)]
        for pair in sizes
    ]
    (folder / "chats.jsonl").write_text("\n".join(json.dumps({"messages": row}) for row in rows), encoding="utf-8")
    return folder / "chats.jsonl"


@pytest.mark.nightly
def test_of_conversations_the_answers_alone_are_scored(model: LlamaForCausalLM, tmp_path: Path) -> None:
    trained_for(model, TRAINED)
    tokenizer = chat_tokenizer(PLAIN)
    checkpoint = Checkpoint("tiny", model, tokenizer)
    plan = make_plan(model, method="pi", lengths=[128], arguments={"factor": 2.0})
    corpus = corpus_of(read_documents([chats(tmp_path)]), tokenizer, tokens=129, shorter=True)
    assert [text.tokens for text in corpus.documents] == [59, 129, 74, 91, 54]
    found = run(checkpoint, corpus, plan)
    assert any("Of 5 conversations, written by the chat template" in note for note in found.notes)
    plain = [loss_by_position(model, one.input_ids)[0] for one in corpus.documents]
    cut = cut_to(model, [one.input_ids for one in corpus.documents])
    ctxext.patch(model, "pi", factor=2.0)
    patched = [loss_by_position(model, one.input_ids)[0] for one in corpus.documents]
    extension, control = found.extension, found.find("unpatched")
    scored = 0
    for score, other in zip(extension.at(POSITIONS), control.at(POSITIONS), strict=True):
        inside = range(score.start + 1, min(score.stop + 1, 129))
        places = [[at for at in range(said + 8, said + 9 + answer) if at in inside] for said, answer in ANSWERS]

        def loss(of: Sequence[torch.Tensor], places: list[list[int]] = places) -> float:
            return mean([losses[[at - 1 for at in chosen]] for losses, chosen in zip(of, places, strict=True)])

        assert score.tokens == sum(map(len, places)) > 0
        assert score.loss == pytest.approx(loss(patched), abs=1e-6)
        assert other.loss == pytest.approx(loss(plain), abs=1e-6)
        if score.start >= TRAINED:
            best = {window: loss([part[0] for part in parts]) for window, parts in cut.items()}
            truncated = found.find("truncated")
            (at_best,) = (one for one in truncated.at(POSITIONS) if one.start == score.start)
            assert at_best.window in best
            assert at_best.loss == pytest.approx(best[at_best.window], abs=1e-6)
        scored += score.tokens
    assert scored == sum(text.answered for text in corpus.documents)
    perplexity_page(found).figures[0].save(tmp_path / "loss.png")


@pytest.mark.slow
def test_chosen_chunks_are_a_baseline_too(make: Make) -> None:
    checkpoint, corpus = make(129)
    plan = make_plan(checkpoint.model, method="yarn", lengths=[128], arguments={"factor": 2.0}, select=True)
    result = run(checkpoint, corpus, plan)
    *short, best, extended = [reading for reading in result.readings if reading.name != "unpatched"]
    assert [reading.name for reading in short] == [*TRUNCATIONS[:-1], "selected"]
    places = [number for number, score in enumerate(best.scores) if score.start >= TRAINED]
    assert len(places) == 4
    for number in places:
        losses = {reading.name: reading.scores[number].loss for reading in short}
        least = min(losses, key=lambda name: losses[name])
        score = best.scores[number]
        assert score.loss == pytest.approx(losses[least], abs=1e-7)
        assert (score.selected, score.window) == (least == "selected", int((least.split()[1:] or [TRAINED])[0]))
        gap = extended.scores[number].versus_truncation
        assert gap.baselines == 5
        assert gap.mean == pytest.approx(extended.scores[number].loss - losses[least], abs=1e-6)
    words = "selected 64" if best.scores[places[-1]].selected else "the last"
    assert re.search(rf"beat feeding only {words}.* tokens, the best of truncations and selection\?", result.sentence())
    # The best of them is drawn alone, so that the method has its colour in both panels.
    drawn = matplotlib.figure.Figure()
    perplexity_page(result).figures[0].draw(drawn)
    names = [text for axes in drawn.axes for text in axes.texts if text.get_text() in ("YaRN", "selected chunks")]
    assert [(text.get_text(), text.get_color()) for text in names] == [("YaRN", COLOURS["yarn"])] * 2


def test_a_table_of_positions_is_read_no_further_than_it_has_rows(make: Make) -> None:
    model = tiny("gpt2", vocab_size=257)
    checkpoint, corpus = replace(make(129)[0], model=model), make(129)[1]
    found = run(checkpoint, corpus, make_plan(model, method="pi", arguments={"factor": 2.0}))
    assert [reading.name for reading in found.readings] == [*TRUNCATIONS, "pi"]
    assert found.extension.in_window is not None
    for given in ({"lengths": [65]}, {"arguments": {"trained_length": 65}}):
        with pytest.raises(InvalidParameterError, match="gpt2 has positions for 64 tokens and cannot read 65"):
            make_plan(model, **given)


@pytest.mark.parametrize("method", ["yarn", "dynamic_yarn"])
@pytest.mark.parametrize(
    "rope", [{"rope_type": "dynamic"}, {"rope_type": "longrope", **LONG}], ids=["dynamic", "longrope"]
)
def test_a_control_that_follows_the_length_is_read_at_each(make: Make, method: str, rope: dict[str, Any]) -> None:
    """However the extended model is read."""
    (checkpoint, corpus), lengths = make(257), (64, 128, 256)
    rope = {"rope_theta": 1e4, "factor": 4.0, **rope}
    checkpoint = replace(checkpoint, model=tiny("llama", vocab_size=257, rope_parameters=rope))

    def read(length: int, shown: int) -> float:
        texts = [loss_by_position(checkpoint.model, one.input_ids[:, : shown + 1]) for one in corpus.documents]
        return mean([text[:, :length] for text in texts])

    losses = {length: read(length, length) for length in lengths}
    assert losses[64] != pytest.approx(read(64, 256), abs=1e-4)
    given = {"factor": 4.0, "scaling": "replace", "trained_length": 64}
    control = run(checkpoint, corpus, make_plan(checkpoint.model, lengths=lengths, method=method, arguments=given))
    assert {score.stop: score.loss for score in control.readings[0].at(LENGTH)} == pytest.approx(losses, abs=1e-6)


def test_bad_plans(make: Make) -> None:
    model = make(20)[0].model
    twice = {"arguments": {"factor": 2.0}}
    for options, message in (
        (twice, "factor: only with a method"),
        ({"lengths": [1]}, "at least 2 tokens"),
        (twice | {"lengths": [200], "method": "yarn"}, "200 tokens is beyond what the model is extended for: 128"),
    ):
        with pytest.raises(InvalidParameterError, match=message):
            make_plan(model, **options)  # type: ignore[arg-type]
    assert "_ctxext" not in model.__dict__


@pytest.fixture
def folder(make: Make, tmp_path: Path) -> Path:
    checkpoint, _ = make(20)
    checkpoint.model.save_pretrained(tmp_path / "checkpoint")  # type: ignore[operator]
    checkpoint.tokenizer.save_pretrained(tmp_path / "checkpoint")
    for name in ("one", "two"):
        (tmp_path / f"{name}.txt").write_text("".join(f"{name} {n}, " for n in range(60)), encoding="utf-8")
    return tmp_path


def asked(folder: Path, *options: object) -> list[str]:
    texts = ["-t", folder / "one.txt", "-t", folder / "two.txt"]
    return ["eval", "perplexity", *map(str, [folder / "checkpoint", *texts, *options])]


@pytest.mark.nightly
def test_command_to_files_and_back(folder: Path) -> None:
    files = [folder / name for name in ("result.json", "page.md", "loss.png")]
    outputs = [part for file in files for part in ("-o", file)]
    found = command(*asked(folder, "-m", "yarn", "-f", 2, *outputs), code=0)
    for words in (
        "in front of each: <s> (id 256)",
        "bf16 (stored in float32)",
        "Loss minus the best truncation's",
        "(last 16)",
        "Inside the trained window, YaRN minus unpatched",
        "Does yarn at positions",
    ):
        assert words in found.output
    result = PerplexityResult.from_dict(json.loads(files[0].read_text(encoding="utf-8")))
    assert result.provenance.documents == ("one", "two")
    assert set(result.provenance.extensions) == {"unpatched", "yarn"}
    assert PerplexityResult.from_dict(json.loads(json.dumps(result.to_dict()))) == result
    page = files[1].read_text(encoding="utf-8")
    assert result.sentence() in page.replace("\\", "")
    assert f"{result.readings[-1].scores[-1].perplexity:.1f} |" in page
    assert files[2].read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(InvalidParameterError, match=r"of format 3: found format 2"):
        PerplexityResult.from_dict({**result.to_dict(), "format": 2})


@pytest.mark.nightly
def test_two_processes_give_the_same(folder: Path) -> None:
    alone, shared = folder / "alone.json", folder / "shared.json"
    given = asked(folder, "-m", "dynamic_yarn", "-f", 2, "-l", 96, "-l", 128)
    command(*given, "-o", alone, code=0)
    said = launched([*given, "-o", str(shared)], folder)
    assert said.count("Does dynamic_yarn at positions") == 1, "one process talks"
    printed = launched([*given, "--json"], folder)  # without an output they have no files in common
    texts = (alone.read_text(), shared.read_text(), printed)
    reports = [PerplexityResult.from_dict(json.loads(text)).readings for text in texts]
    one, *others = ([(read.name, [score.loss for score in read.scores]) for read in report] for report in reports)
    assert others == [[(name, pytest.approx(losses, rel=1e-5)) for name, losses in one]] * 2


def test_command_for_programs(folder: Path) -> None:
    printed = json.loads(command(*asked(folder, "-l", 48, "--json"), code=0).stdout)
    assert ([one["name"] for one in printed["readings"]], printed["lengths"]) == (["unpatched"], [12, 24, 48])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-l", "5000", "-m", "yarn"], "0 of 2 documents have the 5,001 tokens"),
        (["-n", "3", "-l", "64"], "2 of 2 documents have the 65 tokens asked for, and 3 are wanted"),
        (["-o", "x.csv"], "give a file that ends in .json, .md or .png. The JSON of a report"),
        (["-o", "nowhere/x.json"], "no directory nowhere"),
        (["-o", "x.svg"], "x.svg cannot be written"),
        (["--memory", "2 apples"], "written like 2GiB"),
        (["--memory", "1MiB"], "found --memory"),
    ],
)
def test_bad_commands(folder: Path, options: list[str], message: str) -> None:
    assert message in command(*asked(folder, *options), code=1).output


def prefixed(tokens: Sequence[str]) -> PreTrainedTokenizerFast:
    """Bytes, with so many special tokens in front of a text, as GLM-4 puts two there."""
    made = make_tokenizer(bos=True)
    made.add_special_tokens({"additional_special_tokens": ["<gmask>", "<sop>"]})
    special = [(token, made.convert_tokens_to_ids(token)) for token in tokens]
    single = " ".join([*tokens, "$A"])
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("front", [[], ["<s>"], ["<gmask>", "<sop>"], ["<s>", "<gmask>", "<sop>"]], ids=len)
def test_inside_the_window_both_sides_read_the_same_tokens(front: list[str]) -> None:
    """Nothing is truncated there and self_extend changes nothing, so that the losses are equal, token by token."""
    model = trained_for(byte_model(), TRAINED)
    model.resize_token_embeddings(260)
    texts = [Document(f"text {n}", "".join(map(chr, torch.randint(97, 123, (150,)).tolist()))) for n in range(2)]
    corpus = corpus_of(texts, prefixed(front), tokens=97)
    assert corpus.documents[0].prefix == len(front)
    plan = make_plan(model, lengths=[96], method="self_extend", arguments={"target_length": 2 * TRAINED})
    survey = prepare(Checkpoint("tiny", model, prefixed(front)), corpus, plan)
    survey.measure(survey.begin())
    losses = survey.losses()
    cut, own = (
        [torch.cat([losses[job.key] for job in text]) for text in reading.at[96]]
        for reading in (*(one for one in survey.readings if one.name == f"truncated {TRAINED}"), survey.readings[-1])
    )
    for extended, plain in zip(own, cut, strict=True):
        assert len(extended) == len(plain) == 96
        torch.testing.assert_close(extended[:TRAINED], plain[:TRAINED], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_trained_length_needs_no_method_and_all_else_does(folder: Path) -> None:
    """Positions of a plain model are told apart by it, where its config states another length or none."""
    given = asked(folder, "--length", 64)
    told = command(*given, "--trained-length", 32, "--json", code=0)
    assert json.loads(told.stdout)["trained_length"] == 32
    for option in (["--factor", 2], ["--target", 128], ["--scaling", "replace"], ["-p", "beta_fast=16"]):
        assert "only with a method" in command(*given, *option, code=1).stderr, option


def test_a_report_knows_the_trained_length_that_was_given(make: Make) -> None:
    checkpoint, corpus = make(129)
    plan = make_plan(checkpoint.model, method="yarn", lengths=[128], arguments={"trained_length": 32})
    found = run(checkpoint, corpus, plan)
    assert (found.trained_length, found.provenance.trained_length) == (32, 32)
    windows = [reading.name for reading in found.readings if reading.name.startswith("truncated ")]
    assert windows == [f"truncated {size}" for size in (8, 16, 24, 32)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("least", "most"), [(3.2, 9.9), (5.1, 19.0), (21.0, 66.0), (1.05, 3.4), (0.004, 0.03), (8.0, 4e5)]
)
def test_the_figure_has_numbers_on_its_axis(make: Make, least: float, most: float) -> None:
    checkpoint, corpus = make(65)
    found = run(checkpoint, corpus, make_plan(checkpoint.model, lengths=[64]))
    (reading,) = [one for one in found.readings if one.name == "unpatched"]
    losses = iter([least, *[most] * len(reading.scores)])
    scores = tuple(replace(score, loss=math.log(next(losses))) for score in reading.scores)
    drawn = matplotlib.figure.Figure(layout="constrained")
    perplexity_page(replace(found, readings=(replace(reading, scores=scores),))).figures[0].draw(drawn)
    drawn.draw_without_rendering()
    heights = [label.get_text() for label in drawn.axes[0].get_yticklabels()]
    inside = [number for height in heights if least * 0.9 < (number := float(height.replace(",", ""))) < most * 1.1]
    assert len(set(inside)) >= 3


@pytest.mark.parametrize("scale", [3000.0, 60.0])
def test_losses_that_no_perplexity_can_hold_make_a_report(make: Make, scale: float) -> None:
    checkpoint, corpus = make(129)
    with torch.no_grad():
        checkpoint.model.lm_head.weight.mul_(scale)  # type: ignore[union-attr,operator]
    found = run(checkpoint, corpus, make_plan(checkpoint.model, method="pi", arguments={"factor": 2.0}))
    page = perplexity_page(found)
    assert ("| inf |" in page.markdown()) == (scale == 3000)
    page.figures[0].draw(matplotlib.figure.Figure(layout="constrained"))
    json.dumps(found.to_dict(), allow_nan=False)


class Closing(io.TextIOWrapper):
    """Standard output whose reader has gone, as that of ``| head -1``."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


def test_files_are_there_before_anything_is_printed(make: Make, tmp_path: Path) -> None:
    checkpoint, corpus = make(129, 1)
    plan = make_plan(checkpoint.model, method="pi", lengths=[128], arguments={"factor": 2.0})
    result = run(checkpoint, corpus, plan)
    files = [tmp_path / f"loss.{ending}" for ending in ("json", "md", "png")]
    console = terminal(file=Closing(io.BytesIO()))
    with pytest.raises((BrokenPipeError, SystemExit)):
        OutputOptions(output=files).write(result, perplexity_page(result), console)
    assert all(file.stat().st_size for file in files)


@pytest.mark.parametrize("charset", some(["ascii", "latin-1", "cp1252", "cp437"], "ascii", "cp1252"))
def test_a_terminal_without_a_character_shows_a_question_mark(folder: Path, charset: str) -> None:
    text = folder / "\u6e29\u00b1\u00d7.txt"
    text.write_text("".join(f"word {n}, " for n in range(60)), encoding="utf-8")
    given = ["eval", "perplexity", str(folder / "checkpoint"), "-t", str(text), "--method", "pi", "--length", "128"]
    result = CliRunner(charset=charset).invoke(app, given)
    assert result.exit_code == 0, result.output
    assert "?" in result.stdout
