"""The result of a comparison, as frozen objects made from its finished cells."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ctxext.evaluation.comparison.plan import LOSS, PASSKEY, ComparisonPlan
from ctxext.evaluation.journal import Journal
from ctxext.evaluation.readings import Reading, Refusal
from ctxext.evaluation.statistics import (
    CURVE,
    ENOUGH_DOCUMENTS,
    Bucket,
    PairedDifference,
    bucketed,
    document_difference,
    edges_for,
)
from ctxext.evaluation.truncation import TRUNCATED, UNPATCHED, BestTruncation, best_window, join_best, window_of


@dataclass(frozen=True)
class Series:
    """One way to read a text.

    Args:
        name: of the method, or of a reference: ``unpatched``, ``truncated 2048`` for the one that sees the last 2,048
            tokens, and ``truncated`` for the best of those.
        buckets: the trained window as one bucket, then equal buckets beyond it.
        curve: the same losses in fine buckets, for a plot.
        in_window_ratio: perplexity inside the trained window over the unpatched model's, dimensionless.
        versus_truncation: for each bucket beyond the window, the loss minus that of the best truncation there.
        dynamic: whether the method's frequencies follow the length, so that the one pass at the full length charges
            its stretched frequencies to every position.
        seconds: wall time of the measurement.
        windows: of the best truncation: which window is the best in each bucket beyond the trained one, in tokens.
    """

    name: str
    buckets: tuple[Bucket, ...]
    curve: tuple[Bucket, ...]
    in_window_ratio: float
    versus_truncation: tuple[PairedDifference, ...]
    dynamic: bool
    seconds: float
    windows: tuple[int, ...] = ()


def summarise(
    name: str,
    losses: Tensor,
    *,
    unpatched: Tensor,
    truncated: BestTruncation,
    trained_length: int,
    dynamic: bool = False,
    seconds: float = 0.0,
) -> Series:
    """Compare one way of reading with the references.

    Args:
        name: of the method.
        losses: nats per token, [documents, positions].
        unpatched: of the same tokens, by the unpatched model.
        truncated: of the same tokens, by the best truncation, chosen between the edges of ``edges_for``.
        trained_length: tokens.
        dynamic: see ``Series``.
        seconds: see ``Series``.

    Raises:
        InvalidParameterError: if the losses are not of the same tokens, or do not go beyond the trained length.
    """
    length = losses.shape[1]
    edges = edges_for(trained_length, length)
    fine = min(CURVE, length - trained_length)
    curve_edges = edges_for(trained_length, length, inside=min(fine, trained_length), beyond=fine)
    window = slice(0, trained_length)
    beyond = [slice(start, stop) for start, stop in itertools.pairwise(edges[1:])]
    return Series(
        name=name,
        buckets=bucketed(losses, edges),
        curve=bucketed(losses, curve_edges),
        in_window_ratio=math.exp((losses[:, window].double() - unpatched[:, window].double()).mean().item()),
        versus_truncation=tuple(
            document_difference([*losses[:, s]], [*truncated.losses[:, s]], baselines=len(truncated.measured))
            for s in beyond
        ),
        dynamic=dynamic,
        seconds=seconds,
        windows=truncated.windows if name == TRUNCATED else (),
    )


@dataclass(frozen=True, kw_only=True)
class Score:
    """One reading at one length.

    Args:
        length: tokens that the model may see.
        end: the last positions before that length, a quarter of the trained window: what the length itself gives.
        whole: all positions up to that length.
        versus_truncation: at the end, the loss minus that of the best truncation there; None at the trained length.
        by_document: the same difference of each document, nats per token.
        window: of a truncation: tokens that it sees at the end; for the best one, those of the window that is best
            there. None at the trained length, and for what is no truncation.
        window_of_whole: the same for all positions up to the length.
    """

    length: int
    end: Bucket
    whole: Bucket
    versus_truncation: PairedDifference | None
    by_document: tuple[float, ...]
    window: int | None = None
    window_of_whole: int | None = None


@dataclass(frozen=True, kw_only=True)
class PasskeyScore:
    """Keys at one length and depth.

    Args:
        length: tokens that prompt and answer fit into.
        depth: of the key, 0 at the start to 1 at the end.
        found: keys that greedy decoding would produce.
        trials: prompts.
        loss: mean over the keys' tokens, nats.
        hidden: whether truncation cuts these keys off.
    """

    length: int
    depth: float
    found: int
    trials: int
    loss: float
    hidden: bool


@dataclass(frozen=True, kw_only=True)
class Row:
    """One reading with all that was measured of it.

    Args:
        reading: which.
        inside: the trained window.
        short_context: inside the trained window, the loss minus the unpatched model's.
        scores: at each length that the reading is meant for.
        passkeys: at each length and depth; empty where none were asked.
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
        length: tokens.
        series: the references, then the methods, each named as its reading.
    """

    factor: float | None
    length: int
    series: tuple[Series, ...]

    @property
    def drawn(self) -> tuple[Series, ...]:
        """The series without the single windows of truncation, the best of which stands for them."""
        return tuple(item for item in self.series if window_of(item.name) is None)


@dataclass(frozen=True, kw_only=True)
class ComparisonResult:
    """A whole comparison.

    Args:
        trained_length: tokens that the checkpoint was trained for.
        lengths: tokens, increasing; the trained length first.
        unit: what counted as independent for the standard errors.
        rows: the references, then the methods.
        refusals: methods that were not measured, and why.
        panels: one per factor.
        verdicts: one per length beyond the trained one.
        provenance: what it was measured on and with, as JSON values.
        made: when and by which command, as JSON values: all that may differ between two runs of the same comparison.
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
    def candidates(self) -> tuple[Row, ...]:
        """The rows of extensions."""
        return tuple(row for row in self.rows if row.reading.is_candidate)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def assemble(
    plan: ComparisonPlan, journal: Journal, *, provenance: Mapping[str, Any], made: Mapping[str, Any]
) -> ComparisonResult:
    """Put finished cells together; every cell of the plan must be in the journal.

    Raises:
        ResultsError: a cell's losses cannot be read.
    """
    finished = FinishedLosses(plan, journal)
    rows = tuple(_row(finished, reading) for reading in plan.readings)
    beyond = [n for n in plan.lengths[1:] if any(row.at(n) for row in rows if row.reading.is_candidate)]
    return ComparisonResult(
        trained_length=plan.trained_length,
        lengths=plan.lengths,
        unit="documents" if len(plan.documents) >= ENOUGH_DOCUMENTS else "blocks of tokens",
        rows=rows,
        refusals=plan.refusals,
        panels=_panels(finished),
        verdicts=tuple(_verdict(finished, rows, length) for length in beyond),
        provenance=provenance,
        made=made,
    )


