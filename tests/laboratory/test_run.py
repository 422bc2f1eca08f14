"""The laboratory itself, at the smallest size: who is measured, what is kept, what a kill costs, the page, mistakes."""

from __future__ import annotations

import concurrent.futures
import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import ctxext
from ctxext.errors import CtxextError, IncompatibleError, InvalidParameterError, ResultsError, UnknownNameError
from ctxext.evaluation.report.page import write_page
from ctxext.laboratory import run as work
from ctxext.laboratory.report import lab_page
from ctxext.laboratory.result import LabResult
from ctxext.laboratory.run import PRESETS, LabJob, prepare
from ctxext.laboratory.subjects import EXTENSIONS, subjects
from ctxext.laboratory.tasks import TASKS, byte_text
from ctxext.measuring.loss import loss_by_position, truncated_loss
from ctxext.measuring.survey import Answer
from ctxext.texts.documents import read_documents
from tests._programs import command
from tests.laboratory._laboratory import SMALL, TINY, laboratory

PAIR = replace(SMALL, layers=2)


def found(result: LabResult) -> Any:
    """Everything but what a clock says."""
    readings = [replace(reading, seconds=0.0) for reading in result.readings]
    return readings, result.settings, result.text_sha256, result.provenance | {"date": ""}


@pytest.mark.slow
def test_a_cell_whose_losses_are_no_numbers_is_refused_by_name(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it is trained, or when it is tested; nothing of it is written down."""
    torn = laboratory(tmp_path, text, replace(TINY, rate=1e30), only=("rope",), tasks=("text",))
    with pytest.raises(IncompatibleError, match="infinite losses: rope, text, seed 0, while it is trained"):
        torn.run()
    tested = laboratory(tmp_path, text, only=("rope",), seeds=1)
    monkeypatch.setattr("ctxext.laboratory.run._right", lambda *_: torch.full((4,), torch.nan))
    with pytest.raises(IncompatibleError, match="infinite losses: rope, parity, seed 0"):
        tested.run()
    assert {job.task for job in tested.begin()} == {"parity", "text"}


def test_what_is_done_beside_a_job_that_fails_is_kept(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever of the processes that end together is asked first."""
    monkeypatch.setattr(concurrent.futures, "ProcessPoolExecutor", lambda workers, *_: Pool(workers))
    monkeypatch.setattr(LabJob, "ask", one_fails)
    for fails in range(4):
        jobs = laboratory(None, text, only=("rope", "alibi"), tasks=("parity",), workers=4)
        failing = jobs.begin()[fails].name
        monkeypatch.setattr("tests.laboratory.test_run.FAILING", failing)
        with pytest.raises(IncompatibleError, match="NaN"):
            jobs.run()
        assert {job.name for job in jobs.begin()} == {failing}


FAILING = ""


class Pool(concurrent.futures.ThreadPoolExecutor):
    """Threads that do each job at once, so that all are done before the first is asked for."""

    def submit(self, *given: Any) -> Any:
        future = super().submit(*given)
        concurrent.futures.wait([future])
        return future


def one_fails(job: LabJob) -> Answer:
    if job.name == FAILING:
        raise IncompatibleError("NaN")
    return Answer({"seconds": 1.0})


def readable(result: LabResult) -> str:
    """The page without what a clock says."""
    readings = tuple(replace(reading, seconds=0.0) for reading in result.readings)
    about = result.provenance | {"date": "2026-01-01"}
    return lab_page(replace(result, readings=readings, seconds=0.0, provenance=about)).html()


@pytest.fixture(scope="module")
def result(text: Path) -> LabResult:
    return laboratory(None, text).run()


@pytest.mark.nightly
def test_what_is_kept_of_a_cell(result: LabResult) -> None:
    names = [reading.name for reading in result.of("text")]
    assert names == ["rope", *(f"rope + {name}" for name in EXTENSIONS), "alibi"]
    for reading in result.of("text"):
        assert reading.values.shape == (2, 4, len(work.blocks_of(16)) - 1)
        assert reading.steps == 3
        assert 3 < result.at(reading, 8).mean() < 8, "about log 256 after three steps"
    rope = result.find("text", "rope")
    assert torch.tensor(rope.truncated).shape == (2, 4, 3)
    assert torch.tensor(rope.order).shape == (2, 4)
    parity = result.find("parity", "alibi")
    assert parity.values.shape == (2, 4, 5)


@pytest.mark.nightly
def test_the_numbers_of_a_cell_by_hand(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model that a job trained is read again: its losses by block, its shares, and what each extension changes."""
    trained: list[Any] = []
    real = LabJob._answer

    def kept(job: LabJob, model: Any, *rest: Any) -> Any:
        trained.append(model)
        return real(job, model, *rest)

    monkeypatch.setattr(LabJob, "_answer", kept)
    read = byte_text(list(read_documents([text])), 8 * TINY.length, TINY.windows)
    jobs = [LabJob.of(task, subjects()["rope"], 0, TINY, own) for task, own in (("text", read), ("parity", None))]
    on_text, on_puzzles = (job.ask().values["readings"] for job in jobs)
    edges = work.blocks_of(TINY.length)
    for name in ("", *EXTENSIONS):
        for model in trained if name else ():
            ctxext.patch(model, name, factor=8.0)
        with torch.no_grad():
            logits = trained[0](read.tested[:, :-1], use_cache=False).logits
            losses = F.cross_entropy(logits.mT, read.tested[:, 1:], reduction="none")
            parity, puzzles = TASKS["parity"], torch.Generator().manual_seed(2**31)
            tests = [parity.example(length, TINY.puzzle_rows, puzzles) for length in parity.lengths()]
            shares = [(trained[1](tokens).logits.argmax(-1) == labels).double().mean(1) for tokens, labels in tests]
        for model in trained if name else ():
            ctxext.unpatch(model)
        blocks = torch.stack([losses[:, a:b].mean(1) for a, b in itertools.pairwise(edges)], 1)
        torch.testing.assert_close(torch.tensor(on_text[name]["scores"]), blocks, rtol=0, atol=1e-3)
        found = torch.tensor(on_puzzles[name]["scores"]).double()
        torch.testing.assert_close(found, torch.stack(shares, 1), rtol=0, atol=1e-4)
    # How much worse each last byte is predicted when all but the two last are shuffled.
    shuffling, worse = torch.Generator().manual_seed(0), []
    for window in read.tested:
        for start in [1 + place * 7 // 8 for place in range(8)]:
            row = window[start : start + 9]
            mixed = torch.cat([row[torch.randperm(7, generator=shuffling)], row[7:]])
            last = [loss_by_position(trained[0], ids[None])[0, -1] for ids in (mixed, row)]
            worse.append(last[0] - last[1])
    order = torch.stack(worse).view(TINY.windows, 8).mean(1)
    torch.testing.assert_close(torch.tensor(on_text[""]["order"]), order, rtol=0, atol=1e-3)
    # The last 16 bytes at most, at least half of them, for each byte beyond the first 16; by octaves.
    tail = truncated_loss(trained[0], read.tested, window=16, stride=8, start=16)
    octaves = torch.stack([tail[:, a:b].mean(1) for a, b in ((0, 16), (16, 48), (48, 112))], 1)
    torch.testing.assert_close(torch.tensor(on_text[""]["truncated"]), octaves, rtol=0, atol=1e-3)


@pytest.mark.slow
def test_who_is_slow_gets_three_times_the_steps_and_the_page_says_so(text: Path) -> None:
    measured = laboratory(None, text, only=("rope", "nope"), tasks=("text",), seeds=1).run()
    steps = {reading.name: reading.steps for reading in measured.readings}
    assert (steps["rope"], steps["nope"]) == (3, 9)
    for result in (measured, replace(measured, readings=measured.readings[-1:])):
        assert "is trained longer, since that leaves a plateau late; all others take 3." in lab_page(result).html()


@pytest.mark.nightly
def test_order_is_learned_by_training_and_not_before(tmp_path: Path) -> None:
    """What follows the byte ``a`` here depends on the one before it."""
    path = tmp_path / "rhythm.txt"
    path.write_text("aab" * 4000, encoding="utf-8")
    settings = replace(TINY, text=PAIR, text_steps=250, windows=16, rate=0.005)
    asked: dict[str, Any] = {"only": ("alibi",), "tasks": ("text",), "seeds": 1}
    short = replace(settings, text_steps=1)
    learned, blank = (laboratory(None, path, each, **asked).run() for each in (settings, short))
    assert learned.evidence(learned.of("text")[0]).mean > 0.1
    assert learned.has_learned(learned.of("text")[0])
    assert not blank.has_learned(blank.of("text")[0])


@pytest.mark.nightly
def test_a_kill_costs_one_cell_and_changes_nothing(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []
    real = LabJob.ask

    def killed_at_the_third(job: LabJob) -> Any:
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(job.name)
        return real(job)

    monkeypatch.setattr(LabJob, "ask", killed_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        laboratory(tmp_path, text, only=("alibi",)).run()
    journal = tmp_path / work.JOURNAL
    journal.write_text(journal.read_text() + '{"key": "torn', encoding="utf-8")
    after: list[str] = []

    def counted(job: LabJob) -> Any:
        after.append(job.name)
        return real(job)

    monkeypatch.setattr(LabJob, "ask", counted)
    resumed = laboratory(tmp_path, text, only=("alibi",))
    with pytest.raises(ResultsError, match="2 jobs are not finished"):
        resumed.result()
    again = resumed.run()
    assert len(after) == 2
    assert set(after).isdisjoint(measured)
    at_once = laboratory(None, text, only=("alibi",)).run()
    assert found(again) == found(at_once)
    assert readable(again) == readable(at_once)


@pytest.mark.nightly
def test_processes_find_what_one_process_finds(result: LabResult, text: Path, tmp_path: Path) -> None:
    told: list[str] = []
    both = laboratory(tmp_path, text, only=("rope",), tasks=("parity",), workers=2)
    measured = both.run(lambda name, cost: told.append(name))
    assert sorted(told) == ["rope, parity, seed 0", "rope, parity, seed 1"]
    assert found(measured)[0] == [one for one in found(result)[0] if (one.task, one.subject) == ("parity", "rope")]


@pytest.mark.slow
def test_other_settings_are_other_cells(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = laboratory(tmp_path, text, tasks=("parity",), only=("rope",), seeds=1)
    one.run()
    assert one.begin() == ()
    assert laboratory(tmp_path, text, tasks=("parity",), only=("rope",), seeds=2).begin()[0].seed == 1
    more = replace(TINY, puzzle_steps=3)
    assert len(laboratory(tmp_path, text, more, tasks=("parity",), only=("rope",), seeds=1).begin()) == 1
    newer = work.versions() | {"torch": "99"}  # which the page would name as what all cells were made with
    monkeypatch.setattr(work, "versions", lambda: newer)
    assert len(laboratory(tmp_path, text, tasks=("parity",), only=("rope",), seeds=1).begin()) == 1


def test_a_folder_of_something_else_is_refused(text: Path, tmp_path: Path) -> None:
    (tmp_path / work.JOURNAL).write_text('{"made_by": "ctxext choose", "format": 1}\n', encoding="utf-8")
    with pytest.raises(ResultsError, match="holds no jobs of `ctxext lab`"):
        laboratory(tmp_path, text, tasks=("parity",)).run()


@pytest.mark.nightly
def test_the_page_says_who_learned_order_before_anything_beyond(result: LabResult, tmp_path: Path) -> None:
    written = write_page(lab_page(result), tmp_path, "lab", "{}")
    assert [path.name for path in written] == ["lab.html", "lab.json", "lab.md", "figures"]
    assert sorted(path.name for path in written[3].iterdir()) == ["loss-by-position.png", "right-by-length.png"]
    shown = written[0].read_text(encoding="utf-8")
    places = [shown.index(part) for part in ("Did it learn order at all?", "<img", "What was published", "All numbers")]
    assert places == sorted(places)
    assert shown.count("<img") == 2
    assert "http" not in re.sub(r'xmlns(:\w+)?="[^"]+"', "", shown), "it needs nothing else"
    for claim in ("not measured", "not at this size"):
        assert claim in shown


def test_the_presets_are_sound() -> None:
    assert set(PRESETS) == {"quick", "full"}
    for preset in PRESETS.values():
        assert {"text", "parity"} <= set(preset.tasks) <= {"text", *TASKS}
        assert preset.seeds >= 2, "an error over seeds"
        assert preset.settings.length % 8 == 0


@pytest.mark.parametrize(
    ("asked", "kind", "message"),
    [
        ({"only": ("alibbi",)}, UnknownNameError, "Unknown encoding or baseline 'alibbi'. Did you mean 'alibi'"),
        ({"tasks": ("sort",)}, UnknownNameError, "Unknown task 'sort'.*order"),
        ({"preset": "slow"}, UnknownNameError, "Unknown preset 'slow'.*full, quick"),
        ({"seeds": 0}, InvalidParameterError, "seeds must be at least 1, found 0"),
        ({"workers": 0}, InvalidParameterError, "workers must be at least 1, found 0"),
        ({"only": ("rope", "rope")}, InvalidParameterError, "Give each encoding once; found rope, rope"),
        ({"tasks": ("copy", "copy")}, InvalidParameterError, "Give each task once; found copy, copy"),
        ({"tasks": ("copy",), "text": ("a.txt",)}, InvalidParameterError, "read by the task 'text' alone, found copy"),
        ({"text": ("no-such.txt",)}, InvalidParameterError, "Cannot read the text 'no-such.txt'"),
    ],
)
def test_mistakes_are_told_before_anything_is_measured(
    asked: dict[str, Any], kind: type[CtxextError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        prepare(None, **asked)


@pytest.mark.nightly
def test_the_command_trains_and_shows(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, "quick", replace(PRESETS["quick"], settings=TINY))
    given = ["--only", "rope,alibi", "-t", "text", "--text", text, "--seeds", 1, "--workers", 1, "-o", tmp_path]
    said = command("lab", *given, code=0)
    assert said.stdout.index("learn order") < said.stdout.index("published claims")
    assert (tmp_path / "lab.html").is_file()
    wrong = command("lab", "--task", "sort", "-o", tmp_path)
    assert (wrong.exit_code, "Unknown task 'sort'" in wrong.stderr) == (1, True)
