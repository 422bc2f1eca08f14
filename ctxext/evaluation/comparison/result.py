"""What a comparison found, as frozen objects made from its finished cells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ctxext.evaluation.comparison.readings import Reading, Refusal
from ctxext.evaluation.comparison.series import Series
from ctxext.evaluation.comparison.verdict import Verdict
from ctxext.evaluation.perplexity import Bucket, PairedDifference
from ctxext.evaluation.truncation import window_of

__all__ = ["ComparisonResult", "Panel", "PasskeyScore", "Row", "Score"]


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
        """The score at a length, None where the reading is not meant for it."""
        return next((score for score in self.scores if score.length == length), None)


@dataclass(frozen=True, kw_only=True)
class Panel:
    """What a figure of one factor shows: losses by position up to the length that the factor reaches.

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
    panels: tuple[Panel, ...]
    verdicts: tuple[Verdict, ...]
    provenance: Mapping[str, Any]
    made: Mapping[str, Any]

    def row(self, name: str) -> Row:
        """The row of a reading."""
        return next(row for row in self.rows if row.reading.name == name)

    @property
    def candidates(self) -> tuple[Row, ...]:
        """The rows of extensions."""
        return tuple(row for row in self.rows if row.reading.is_candidate)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)
