"""The result of a comparison, as frozen objects, and its judgement."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor

from ctxext.measuring.readings import Reading, Refusal
from ctxext.measuring.statistics import (
    CURVE,
    Bucket,
    PairedDifference,
    bucketed,
    document_difference,
    edges_for,
)
from ctxext.measuring.truncation import best_window, window_of


@dataclass(frozen=True)
class Series:
    """One way to read a text.

    Args:
        name: of the method, or of a reference: ``unpatched``, ``truncated 2048`` for the one that sees the last 2,048
            tokens, and ``truncated`` for the best of those.
        buckets: the trained window as one bucket, then equal buckets beyond it.
        in_window_ratio: perplexity inside the trained window over the unpatched model's, dimensionless.
        versus_truncation: for each bucket beyond the window, the loss minus that of the best truncation there.
        dynamic: whether the method's frequencies follow the length, so that the one pass at the full length charges
            its stretched frequencies to every position.
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
    truncated: Tensor,
    baselines: int,
    windows: tuple[int, ...] = (),
    trained_length: int,
    dynamic: bool = False,
    seconds: float = 0.0,
) -> Series:
    """Compare one way of reading with the references.

    Args:
        unpatched: of the same tokens, by the unpatched model.
        truncated: of the same tokens, by the best truncation, chosen between the edges of ``edges_for``.
        windows: of the best truncation: which window that is between the edges, in tokens; empty for other readings.
        baselines: how many windows there were to choose from.

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
            document_difference([*losses[:, s]], [*truncated[:, s]], baselines=baselines) for s in beyond
        ),
        dynamic=dynamic,
        seconds=seconds,
        windows=windows,
    )


@dataclass(frozen=True, kw_only=True)
class Score:
    """One reading at one length.

    Args:
        end: the last positions before that length, a quarter of the trained window: what the length itself gives.
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
        depth: of the key, 0 at the start to 1 at the end.
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
        short_context: inside the trained window, the loss minus the unpatched model's.
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
        """The series without the single windows of truncation, the best of which stands for them."""
        return tuple(item for item in self.series if window_of(item.name) is None)


@dataclass(frozen=True, kw_only=True)
class ComparisonResult:
    """A whole comparison.

    Args:
        unit: what counted as independent for the standard errors.
        rows: the references, then the methods.
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


YES, NO, UNDECIDED = "yes", "no", "undecided"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The best extension at one length, against the best truncation there.

    Args:
        best: name of the reading with the least loss at the end of that length.
        beats: ``yes``, ``no``, or ``undecided`` where this text cannot show a difference.
        standard_errors: how many a gain must exceed to count; more candidates need more, since the best of many is
            partly the luckiest. Luck among them cannot make the best look worse than it is, luck among the truncations
            can: a loss must exceed what so many candidates would need as there are windows.
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
    """Find the best of several readings of the same tokens and hold it against the best truncation."""
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
