"""The work of the laboratory: each subject trained and tested on each task with each seed, kept as it goes."""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import itertools
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel, get_cosine_schedule_with_warmup, logging

from ctxext import patching
from ctxext.errors import InvalidParameterError, ResultsError, UnknownNameError
from ctxext.evaluation.forward import Progress
from ctxext.evaluation.journal import Journal
from ctxext.evaluation.loss import loss_by_position, truncated_loss
from ctxext.evaluation.provenance import command, machine, now, versions
from ctxext.evaluation.statistics import check_finite
from ctxext.laboratory.result import LabReading, LabResult, blocks_of, octaves_of
from ctxext.laboratory.subjects import EXTENSIONS, ROPE, Body, Variant, subject_named, subjects
from ctxext.laboratory.tasks import NOT_ASKED, REACH, TASKS, TEXT, ByteText, byte_text, task_named
from ctxext.texts.documents import read_documents
from ctxext.version import __version__

JOURNAL = "cells.jsonl"
SLOWER = 3
"""How many times the steps a slow subject gets."""
# Test texts that go through a model at once.
TOGETHER = 8


@dataclass(frozen=True, kw_only=True)
class LabSettings:
    """How much is trained and tested.

    Args:
        text: sizes of the models that read text.
        puzzle: sizes of the models that do puzzles.
        length: bytes that are read at once in training; the test reads 8 times as many.
        text_steps: of training on text.
        text_rows: stretches of text in a step.
        windows: stretches of text in the test.
        puzzle_steps: of training on a puzzle.
        puzzle_tokens: tokens in such a step, about.
        puzzle_rows: puzzles of each length in the test.
        rate: the greatest learning rate, the same for all.
    """

    text: Body
    puzzle: Body
    length: int
    text_steps: int
    text_rows: int
    windows: int
    puzzle_steps: int
    puzzle_tokens: int
    puzzle_rows: int
    rate: float = 3e-3


@dataclass(frozen=True, kw_only=True)
class LabPreset:
    """What is measured where nothing else is asked for.

    Args:
        settings: how much.
        seeds: how many.
        tasks: which.
    """

    settings: LabSettings
    seeds: int
    tasks: tuple[str, ...]


PRESETS = {
    "quick": LabPreset(
        settings=LabSettings(
            text=Body(hidden=64, layers=3),
            puzzle=Body(hidden=64, layers=2),
            length=128,
            text_steps=250,
            text_rows=16,
            windows=32,
            puzzle_steps=1000,
            puzzle_tokens=1400,
            puzzle_rows=32,
        ),
        seeds=2,
        tasks=(TEXT, "parity"),
    ),
    "full": LabPreset(
        settings=LabSettings(
            text=Body(hidden=128, layers=4),
            puzzle=Body(hidden=64, layers=2),
            length=256,
            text_steps=3000,
            text_rows=32,
            windows=64,
            puzzle_steps=3000,
            puzzle_tokens=2800,
            puzzle_rows=64,
        ),
        seeds=5,
        tasks=(TEXT, *TASKS),
    ),
}


