"""The bench: every subject trained and tested on every task with every seed, as jobs of a survey."""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel, get_cosine_schedule_with_warmup, logging

from ctxext.core import patching
from ctxext.errors import InvalidParameterError, ResultsError, refuse_unknown
from ctxext.files import JsonObject, digest
from ctxext.laboratory.result import LabReading, LabResult, blocks_of, octaves_of
from ctxext.laboratory.subjects import EXTENSIONS, ROPE, Body, Variant, subjects
from ctxext.laboratory.tasks import NOT_ASKED, REACH, TASKS, TEXT, ByteText, byte_text
from ctxext.measuring.forward import Progress
from ctxext.measuring.journal import Journal
from ctxext.measuring.loss import loss_by_position, truncated_loss
from ctxext.measuring.provenance import command, machine, now, versions
from ctxext.measuring.statistics import check_finite
from ctxext.measuring.survey import Answer, Job, Survey
from ctxext.texts.documents import read_documents

JOURNAL = "cells.jsonl"
SLOWER = 3
"""Factor on the training steps of a slow subject."""
TOGETHER = 8
"""Test texts that go through a model at once."""


@dataclass(frozen=True, kw_only=True)
class LabSettings:
    """Amount of training and testing.

    Text is counted in bytes: the test reads 8 times the ``length`` of training, in so many ``windows``. A step of a
    puzzle has about ``puzzle_tokens``, its test ``puzzle_rows`` of each length. ``rate`` is the greatest learning rate.
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
    """Settings, number of seeds and tasks of a laboratory by default."""

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


@dataclass(frozen=True, eq=False, kw_only=True)
class LabJob(Job):
    """One subject that is trained on one task from one seed and then tested."""

    reader: Any = None  # it trains its model itself
    task: str
    subject: Variant
    seed: int
    steps: int
    settings: LabSettings
    text: ByteText | None = None

    @classmethod
    def of(cls, task: str, subject: Variant, seed: int, settings: LabSettings, text: ByteText | None = None) -> LabJob:
        """Lay out a job. The arguments determine its key and its cost, in tokens of training."""
        identity: JsonObject = {"task": task, "subject": asdict(subject), "seed": seed, "settings": asdict(settings)}
        identity["text_sha256"] = "" if text is None else text.sha256
        identity["versions"] = {name: version for name, version in versions().items() if name != "python"}
        steps = settings.puzzle_steps if text is None else settings.text_steps
        steps *= SLOWER if subject.is_slow else 1
        tokens = settings.puzzle_tokens if text is None else settings.length * settings.text_rows
        return cls(
            key=digest(json.dumps(identity, sort_keys=True), 16),
            cost=float(steps * tokens),
            name=f"{subject.name}, {task}, seed {seed}",
            task=task,
            subject=subject,
            seed=seed,
            steps=steps,
            settings=settings,
            text=text,
        )

    def ask(self, model: nn.Module | None = None, progress: Progress = lambda *_: None) -> Answer:
        """Train and test on one thread.

        Such small models get no faster by more threads, and two jobs then do not disturb each other.

        Raises:
            IncompatibleError: a loss or a share is NaN or infinite.
        """
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            began = time.process_time()
            answer = self._on_puzzles() if self.text is None else self._on_text(self.text)
            for extension, reading in answer["readings"].items():
                for values in reading.values():
                    name = f"{self.name}, extended by {extension}" if extension else self.name
                    check_finite(torch.tensor(values), name)
        finally:
            torch.set_num_threads(threads)
        progress(self.name, self.cost)
        return Answer(answer | {"seconds": round(time.process_time() - began, 1)})

    def _on_text(self, text: ByteText) -> JsonObject:
        length = self.settings.length
        model = self.subject.build(self.settings.text, vocabulary=256, trained_length=length, seed=self.seed)
        generator = torch.Generator().manual_seed(self.seed)
        last = self._train(model, lambda: text.drawn(length, self.settings.text_rows, generator))
        truncated = _in_parts(
            lambda part: truncated_loss(model, part, window=length, stride=length // 2, start=length), text.tested
        )
        octaves = [edge - length for edge in octaves_of(length)]
        readings = {
            name: {
                "scores": _means(_in_parts(lambda part: loss_by_position(model, part), text.tested), blocks_of(length))
            }
            for name in self._extended(model)
        }
        order = _order_learned(model, text, length)
        readings[""] |= {"truncated": _means(truncated, octaves), "order": _rounded(order)}
        return self._answer(model, last, readings)

    def _on_puzzles(self) -> JsonObject:
        settings, task = self.settings, TASKS[self.task]
        trained = task.tokens(task.trained)
        model = self.subject.build(settings.puzzle, vocabulary=task.vocabulary, trained_length=trained, seed=self.seed)
        generator = torch.Generator().manual_seed(self.seed)

        def drawn() -> tuple[Tensor, Tensor]:
            length = task.drawn_length(generator)
            rows = max(8, min(64, settings.puzzle_tokens // task.tokens(length)))
            return task.example(length, rows, generator)

        last = self._train(model, drawn)
        readings: JsonObject = {}
        for name in self._extended(model):
            tested = torch.Generator().manual_seed(2**31)  # the same puzzles for all
            shares = [_right(model, *task.example(length, settings.puzzle_rows, tested)) for length in task.lengths()]
            readings[name] = {"scores": _rounded(torch.stack(shares, 1))}
        return self._answer(model, last, readings)

    def _answer(self, model: PreTrainedModel, loss: float, readings: JsonObject) -> JsonObject:
        weights = sum(weight.numel() for weight in model.parameters())
        return {"parameters": weights, "loss": round(loss, 4), "readings": readings}

    def _train(self, model: PreTrainedModel, drawn: Callable[[], tuple[Tensor, Tensor]]) -> float:
        """Train by AdamW and a cosine, the same for all; return the mean loss of the last tenth of the steps."""
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
        """Leave the model as it was trained (an empty name); then, if it rotates, put on each extension in turn."""
        yield ""
        for name in EXTENSIONS if self.subject.name == ROPE else ():
            with patching.patched(model, name, factor=float(REACH)):
                yield name


def _order_learned(model: PreTrainedModel, text: ByteText, length: int) -> Float[Tensor, " windows"]:
    """Measure how much worse bytes in the trained length are predicted when all before the last byte is shuffled.

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
    """Return the share of the answers that are right, puzzle by puzzle."""
    answers: Tensor = model(input_ids=tokens, use_cache=False).logits.argmax(-1)
    asked = labels != NOT_ASKED
    return ((answers == labels) & asked).sum(1) / asked.sum(1)


