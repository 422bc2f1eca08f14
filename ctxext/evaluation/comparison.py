"""Several ways to read the same text, side by side: what each costs by position, and against truncation."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ctxext.errors import InvalidParameterError
from ctxext.evaluation.passkey import DEPTHS, PasskeyPrompt, make_prompts
from ctxext.measuring.checkpoint import Checkpoint
from ctxext.measuring.forward import turning_point
from ctxext.measuring.journal import Journal
from ctxext.measuring.loss import Window
from ctxext.measuring.loss_table import LossTable, Verdict
from ctxext.measuring.provenance import provenance_of
from ctxext.measuring.readings import Reader, Reading, Readings, Refusal, chosen_methods
from ctxext.measuring.statistics import (
    BEYOND,
    CURVE,
    ENOUGH_DOCUMENTS,
    Bucket,
    PairedDifference,
    bucketed,
    document_difference,
    edges_for,
)
from ctxext.measuring.survey import LossJob, ProcessGroup, PromptJob, Survey
from ctxext.measuring.truncation import SELECTED, TRUNCATED, UNPATCHED, is_short
from ctxext.methods import Method
from ctxext.texts.corpus import Corpus, TokenisedDocument


@dataclass(frozen=True)
class Series:
    """One way to read a text.

    Args:
        name: Name of the method, or of a reference: ``unpatched``, ``truncated 2048`` for the last 2,048 tokens,
            ``truncated`` for the best of such.
        buckets: the trained window as one bucket, then equal buckets beyond it.
        versus_truncation: Loss minus the best truncation's in each bucket beyond the window.
        dynamic: True where the method's frequencies follow the length, so that the one pass at the full length
            charges its stretched frequencies to every position.
        windows: Tokens that the best truncation sees in each bucket beyond the window; empty for other readings.
        selected: True for each of these buckets where the selection is better than each truncation.
    """

    name: str
    buckets: tuple[Bucket, ...]
    curve: tuple[Bucket, ...]
    versus_truncation: tuple[PairedDifference, ...]
    dynamic: bool
    windows: tuple[int, ...] = ()
    selected: tuple[bool, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Score:
    """One reading at one length.

    Args:
        end: Last positions before that length, a quarter of the trained window: the gain of the length itself.
        versus_truncation: Loss at the end minus the best truncation's there; None at the trained length.
        by_document: Difference of each document, nats per token.
        window: Tokens that a truncation sees at the end; for the best truncation, the size of the best window there.
            None at the trained length, and for readings that truncate nothing.
        window_of_whole: Tokens that it sees for all positions up to the length.
        selected: True at the end for the best truncation where the selection is better than each of them.
        selected_of_whole: True where it is so for all positions.
    """

    length: int
    end: Bucket
    whole: Bucket
    versus_truncation: PairedDifference | None = None
    by_document: tuple[float, ...] = ()
    window: int | None = None
    window_of_whole: int | None = None
    selected: bool = False
    selected_of_whole: bool = False


@dataclass(frozen=True, kw_only=True)
class PasskeyScore:
    """Keys at one length and depth.

    Args:
        depth: Place of the key, 0 at the start to 1 at the end.
        hidden: Number of these keys that truncation cuts off; near its border each seed's key may lie elsewhere.
        hidden_found: Number of the hidden keys that were found.
    """

    length: int
    depth: float
    found: int
    trials: int
    loss: float
    hidden: int
    hidden_found: int


@dataclass(frozen=True, kw_only=True)
class Row:
    """One reading with all that was measured of it.

    Args:
        short_context: Loss inside the trained window minus the unpatched model's.
    """

    reading: Reading
    inside: Bucket
    short_context: PairedDifference
    scores: tuple[Score, ...]
    passkeys: tuple[PasskeyScore, ...]

    def at(self, length: int) -> Score | None:
        """Return the score at a length; None if the reading is not meant for it."""
        return next((score for score in self.scores if score.length == length), None)


@dataclass(frozen=True, kw_only=True)
class FactorSeries:
    """The data of a figure of one factor: losses by position up to the length that the factor reaches.

    Args:
        factor: target length over trained length; None where no method is compared.
        series: the references, then the methods, each named as its reading.
    """

    factor: float | None
    length: int
    series: tuple[Series, ...]

    @property
    def drawn(self) -> tuple[Series, ...]:
        """The series to draw. The best truncation represents single windows and the selection."""
        return tuple(item for item in self.series if not is_short(item.name))


@dataclass(frozen=True, kw_only=True)
class ComparisonResult:
    """A whole comparison.

    Args:
        unit: Name of the groups that counted as independent for the standard errors.
        rows: Rows of the references, then of the methods.
        made: Date, command and costs, as JSON values: all that may differ between two runs of the same comparison.
    """

    trained_length: int
    lengths: tuple[int, ...]
    unit: str
    rows: tuple[Row, ...]
    refusals: tuple[Refusal, ...]
    panels: tuple[FactorSeries, ...]
    verdicts: tuple[Verdict, ...]
    provenance: Mapping[str, Any]
    made: Mapping[str, Any]

    def row(self, name: str) -> Row:
        """Return the row of a reading."""
        return next(row for row in self.rows if row.reading.name == name)

    @property
    def texts(self) -> int:
        """The number of texts that were read."""
        return len(self.provenance["documents"])

    @property
    def candidates(self) -> tuple[Row, ...]:
        """The rows of extensions."""
        return tuple(row for row in self.rows if row.reading.is_candidate)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


@dataclass(eq=False, kw_only=True)
class Comparison(Survey[LossJob | PromptJob]):
    """A planned comparison: call ``begin``, ``measure`` the pending jobs, then call ``result``."""

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
        return reading.meant_for(self.lengths)

    def table(self, length: int) -> LossTable:
        """Return the losses up to a length, of every reading that is meant for it.

        A static reading's come from its one pass over its greatest length; a truncation's are the unpatched model's
        inside the trained window.
        """
        lines, readings = self.journal.finished(), {reading.name: reading for reading in self.readings}

        def read(name: str, end: int = length) -> list[Tensor]:
            measured = end if readings[name].dynamic else self.lengths_of(readings[name])[-1]
            rows = [self.journal.losses(lines[job.key]) for job in self.texts[name, measured]]
            if is_short(name):
                # Only the tail was read: nothing is dropped inside the trained window.
                rows = [torch.cat(parts) for parts in zip(read(UNPATCHED, self.trained_length), rows, strict=True)]
            return [row[:end] for row in rows]

        names = [name for name, reading in readings.items() if length in self.lengths_of(reading)]
        return LossTable([name for name in names if name != TRUNCATED], read)

    def last_stretch(self, length: int) -> int:
        """Return the first position of the stretch that represents a length; the stretch ends with the length.

        It is a quarter of the window, or all that lies beyond the window if that is less.
        """
        trained = self.trained_length
        quarter = max(2, trained // 4)  # a single token has no standard error
        return length - quarter if length == trained else max(length - quarter, trained)

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
        wholes = {length: self.table(length) for length in self.lengths}
        ends = {
            length: table.span(self.last_stretch(length)).select(lambda texts: [text.clone() for text in texts])
            for length, table in wholes.items()
        }
        rows = tuple(self._row(reading, ends, wholes) for reading in self.readings)
        competing = {n: [row.reading.name for row in rows if row.reading.is_candidate and row.at(n)] for n in ends}
        return ComparisonResult(
            trained_length=self.trained_length,
            lengths=self.lengths,
            unit="documents" if len(self.corpus.documents) >= ENOUGH_DOCUMENTS else "blocks of tokens",
            rows=rows,
            refusals=self.refusals,
            panels=tuple(self._panels(wholes)),
            verdicts=tuple(ends[n].judge(competing[n], n) for n in self.lengths[1:] if competing[n]),
            provenance=provenance,
            made=circumstances,
        )

    def _row(self, reading: Reading, ends: Mapping[int, LossTable], wholes: Mapping[int, LossTable]) -> Row:
        """Score a reading at the end of each length and over all positions up to it."""
        name, trained = reading.name, wholes[self.trained_length]
        scores = []
        for length in self.lengths_of(reading):
            end, whole = ends[length], wholes[length]
            stretch = end.bucket(name, self.last_stretch(length), length)
            score = Score(length=length, end=stretch, whole=whole.bucket(name, 0, length))
            if length > self.trained_length:  # up to there nothing is truncated
                pairs = zip(end.losses(name), end.losses(TRUNCATED), strict=True)
                score = replace(
                    score,
                    versus_truncation=end.difference(name),
                    by_document=tuple((own.double() - best.double()).mean().item() for own, best in pairs),
                    window=end.window_of(name),
                    window_of_whole=whole.window_of(name),
                    selected=name == TRUNCATED and end.selected,
                    selected_of_whole=name == TRUNCATED and whole.selected,
                )
            scores.append(score)
        return Row(
            reading=reading,
            inside=scores[0].whole,
            short_context=trained.difference(name, UNPATCHED),
            scores=tuple(scores),
            passkeys=self._passkeys(reading),
        )

    def _passkeys(self, reading: Reading) -> tuple[PasskeyScore, ...]:
        """Count the keys found at each length and depth."""
        trained = self.trained_length
        if reading.name in (TRUNCATED, SELECTED) or (reading.window or trained) < trained:
            return ()  # a key is looked for in all that fits, the longest window
        lines = self.journal.finished()
        places: dict[tuple[int, float], list[PasskeyPrompt]] = {}
        for prompt in self.prompts:
            if prompt.length in self.lengths_of(reading):
                places.setdefault((prompt.length, prompt.passkey.depth), []).append(prompt)
        scores = []
        for (length, depth), prompts in places.items():
            # Inside the window, the truncated reading is the unpatched one.
            name = UNPATCHED if reading.window is not None and length <= trained else reading.name
            trials = [lines[self.asked[name, prompt].key]["trial"] for prompt in prompts]
            hidden = [p.passkey.key_position < p.prefix + p.dropped(trained) for p in prompts]
            score = PasskeyScore(
                length=length,
                depth=depth,
                found=sum(trial["correct"] for trial in trials),
                trials=len(trials),
                loss=sum(trial["loss"] for trial in trials) / len(trials),
                hidden=sum(hidden),
                hidden_found=sum(trial["correct"] for trial in itertools.compress(trials, hidden)),
            )
            scores.append(score)
        return tuple(scores)

    def _panels(self, wholes: Mapping[int, LossTable]) -> Iterator[FactorSeries]:
        """Yield the series of each factor; readings whose factor changes only the reach are in each that fits."""
        methods = [reading for reading in self.readings if not reading.is_reference]
        factors: list[float | None] = [*sorted({reading.factor for reading in methods if not reading.any_factor})]
        for factor in factors or [max((reading.factor for reading in methods), default=None)]:
            of_factor = [
                r for r in methods if r.factor == factor or (r.any_factor and factor is not None and r.factor >= factor)
            ]
            own = [reading for reading in of_factor if not reading.any_factor] or of_factor
            length = max((n for reading in own for n in self.lengths_of(reading)), default=self.lengths[-1])
            among = [*(reading for reading in self.readings if reading.is_reference), *of_factor]
            shown = [reading for reading in among if length in self.lengths_of(reading)]
            series = tuple(_series(wholes[length], shown, wholes[self.trained_length], self.trained_length, length))
            yield FactorSeries(factor=factor, length=length, series=series)


def _series(
    table: LossTable, readings: Sequence[Reading], inside: LossTable, trained: int, length: int
) -> Iterator[Series]:
    """Yield the losses of readings by position, for the truncations the best one of each bucket.

    Args:
        inside: Losses up to the trained length.
    """
    edges, fine = edges_for(trained, length), min(CURVE, length - trained)
    curve_edges = edges_for(trained, length, inside=min(fine, trained), beyond=fine)
    parts = [slice(start, stop) for start, stop in itertools.pairwise(edges[1:])]
    beyond = [table.span(part.start, part.stop) for part in parts]
    best = [torch.stack([*part.losses(TRUNCATED)]) for part in beyond]
    # Inside the window nothing is dropped.
    truncated = torch.cat([torch.stack([*inside.losses(UNPATCHED)]), *best], dim=1)
    for reading in readings:
        name = reading.name
        losses = truncated if name == TRUNCATED else torch.stack([*table.losses(name)])
        yield Series(
            name=name,
            buckets=bucketed(losses, edges),
            curve=bucketed(losses, curve_edges),
            versus_truncation=tuple(
                document_difference([*losses[:, part]], [*baseline], baselines=len(table.short))
                for part, baseline in zip(parts, best, strict=True)
            ),
            dynamic=reading.dynamic,
            windows=tuple(part.window for part in beyond) if name == TRUNCATED else (),
            selected=tuple(part.selected for part in beyond) if name == TRUNCATED else (),
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
    select: bool = False,
    group: ProcessGroup | None = None,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> Comparison:
    """Plan a comparison, before anything of it is measured.

    Args:
        corpus: Function that is called once with the tokens that each document must have, and returns them whole.
        output: Folder for cells and report; None keeps the cells in memory.
        select: True to measure chosen chunks as well as truncations (``ctxext.measuring.selection``).

    Raises:
        CtxextError: for all that cannot be right, before anything is computed.
    """
    model = Readings(
        checkpoint, trained_length=trained_length, sliding_window=sliding_window, windows=windows, select=select
    )
    tried, refused = model.find(
        chosen_methods(checkpoint.subject, methods, factors, model.trained_length), progress=progress
    )
    wanted = check_lengths(lengths, model.trained_length, tried)
    texts = corpus(wanted[-1] + 1)
    readings, refusals = _reaching(tried, refused, wanted)
    point = turning_point(checkpoint.subject)
    prompts = make_prompts(checkpoint.tokenizer, wanted, depths, trials=trials, seed=seed, turning_point=point)
    documents = tuple(document.take(wanted[-1] + 1) for document in texts.documents)
    readers = [Reader(reading, model, reading.meant_for(wanted)) for reading in readings]
    loss_jobs: dict[tuple[str, int], list[LossJob]] = {}
    passkey_jobs: dict[tuple[str, PasskeyPrompt], PromptJob] = {}
    for reader in readers:
        if reader.reading.name != TRUNCATED:  # the best of the windows, which are measured one by one
            loss_jobs |= _loss_jobs(reader, documents, point)
            passkey_jobs |= {} if reader.reading.name == SELECTED else _passkey_jobs(reader, prompts)
    jobs: list[LossJob | PromptJob] = [job for jobs in loss_jobs.values() for job in jobs]
    jobs += passkey_jobs.values()
    order = {reader: number for number, reader in enumerate(readers)}
    path = None if output is None else output / "cells.jsonl"
    group = group or ProcessGroup()
    return Comparison(
        "ctxext eval compare",
        checkpoint,
        sorted(jobs, key=lambda job: order[job.reader]),
        corpus=texts,
        journal=Journal(path, group.process, identity="comparison.json"),
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


def _reaching(
    readings: Sequence[Reading], refusals: Sequence[Refusal], lengths: Sequence[int]
) -> tuple[tuple[Reading, ...], tuple[Refusal, ...]]:
    """Move methods that reach no length beyond the trained one to the refused methods."""
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
    """Return the trained length and the given lengths, increasing; by default every method's reach.

    Raises:
        InvalidParameterError: a length that no method is patched for, or none beyond the trained length.
    """
    reaches = sorted({reading.reach for reading in readings if reading.reach is not None})
    wanted = sorted({*(lengths or reaches), trained_length})
    if wanted[-1] > max(reaches, default=wanted[-1]):
        raise InvalidParameterError(
            f"A length of {wanted[-1]:,} tokens is beyond what any method here is patched for: the furthest reaches "
            f"{reaches[-1]:,}, trained to {trained_length:,}. Raise --factor, or ask for a smaller --length."
        )
    least = trained_length + 2 * BEYOND  # a bucket of one token has no standard error
    if wanted[0] < trained_length or wanted[:2][-1] < least:
        lengths_found = ", ".join(f"{length:,}" for length in wanted)
        raise InvalidParameterError(
            f"A comparison reads beyond the trained {trained_length:,} tokens (what happens inside is in every table); "
            f"found lengths of {lengths_found}. Give a --length of {least:,} or more, or a greater --factor."
        )
    return tuple(wanted)


def _loss_jobs(
    reader: Reader, documents: Sequence[TokenisedDocument], turning_point: int
) -> dict[tuple[str, int], list[LossJob]]:
    """Lay out the texts by the name of the reading and the length; one pass gives a static reading's every length."""
    name, label = reader.reading.name, reader.reading.label

    def job(text: TokenisedDocument, length: int) -> LossJob:
        windows = reader.beyond(text, length) if is_short(name) else [Window(0, length + 1, length)]
        about = f"{label}, {text.name}, {length:,} tokens"
        return LossJob.of(reader, text, windows, name=about, turning_point=turning_point)

    lengths = reader.lengths if reader.reading.dynamic else reader.lengths[-1:]
    return {(name, length): [job(document.take(length + 1), length) for document in documents] for length in lengths}


def _passkey_jobs(reader: Reader, prompts: Sequence[PasskeyPrompt]) -> dict[tuple[str, PasskeyPrompt], PromptJob]:
    """Lay out the passkeys by the name of the reading and the prompt.

    A key is looked for in all that fits; inside the window, the truncated reading is the unpatched one.
    """
    window, trained = reader.window, reader.readings.trained_length
    return {
        (reader.reading.name, prompt): PromptJob.of(reader, prompt)
        for prompt in prompts
        if prompt.length in reader.lengths and (window is None or window == trained < prompt.length)
    }