@dataclass(frozen=True, kw_only=True)
class LabCell:
    """The smallest piece of work, done, kept and resumed by itself.

    Args:
        task: its name.
        subject: who is trained.
        seed: of the weights and of what is drawn in training; what is tested is the same for all.
        settings: how much.
        text_sha256: of the text, where text is read.
    """

    task: str
    subject: Variant
    seed: int
    settings: LabSettings
    text_sha256: str = ""

    @property
    def name(self) -> str:
        """To show."""
        return f"{self.subject.name}, {self.task}, seed {self.seed}"

    @property
    def steps(self) -> int:
        """Of training."""
        steps = self.settings.text_steps if self.task == TEXT else self.settings.puzzle_steps
        return steps * (SLOWER if self.subject.is_slow else 1)

    @property
    def key(self) -> str:
        """A hash of everything that the answer depends on."""
        told = json.dumps([__version__, asdict(self)], sort_keys=True)
        return hashlib.sha256(told.encode()).hexdigest()[:16]

    @property
    def cost(self) -> float:
        """In tokens of training."""
        one = self.settings.length * self.settings.text_rows if self.task == TEXT else self.settings.puzzle_tokens
        return float(self.steps * one)

    def measure(self, text: ByteText | None) -> dict[str, Any]:
        """Train and test; return what was measured as JSON values.

        Raises:
            IncompatibleError: a loss or a share is no number.
        """
        with _one_thread():
            began = time.process_time()
            answer = self._on_text(text) if text is not None else self._on_puzzles()
            for extension, reading in answer["readings"].items():
                for values in reading.values():
                    check_finite(
                        torch.tensor(values), f"{self.name}, extended by {extension}" if extension else self.name
                    )
            return answer | {"seconds": round(time.process_time() - began, 1)}

    def _on_text(self, text: ByteText) -> dict[str, Any]:
        settings = self.settings
        model = self.subject.build(settings.text, vocabulary=256, trained_length=settings.length, seed=self.seed)
        generator = torch.Generator().manual_seed(self.seed)
        last = self._train(model, lambda: text.drawn(settings.length, settings.text_rows, generator))
        truncated = _in_parts(
            lambda part: truncated_loss(
                model, part, window=settings.length, stride=settings.length // 2, start=settings.length
            ),
            text.tested,
        )
        octaves = [edge - settings.length for edge in octaves_of(settings.length)]
        edges = blocks_of(settings.length)
        readings = {
            name: {"scores": _means(_in_parts(lambda part: loss_by_position(model, part), text.tested), edges)}
            for name in self._extended(model)
        }
        readings[""] |= {
            "truncated": _means(truncated, octaves),
            "order": _rounded(_order_learned(model, text, settings.length)),
        }
        return {"parameters": _weights_of(model), "loss": round(last, 4), "readings": readings}

    def _on_puzzles(self) -> dict[str, Any]:
        settings, task = self.settings, TASKS[self.task]
        trained = task.tokens(task.trained)
        model = self.subject.build(settings.puzzle, vocabulary=task.vocabulary, trained_length=trained, seed=self.seed)
        generator = torch.Generator().manual_seed(self.seed)

        def drawn() -> tuple[Tensor, Tensor]:
            length = task.drawn_length(generator)
            rows = max(8, min(64, settings.puzzle_tokens // task.tokens(length)))
            return task.example(length, rows, generator)

        last = self._train(model, drawn)
        readings: dict[str, Any] = {}
        for name in self._extended(model):
            tested = torch.Generator().manual_seed(2**31)  # the same puzzles for all
            shares = [_right(model, *task.example(length, settings.puzzle_rows, tested)) for length in task.lengths()]
            readings[name] = {"scores": _rounded(torch.stack(shares, 1))}
        return {"parameters": _weights_of(model), "loss": round(last, 4), "readings": readings}

    def _train(self, model: PreTrainedModel, drawn: Callable[[], tuple[Tensor, Tensor]]) -> float:
        """AdamW and a cosine, the same for all; the mean loss of the last tenth of the steps."""
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), self.settings.rate, betas=(0.9, 0.98), weight_decay=0.01)
        schedule = get_cosine_schedule_with_warmup(optimizer, min(50, self.steps // 5), self.steps)
        losses = []
        for _ in range(self.steps):
            tokens, labels = drawn()
            logits = model(input_ids=tokens, use_cache=False).logits.float()
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=NOT_ASKED)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            check_finite(loss, f"{self.name}, while it is trained")
            losses.append(loss.item())
        model.eval()
        latest = losses[-max(1, self.steps // 10) :]
        return sum(latest) / len(latest)

    def _extended(self, model: PreTrainedModel) -> Iterator[str]:
        """The model as it was trained (an empty name), then, if it rotates, under each extension without training."""
        yield ""
        for name in EXTENSIONS if self.subject.name == ROPE else ():
            with patching.patched(model, name, factor=float(REACH)):
                yield name


def _order_learned(model: PreTrainedModel, text: ByteText, length: int) -> Float[Tensor, " windows"]:
    """How much worse bytes inside the trained length are predicted when all before the last byte is shuffled.

    The last byte stays, since that one is known without any order. About nothing: order is not used.
    """
    context, places = length // 2, min(16, length // 2)
    starts = [1 + place * (length - context - 1) // places for place in range(places)]
    generator = torch.Generator().manual_seed(0)
    rows = torch.stack([text.tested[:, start : start + context + 1] for start in starts], 1)
    shuffled = rows.clone()
    for row in shuffled.flatten(0, 1):
        row[: context - 1] = row[torch.randperm(context - 1, generator=generator)]
    worse = [
        _in_parts(lambda part: loss_by_position(model, part, start=context - 1), side.flatten(0, 1), 8 * TOGETHER)
        for side in (shuffled, rows)
    ]
    return (worse[0] - worse[1]).view(len(rows), places).mean(1)


@torch.no_grad()
def _right(model: PreTrainedModel, tokens: Tensor, labels: Tensor) -> Float[Tensor, " rows"]:
    """The share of the answers that are right, puzzle by puzzle."""
    said: Tensor = model(input_ids=tokens, use_cache=False).logits.argmax(-1)
    asked = labels != NOT_ASKED
    return ((said == labels) & asked).sum(1) / asked.sum(1)


def _in_parts(work: Callable[[Tensor], Tensor], rows: Tensor, together: int = TOGETHER) -> Tensor:
    return torch.cat([work(part) for part in torch.split(rows, together)])


def _means(losses: Float[Tensor, "rows positions"], edges: Sequence[int]) -> Any:
    parts = [losses[:, start:stop].mean(1) for start, stop in itertools.pairwise(edges)]
    return _rounded(torch.stack(parts, 1))


def _rounded(values: Tensor) -> Any:
    return [_rounded(one) if one.ndim else round(one.item(), 4) for one in values]


def _weights_of(model: PreTrainedModel) -> int:
    return sum(weight.numel() for weight in model.parameters())


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Every cell runs on one thread: such small models get no faster by more, and two cells then do not disturb."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(eq=False, kw_only=True)
class Laboratory:
    """What is to be measured; ``run`` it, as often as it takes.

    Args:
        cells: all of it.
        text: that is read; None where only puzzles are done.
        journal: where finished cells are kept.
        workers: how many processes work at once; 1: this one alone.
        preset: what the settings are called.
    """

    cells: tuple[LabCell, ...]
    text: ByteText | None
    journal: Journal
    workers: int = 2
    preset: str = "quick"
    finished: dict[str, dict[str, Any]] = field(init=False, default_factory=dict)

    @property
    def left(self) -> list[LabCell]:
        """The cells that are not finished: seed by seed, the longest first."""
        finished = self.journal.finished()
        open_cells = [cell for cell in self.cells if cell.key not in finished]
        return sorted(open_cells, key=lambda cell: (cell.seed, -cell.cost))

    @property
    def done(self) -> str:
        """How much is finished, in words."""
        return f"{len(self.cells) - len(self.left)} of {len(self.cells)} {self.journal.work}"

    def run(self, progress: Progress = lambda *_: None) -> LabResult:
        """Measure what is left, and put everything together.

        Args:
            progress: called with what is finished and what it cost, in tokens of training.

        Raises:
            ResultsError: the journal is of something else or cannot be written, or a process was killed.
        """
        self.journal.claim({"made_by": "ctxext lab"})
        for cell, found in self._measured(self.left):
            self.journal.keep({"key": cell.key, "cell": cell.name, "date": now(), **found})
            progress(cell.name, cell.cost)
        return self.result()

    def _measured(self, cells: list[LabCell]) -> Iterator[tuple[LabCell, dict[str, Any]]]:
        if self.workers == 1 or len(cells) < 2:
            for cell in cells:
                yield cell, cell.measure(self.text if cell.task == TEXT else None)
            return
        pool = concurrent.futures.ProcessPoolExecutor(
            self.workers, multiprocessing.get_context("spawn"), _begin_worker, (self.text,)
        )
        try:
            jobs = {pool.submit(_measure_in_worker, cell): cell for cell in cells}
            for job in concurrent.futures.as_completed(jobs):
                yield jobs[job], job.result()
        except concurrent.futures.process.BrokenProcessPool as error:
            raise ResultsError(
                "A process of the laboratory was killed, perhaps for want of memory. Finished cells are kept: run the "
                "same command again, with --workers 1 if it happens again."
            ) from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for child in multiprocessing.active_children():
                child.terminate()

    def result(self) -> LabResult:
        """Everything that is finished, put together.

        Raises:
            ResultsError: something is not finished.
        """
        finished = self.journal.finished()
        missing = [cell.name for cell in self.cells if cell.key not in finished]
        if missing:
            raise ResultsError(f"{len(missing)} cells are not finished, such as {missing[0]}. Run the command again.")
        lines = [(cell, finished[cell.key]) for cell in self.cells]
        text = self.text
        return LabResult(
            preset=self.preset,
            settings=asdict(self.cells[0].settings),
            readings=tuple(_readings(lines)),
            documents=() if text is None else text.names,
            text_sha256="" if text is None else text.sha256,
            seconds=round(sum(line["seconds"] for _, line in lines), 1),
            provenance={
                "versions": versions(),
                "machine": machine(),
                "command": command(),
                "date": max(line["date"] for _, line in lines),
            },
        )


def _readings(lines: Sequence[tuple[LabCell, dict[str, Any]]]) -> Iterator[LabReading]:
    """Seeds of one subject on one task, together."""
    groups: dict[tuple[str, str], list[tuple[LabCell, dict[str, Any]]]] = {}
    for cell, line in lines:
        groups.setdefault((cell.task, cell.subject.name), []).append((cell, line))
    for (task, name), group in groups.items():
        group = sorted(group, key=lambda one: one[0].seed)
        first = group[0][0]
        common: dict[str, Any] = {
            "task": task,
            "subject": name,
            "kind": first.subject.kind,
            "parameters": group[0][1]["parameters"],
            "steps": first.steps,
            "seconds": round(sum(line["seconds"] for _, line in group) / len(group), 1),
            "seeds": tuple(cell.seed for cell, _ in group),
        }
        for extension in group[0][1]["readings"]:
            found = [line["readings"][extension] for _, line in group]
            parts: dict[str, Any] = {
                part: tuple(_tuples(one[part]) for one in found if part in one)
                for part in ("scores", "truncated", "order")
            }
            yield LabReading(**common, extension=extension, **parts)


def _tuples(values: Any) -> Any:
    return tuple(map(_tuples, values)) if isinstance(values, list) else values


def prepare(
    output: Path | None,
    *,
    preset: str = "quick",
    only: Sequence[str] = (),
    tasks: Sequence[str] = (),
    seeds: int | None = None,
    text: Sequence[str | Path] = (),
    workers: int = 2,
    settings: LabSettings | None = None,
) -> Laboratory:
    """Plan the laboratory.

    Args:
        output: folder of the finished cells; None keeps them in memory.
        preset: ``quick`` or ``full``.
        only: names of encodings and baselines; default everyone.
        tasks: names of tasks; default the preset's.
        seeds: how many times each is trained; default the preset's.
        text: sources of text, as ``read_documents`` takes them; default the plays of ``ctxext demo``.
        workers: processes at once.
        settings: other ones than the preset's.

    Raises:
        UnknownNameError: an encoding, a task or a preset that does not exist.
        InvalidParameterError: a number out of range, a name twice, or too little text.
    """
    if preset not in PRESETS:
        raise UnknownNameError.of("preset", preset, PRESETS)
    chosen = PRESETS[preset]
    count = chosen.seeds if seeds is None else seeds
    for name, value in (("seeds", count), ("workers", workers)):
        if value < 1:
            raise InvalidParameterError(f"{name} must be at least 1, found {value}.")
    for what, names in (("encoding", only), ("task", tasks)):
        if len(set(names)) != len(names):
            raise InvalidParameterError(f"Give each {what} once; found {', '.join(names)}.")
    who = [subject_named(name) for name in only] if only else list(subjects().values())
    asked = [task_named(name) for name in tasks] or list(chosen.tasks)
    settings = settings or chosen.settings
    if text and TEXT not in asked:
        raise InvalidParameterError(f"A text is read by the task {TEXT!r} alone, found {', '.join(asked)}.")
    read = None
    if TEXT in asked:
        read = byte_text(list(read_documents(text)), REACH * settings.length, settings.windows)
    sha256 = {TEXT: "" if read is None else read.sha256}
    cells = tuple(
        LabCell(task=task, subject=one, seed=seed, settings=settings, text_sha256=sha256.get(task, ""))
        for task in asked
        for one in who
        for seed in range(count)
    )
    journal = Journal(None if output is None else output / JOURNAL, work="cells")
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
    return Laboratory(cells=cells, text=read, journal=journal, workers=workers, preset=preset)


# What a worker reads, once for all its cells.
_text_of_worker: ByteText | None = None


def _begin_worker(text: ByteText | None) -> None:
    global _text_of_worker
    _text_of_worker = text
    logging.set_verbosity_error()


def _measure_in_worker(cell: LabCell) -> dict[str, Any]:
    return cell.measure(_text_of_worker if cell.task == TEXT else None)