class FinishedLosses:
    """Losses of finished cells, read when they are asked for: all at once may not fit into memory."""

    def __init__(self, plan: ComparisonPlan, journal: Journal) -> None:
        self.plan, self.journal = plan, journal
        found = journal.finished()
        self._lines = {
            (cell.reader.reading.name, cell.kind, cell.length, cell.index): found[cell.key] for cell in plan.cells
        }
        self.unpatched = next(reading for reading in plan.readings if reading.name == UNPATCHED)
        self.windows = {reading.window: reading for reading in plan.readings if reading.window is not None}
        self._ends: dict[int, Tensor] = {}

    def losses(self, reading: Reading, length: int) -> Tensor:
        """[documents, length]; a static reading's come from its one pass over its greatest length."""
        if reading.window is not None:
            head = self.losses(self.unpatched, self.plan.trained_length)
            tail = self._rows(reading, self.plan.lengths[-1])[:, : length - self.plan.trained_length]
            return torch.cat([head, tail], dim=1)
        measured = length if reading.dynamic else self.plan.lengths_of(reading)[-1]
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
        trained = self.plan.trained_length
        quarter = max(1, trained // 4)
        return length - quarter if length == trained else max(length - quarter, trained)

    def _rows(self, reading: Reading, length: int) -> Tensor:
        documents = range(len(self.plan.documents))
        return torch.stack([self.journal.losses(self._lines[reading.name, LOSS, length, index]) for index in documents])

    def passkeys(self, reading: Reading) -> tuple[PasskeyScore, ...]:
        """Count the keys found at each length and depth."""
        if reading.name == TRUNCATED or (reading.window or self.plan.trained_length) < self.plan.trained_length:
            return ()  # a key is looked for in all that fits, the longest window
        places: dict[tuple[int, float], list[Mapping[str, Any]]] = {}
        hidden: dict[tuple[int, float], bool] = {}
        for index, prompt in enumerate(self.plan.prompts):
            # Inside the window, the truncated reading is the unpatched one.
            inside = prompt.length <= self.plan.trained_length
            asked = self.unpatched if reading.window is not None and inside else reading
            if prompt.length in self.plan.lengths_of(reading):
                place = (prompt.length, prompt.passkey.depth)
                places.setdefault(place, []).append(self._lines[asked.name, PASSKEY, prompt.length, index])
                hidden[place] = prompt.passkey.distance > self.plan.trained_length
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
    window = finished.plan.trained_length
    read_inside = finished.unpatched if reading.name == TRUNCATED else reading  # inside the window nothing is dropped
    inside, plain = (finished.losses(which, window) for which in (read_inside, finished.unpatched))
    return Row(
        reading=reading,
        inside=bucketed(inside, [0, window])[0],
        short_context=document_difference([*inside], [*plain]),
        scores=tuple(_score(finished, reading, length) for length in finished.plan.lengths_of(reading)),
        passkeys=finished.passkeys(reading),
    )


def _score(finished: FinishedLosses, reading: Reading, length: int) -> Score:
    start = finished.last_stretch(length)
    window, end = finished.stretch(reading, length, start)
    window_of_whole, whole = finished.stretch(reading, length, 0)
    bucket = Bucket(start, length, end.numel(), end.double().mean().item())
    (up_to_there,) = bucketed(whole, [0, length])
    score = Score(length=length, end=bucket, whole=up_to_there, versus_truncation=None, by_document=())
    if length <= finished.plan.trained_length:
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
    plan = finished.plan
    methods = [reading for reading in plan.readings if not reading.is_reference]
    factors: list[float | None] = [*sorted({reading.factor for reading in methods if not reading.any_factor})]
    panels = []
    for factor in factors or [max((reading.factor for reading in methods), default=None)]:
        of_factor = [
            r for r in methods if r.factor == factor or (r.any_factor and factor is not None and r.factor >= factor)
        ]
        length = max(plan.lengths_of(of_factor[0])) if of_factor else plan.lengths[-1]
        references = [reading for reading in plan.readings if reading.is_reference]
        shown = [*references, *(reading for reading in of_factor if length in plan.lengths_of(reading))]
        unpatched = finished.losses(finished.unpatched, length)
        truncated = join_best(finished.truncations(length, 0), edges_for(plan.trained_length, length)[1:])
        series = [
            summarise(
                reading.name,
                truncated.losses if reading.name == TRUNCATED else finished.losses(reading, length),
                unpatched=unpatched,
                truncated=truncated,
                trained_length=plan.trained_length,
                dynamic=reading.dynamic,
            )
            for reading in shown
        ]
        panels.append(FactorSeries(factor=factor, length=length, series=tuple(series)))
    return tuple(panels)


YES, NO, UNDECIDED = "yes", "no", "undecided"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The best extension at one length, against the best truncation there.

    Args:
        length: tokens.
        best: name of the reading with the least loss at the end of that length.
        window: of the truncation with the least loss there, in tokens.
        versus_truncation: its loss minus that truncation's, same tokens.
        beats: ``yes``, ``no``, or ``undecided`` where this text cannot show a difference.
        standard_errors: how many a gain must exceed to count; more candidates need more, since the best of many is
            partly the luckiest. Luck among them cannot make the best look worse than it is, luck among the truncations
            can: a loss must exceed what so many candidates would need as there are windows.
        candidates: how many extensions competed.
        as_good: names of other readings whose difference to the best this text cannot show.
    """

    length: int
    best: str
    window: int
    versus_truncation: PairedDifference
    beats: str
    standard_errors: float
    candidates: int
    as_good: tuple[str, ...]


def judge(
    length: int,
    losses: Mapping[str, Float[Tensor, "documents positions"]],
    truncations: Mapping[int, Float[Tensor, "documents positions"]],
) -> Verdict:
    """Find the best of several readings of the same tokens and hold it against the best truncation.

    Args:
        length: tokens, for the record.
        losses: nats per token, by name; at least one.
        truncations: of the same tokens, by window; at least one.
    """
    window = best_window(truncations)
    baseline = [*truncations[window]]
    versus = {
        name: document_difference([*candidate], baseline, baselines=len(truncations))
        for name, candidate in losses.items()
    }
    best = min(versus, key=lambda name: versus[name].mean)
    needed = versus[best].errors_needed(len(losses))
    others = {
        name: document_difference([*candidate], [*losses[best]]) for name, candidate in losses.items() if name != best
    }
    return Verdict(
        length=length,
        best=best,
        window=window,
        versus_truncation=versus[best],
        beats={"better": YES, "worse": NO}.get(versus[best].verdict_of_best(len(losses)), UNDECIDED),
        standard_errors=needed,
        candidates=len(losses),
        as_good=tuple(name for name, gap in others.items() if gap.mean <= needed * gap.standard_error),
    )