def _in_parts(work: Callable[[Tensor], Tensor], rows: Tensor, together: int = TOGETHER) -> Tensor:
    return torch.cat([work(part) for part in torch.split(rows, together)])


def _means(losses: Float[Tensor, "rows positions"], edges: Sequence[int]) -> Any:
    parts = [losses[:, start:stop].mean(1) for start, stop in itertools.pairwise(edges)]
    return _rounded(torch.stack(parts, 1))


def _rounded(values: Tensor) -> Any:
    return [_rounded(value) if value.ndim else round(value.item(), 4) for value in values]


@dataclass(eq=False, kw_only=True)
class Laboratory(Survey[LabJob]):
    """The survey of all jobs."""

    made_by: str = "ctxext lab"
    checkpoint: Any = None  # every job trains a model
    workers: int = 2
    preset: str = "quick"

    def run(self, progress: Progress = lambda *_: None) -> LabResult:
        """Measure the pending jobs, and put everything together; arguments and errors as for ``measure``."""
        self.measure(self.begin(), progress=progress)
        return self.result()

    def measure(self, jobs: Sequence[LabJob], *, progress: Progress = lambda *_: None) -> None:
        """Do jobs, seed by seed and the longest first, and keep each at once.

        Raises:
            ResultsError: the journal cannot be written, or a process was killed.
            IncompatibleError: a loss or a share is NaN or infinite.
        """
        for job, answer in self._answers(sorted(jobs, key=lambda job: (job.seed, -job.cost))):
            self.journal.keep({"key": job.key, "cell": job.name, "date": now(), **answer.values})
            progress(job.name, job.cost)

    def _answers(self, jobs: list[LabJob]) -> Iterator[tuple[LabJob, Answer]]:
        if self.workers == 1 or len(jobs) < 2:
            for job in jobs:
                yield job, job.ask()
            return
        spawning = multiprocessing.get_context("spawn")
        pool = concurrent.futures.ProcessPoolExecutor(self.workers, spawning, logging.set_verbosity_error)
        try:
            futures = {pool.submit(LabJob.ask, job): job for job in jobs}
            while futures:
                done = concurrent.futures.wait(futures, return_when=concurrent.futures.FIRST_COMPLETED).done
                for future in sorted(done, key=lambda each: each.exception() is not None):  # failures last
                    yield futures.pop(future), future.result()
        except concurrent.futures.process.BrokenProcessPool as error:
            raise ResultsError(
                "A process of the laboratory was killed, perhaps for want of memory. Finished jobs are kept: run the "
                "same command again, with --workers 1 if it happens again."
            ) from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for child in multiprocessing.active_children():
                child.terminate()

    def _identity(self) -> JsonObject:
        return {"made_by": self.made_by}

    def result(self) -> LabResult:
        """Put everything that is finished together.

        Raises:
            ResultsError: something is not finished.
        """
        finished = self.journal.finished()
        missing = [job.name for job in self.jobs if job.key not in finished]
        if missing:
            raise ResultsError(f"{len(missing)} jobs are not finished, such as {missing[0]}. Run the command again.")
        groups: dict[tuple[str, str], list[LabJob]] = {}
        for job in self.jobs:
            groups.setdefault((job.task, job.subject.name), []).append(job)
        lines = [finished[job.key] for job in self.jobs]
        text = next((job.text for job in self.jobs if job.text is not None), None)
        return LabResult(
            preset=self.preset,
            settings=asdict(self.jobs[0].settings),
            readings=tuple(reading for jobs in groups.values() for reading in _readings(jobs, finished)),
            documents=() if text is None else text.names,
            text_sha256="" if text is None else text.sha256,
            seconds=round(sum(line["seconds"] for line in lines), 1),
            provenance={
                "versions": versions(),
                "machine": machine(),
                "command": command(),
                "date": max(line["date"] for line in lines),
            },
        )


