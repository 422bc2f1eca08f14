"""A comparison from checkpoint and texts to its result: a survey of texts and passkeys."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ctxext.errors import InvalidParameterError
from ctxext.evaluation.comparison.result import (
    ComparisonResult,
    FactorSeries,
    PasskeyScore,
    Row,
    Score,
    Verdict,
    judge,
    summarise,
)
from ctxext.evaluation.passkey import DEPTHS, JUDGED, PasskeyPrompt, make_prompts
from ctxext.measuring.checkpoint import Checkpoint
from ctxext.measuring.forward import turning_point
from ctxext.measuring.journal import Journal
from ctxext.measuring.loss import Window
from ctxext.measuring.provenance import provenance_of
from ctxext.measuring.readings import Reader, Reading, Readings, Refusal, chosen_methods, require_reached
from ctxext.measuring.statistics import ENOUGH_DOCUMENTS, Bucket, bucketed, document_difference, edges_for
from ctxext.measuring.survey import LossJob, ProcessGroup, PromptJob, Survey
from ctxext.measuring.truncation import TRUNCATED, UNPATCHED, best_window, join_best, tail_windows
from ctxext.methods import Method
from ctxext.texts.corpus import Corpus, TokenisedDocument

LOSS, PASSKEY = "loss", "passkey"  # in the keys of jobs


@dataclass(eq=False, kw_only=True)
class Comparison(Survey[LossJob | PromptJob]):
    """A planned comparison; ``begin`` it, ``measure`` what is pending, then ask for its ``result``."""

    corpus: Corpus
    seed: int
    readings: tuple[Reading, ...]
    refusals: tuple[Refusal, ...]
    prompts: tuple[PasskeyPrompt, ...]
    trained_length: int
    lengths: tuple[int, ...]
    texts: Mapping[tuple[str, int], Sequence[LossJob]]
    asked: Mapping[tuple[str, PasskeyPrompt], PromptJob]

    def lengths_of(self, reading: Reading) -> tuple[int, ...]:
        """Return the lengths that a reading is meant for."""
        return _lengths_of(reading, self.lengths)

    def result(self) -> ComparisonResult:
        """Put the finished jobs together.

        Raises:
            ResultsError: losses cannot be read.
        """
        provenance = provenance_of(self.checkpoint, self.corpus, seed=self.seed).to_dict()
        del provenance["extensions"], provenance["trained_length"]  # in the rows, and as it was measured
        lines = self.journal.finished()
        circumstances = {
            "date": provenance.pop("date"),
            "command": provenance.pop("command"),
            "seconds": sum(lines[job.key]["seconds"] for job in self.jobs),
            "processes": self.group.processes,
        }
        finished = FinishedLosses(self)
        rows = tuple(_row(finished, reading) for reading in self.readings)
        beyond = [n for n in self.lengths[1:] if any(row.at(n) for row in rows if row.reading.is_candidate)]
        return ComparisonResult(
            trained_length=self.trained_length,
            lengths=self.lengths,
            unit="documents" if len(self.corpus.documents) >= ENOUGH_DOCUMENTS else "blocks of tokens",
            rows=rows,
            refusals=self.refusals,
            panels=_panels(finished),
            verdicts=tuple(_verdict(finished, rows, length) for length in beyond),
            provenance=provenance,
            made=circumstances,
        )


def prepare(
    checkpoint: Checkpoint,
    corpus: Callable[[int], Corpus],
    output: Path | None,
    *,
    methods: Sequence[str | Method] = (),
    factors: Sequence[float] = (2.0,),
    lengths: Sequence[int] = (),
    depths: Sequence[float] = DEPTHS,
    trials: int = 1,
    seed: int = 0,
    trained_length: int | None = None,
    sliding_window: str | None = None,
    windows: Sequence[int] | None = None,
    group: ProcessGroup | None = None,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> Comparison:
    """Plan a comparison, before anything of it is measured.

    Args:
        corpus: called once with the tokens that each document must have; returns them whole.
        output: folder for cells and report; None keeps the cells in memory.

    Raises:
        CtxextError: whatever cannot be right, before anything is computed.
    """
    model = Readings(checkpoint, trained_length=trained_length, sliding_window=sliding_window, windows=windows)
    tried, refused = model.find(chosen_methods(checkpoint.model, methods, factors), progress=progress)
    wanted = check_lengths(lengths, model.trained_length, tried)
    texts = corpus(wanted[-1] + 1)
    readings, refusals = _reaching(tried, refused, wanted)
    point = turning_point(checkpoint.model)
    prompts = make_prompts(checkpoint.tokenizer, wanted, depths, trials=trials, seed=seed, turning_point=point)
    documents = tuple(document.take(wanted[-1] + 1) for document in texts.documents)
    readers = [Reader(reading, model, _lengths_of(reading, wanted)) for reading in readings]
    loss_jobs: dict[tuple[str, int], list[LossJob]] = {}
    passkey_jobs: dict[tuple[str, PasskeyPrompt], PromptJob] = {}
    for reader in readers:
        if reader.reading.name != TRUNCATED:  # the best of the windows, each of which is measured by itself
            loss_jobs |= _loss_jobs(reader, documents, point)
            passkey_jobs |= _passkey_jobs(reader, prompts)
    jobs: list[LossJob | PromptJob] = [job for jobs in loss_jobs.values() for job in jobs]
    jobs += passkey_jobs.values()
    order = {reader: number for number, reader in enumerate(readers)}
    path, identity = (None, None) if output is None else (output / "cells.jsonl", output / "comparison.json")
    group = group or ProcessGroup()
    return Comparison(
        "ctxext eval compare",
        checkpoint,
        sorted(jobs, key=lambda job: order[job.reader]),
        corpus=texts,
        journal=Journal(path, group.process, identity=identity),
        group=group,
        seed=seed,
        readings=readings,
        refusals=refusals,
        prompts=prompts,
        trained_length=model.trained_length,
        lengths=wanted,
        texts=loss_jobs,
        asked=passkey_jobs,
    )


def _lengths_of(reading: Reading, lengths: Sequence[int]) -> tuple[int, ...]:
    """Return the lengths that a reading is meant for."""
    return tuple(length for length in lengths if reading.is_reference or length <= (reading.reach or 0))


def _reaching(
    readings: Sequence[Reading], refusals: Sequence[Refusal], lengths: Sequence[int]
) -> tuple[tuple[Reading, ...], tuple[Refusal, ...]]:
    """Move methods that reach no length beyond the trained one to those that are refused."""
    methods = [reading for reading in readings if not reading.is_reference]
    short = [reading for reading in methods if reading.reach is not None and reading.reach < lengths[1]]
    refused = [*refusals]
    for reading in short:
        reason = f"it reaches {reading.reach:,} tokens, less than every length asked for"
        refused.append(Refusal(label=reading.label, reason=reason))
    kept = tuple(reading for reading in readings if reading not in short)
    if not any(reading.is_candidate for reading in kept):
        reasons = "; ".join(f"{refusal.label}: {refusal.reason}" for refusal in refused)
        raise InvalidParameterError(f"No method is left to compare. {reasons}")
    return kept, tuple(refused)


def check_lengths(lengths: Sequence[int], trained_length: int, readings: Sequence[Reading]) -> tuple[int, ...]:
    """Return the trained length and the lengths asked for, increasing; by default every method's reach.

    Raises:
        InvalidParameterError: a length that no method is patched for, or none beyond the trained length.
    """
    reaches = sorted({reading.reach for reading in readings if reading.reach is not None})
    wanted = sorted({*(lengths or reaches), trained_length})
    require_reached(wanted[-1], reaches, trained_length)
    if wanted[0] < trained_length or len(wanted) < 2:
        lengths_found = ", ".join(f"{length:,}" for length in wanted)
        raise InvalidParameterError(
            f"A comparison reads beyond the trained {trained_length:,} tokens (what happens inside is in every table); "
            f"found lengths of {lengths_found}. Give a --length above it, or a --factor above 1."
        )
    edges_for(trained_length, wanted[1])
    return tuple(wanted)


def _key(reader: Reader, *task: Any) -> str:
    reading = reader.reading
    return reader.readings.key([reading.name, reading.method, reading.fingerprint], task=list(task))


def _loss_jobs(
    reader: Reader, documents: Sequence[TokenisedDocument], turning_point: int
) -> dict[tuple[str, int], list[LossJob]]:
    """Lay out the texts by the name of the reading and the length; one pass gives a static reading's every length."""
    jobs: dict[tuple[str, int], list[LossJob]] = {}
    for length in reader.lengths if reader.reading.dynamic else reader.lengths[-1:]:
        for document in documents:
            text = document.take(length + 1)
            windows: Sequence[Window] = [Window(0, length + 1, length)]
            if reader.window is not None:
                start = reader.readings.trained_length
                windows = tail_windows(reader.window, start=start, positions=length, prefix=text.prefix)
            job = LossJob.of(
                reader,
                text,
                windows,
                name=f"{reader.reading.label}, {document.name}, {length:,} tokens",
                turning_point=turning_point,
                key=_key(reader, LOSS, length, text.sha256, 0),
            )
            jobs.setdefault((reader.reading.name, length), []).append(job)
    return jobs