def _readings(jobs: Sequence[LabJob], finished: dict[str, JsonObject]) -> Iterator[LabReading]:
    """Put the seeds of one subject on one task together: as it was trained, and under each extension."""
    first, lines = jobs[0], [finished[job.key] for job in jobs]
    for extension in lines[0]["readings"]:
        readings = [line["readings"][extension] for line in lines]
        parts: dict[str, Any] = {
            part: tuple(reading[part] for reading in readings if part in reading)
            for part in ("scores", "truncated", "order")
        }
        yield LabReading(
            task=first.task,
            subject=first.subject.name,
            kind=first.subject.kind,
            extension=extension,
            parameters=lines[0]["parameters"],
            steps=first.steps,
            seconds=round(sum(line["seconds"] for line in lines) / len(lines), 1),
            seeds=tuple(job.seed for job in jobs),
            **parts,
        )


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
    """Plan the laboratory; without names it is all encodings and baselines, and the preset's tasks and settings.

    Finished cells are kept in the folder, or without one in memory.

    Raises:
        UnknownNameError: an encoding, a task or a preset that does not exist.
        InvalidParameterError: a number out of range, a name twice, or too little text.
    """
    known = subjects()
    for what, names, all_names in (
        ("preset", [preset], PRESETS),
        ("encoding or baseline", only, known),
        ("task", tasks, (TEXT, *TASKS)),
    ):
        refuse_unknown(what, names, all_names)
    chosen = PRESETS[preset]
    count = chosen.seeds if seeds is None else seeds
    for name, value in (("seeds", count), ("workers", workers)):
        if value < 1:
            raise InvalidParameterError(f"{name} must be at least 1, found {value}.")
    for what, names in (("encoding", only), ("task", tasks)):
        if len(set(names)) != len(names):
            raise InvalidParameterError(f"Give each {what} once; found {', '.join(names)}.")
    asked = tasks or chosen.tasks
    settings = settings or chosen.settings
    if text and TEXT not in asked:
        raise InvalidParameterError(f"A text is read by the task {TEXT!r} alone, found {', '.join(asked)}.")
    read = None
    if TEXT in asked:
        read = byte_text(list(read_documents(text)), REACH * settings.length, settings.windows)
    jobs = [
        LabJob.of(task, subject, seed, settings, read if task == TEXT else None)
        for task in asked
        for subject in (known[name] for name in only or known)
        for seed in range(count)
    ]
    journal = Journal(None if output is None else output / JOURNAL)
    # The folder is made only here: an argument that is refused leaves nothing behind.
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
    return Laboratory(jobs=jobs, journal=journal, workers=workers, preset=preset)