def _passkey_jobs(reader: Reader, prompts: Sequence[PasskeyPrompt]) -> dict[tuple[str, PasskeyPrompt], PromptJob]:
    """Lay out the passkeys by the name of the reading and the prompt.

    A key is looked for in all that fits; inside the window, the truncated reading is the unpatched one.
    """
    window, trained = reader.window, reader.readings.trained_length
    return {
        (reader.reading.name, prompt): PromptJob.of(
            reader, prompt, key=_key(reader, PASSKEY, prompt.length, prompt.passkey.sha256, prompt.seed, JUDGED)
        )
        for prompt in prompts
        if prompt.length in reader.lengths and (window is None or window == trained < prompt.length)
    }


class FinishedLosses:
    """Losses of finished jobs, read when they are asked for: all at once may not fit into memory."""

    def __init__(self, comparison: Comparison) -> None:
        self.comparison, self.readings = comparison, comparison.readings
        self._lines = comparison.journal.finished()
        self.unpatched = next(reading for reading in self.readings if reading.name == UNPATCHED)
        self.windows = {reading.window: reading for reading in self.readings if reading.window is not None}
        self._ends: dict[int, Tensor] = {}

    def losses(self, reading: Reading, length: int) -> Tensor:
        """[documents, length]; a static reading's come from its one pass over its greatest length."""
        if reading.window is not None:
            head = self.losses(self.unpatched, self.comparison.trained_length)
            tail = self._rows(reading, self.comparison.lengths[-1])[:, : length - self.comparison.trained_length]
            return torch.cat([head, tail], dim=1)
        measured = length if reading.dynamic else self.comparison.lengths_of(reading)[-1]
        return self._rows(reading, measured)[:, :length]

    def truncations(self, length: int, start: int) -> dict[int, Tensor]:
        """[documents, positions] from ``start`` to ``length``, by window."""
        return {window: self.losses(reading, length)[:, start:] for window, reading in self.windows.items()}

    def stretch(self, reading: Reading, length: int, start: int) -> tuple[int | None, Tensor]:
        """[documents, positions] from ``start`` to ``length``, and which window they are of; None for no truncation."""
        if reading.name != TRUNCATED:
            return reading.window, self.losses(reading, length)[:, start:]
        losses = self.truncations(length, start)
        window = best_window(losses)
        return window, losses[window]

    def best_end(self, length: int) -> Tensor:
        """Return the best truncation's losses of the last stretch before ``length``, the baseline of every reading."""
        if length not in self._ends:
            losses = self.truncations(length, self.last_stretch(length))
            self._ends[length] = losses[best_window(losses)]
        return self._ends[length]

    def last_stretch(self, length: int) -> int:
        """Return the first position of the stretch that stands for a length; the stretch ends with the length.

        It is a quarter of the window, or what lies beyond the window if that is less.
        """
        trained = self.comparison.trained_length
        quarter = max(1, trained // 4)
        return length - quarter if length == trained else max(length - quarter, trained)

    def _rows(self, reading: Reading, length: int) -> Tensor:
        jobs = self.comparison.texts[reading.name, length]
        return torch.stack([self.comparison.journal.losses(self._lines[job.key]) for job in jobs])

    def passkeys(self, reading: Reading) -> tuple[PasskeyScore, ...]:
        """Count the keys found at each length and depth."""
        trained = self.comparison.trained_length
        if reading.name == TRUNCATED or (reading.window or trained) < trained:
            return ()  # a key is looked for in all that fits, the longest window
        places: dict[tuple[int, float], list[Mapping[str, Any]]] = {}
        hidden: dict[tuple[int, float], bool] = {}
        for prompt in self.comparison.prompts:
            # Inside the window, the truncated reading is the unpatched one.
            inside = prompt.length <= trained
            asked = self.unpatched if reading.window is not None and inside else reading
            if prompt.length in self.comparison.lengths_of(reading):
                place = (prompt.length, prompt.passkey.depth)
                line = self._lines[self.comparison.asked[asked.name, prompt].key]
                places.setdefault(place, []).append(line["trial"])
                hidden[place] = prompt.passkey.distance > trained
        return tuple(
            PasskeyScore(
                length=length,
                depth=depth,
                found=sum(line["correct"] for line in lines),
                trials=len(lines),
                loss=sum(line["loss"] for line in lines) / len(lines),
                hidden=hidden[length, depth],
            )
            for (length, depth), lines in places.items()
        )


def _row(finished: FinishedLosses, reading: Reading) -> Row:
    window = finished.comparison.trained_length
    read_inside = finished.unpatched if reading.name == TRUNCATED else reading  # inside the window nothing is dropped
    inside, plain = (finished.losses(which, window) for which in (read_inside, finished.unpatched))
    return Row(
        reading=reading,
        inside=bucketed(inside, [0, window])[0],
        short_context=document_difference([*inside], [*plain]),
        scores=tuple(_score(finished, reading, length) for length in finished.comparison.lengths_of(reading)),
        passkeys=finished.passkeys(reading),
    )


def _score(finished: FinishedLosses, reading: Reading, length: int) -> Score:
    start = finished.last_stretch(length)
    window, end = finished.stretch(reading, length, start)
    window_of_whole, whole = finished.stretch(reading, length, 0)
    bucket = Bucket(start, length, end.numel(), end.double().mean().item())
    (up_to_there,) = bucketed(whole, [0, length])
    score = Score(length=length, end=bucket, whole=up_to_there, versus_truncation=None, by_document=())
    if length <= finished.comparison.trained_length:
        return score
    best = finished.best_end(length)
    return replace(
        score,
        versus_truncation=document_difference([*end], [*best], baselines=len(finished.windows)),
        by_document=tuple((end.double() - best.double()).mean(dim=1).tolist()),
        window=window,
        window_of_whole=window_of_whole,
    )


def _verdict(finished: FinishedLosses, rows: Sequence[Row], length: int) -> Verdict:
    competing = [row.reading for row in rows if row.reading.is_candidate and row.at(length)]
    start = finished.last_stretch(length)
    return judge(
        length,
        {reading.name: finished.losses(reading, length)[:, start:] for reading in competing},
        finished.truncations(length, start),
    )


def _panels(finished: FinishedLosses) -> tuple[FactorSeries, ...]:
    comparison = finished.comparison
    methods = [reading for reading in finished.readings if not reading.is_reference]
    factors: list[float | None] = [*sorted({reading.factor for reading in methods if not reading.any_factor})]
    panels = []
    for factor in factors or [max((reading.factor for reading in methods), default=None)]:
        of_factor = [
            r for r in methods if r.factor == factor or (r.any_factor and factor is not None and r.factor >= factor)
        ]
        length = max(comparison.lengths_of(of_factor[0])) if of_factor else comparison.lengths[-1]
        references = [reading for reading in finished.readings if reading.is_reference]
        shown = [*references, *(reading for reading in of_factor if length in comparison.lengths_of(reading))]
        unpatched = finished.losses(finished.unpatched, length)
        truncations = finished.truncations(length, 0)
        truncated, windows = join_best(truncations, edges_for(comparison.trained_length, length)[1:])
        series = [
            summarise(
                reading.name,
                truncated if reading.name == TRUNCATED else finished.losses(reading, length),
                unpatched=unpatched,
                truncated=truncated,
                baselines=len(truncations),
                windows=windows if reading.name == TRUNCATED else (),
                trained_length=comparison.trained_length,
                dynamic=reading.dynamic,
            )
            for reading in shown
        ]
        panels.append(FactorSeries(factor=factor, length=length, series=tuple(series)))
    return tuple(panels)
