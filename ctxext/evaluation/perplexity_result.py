"""Scores, readings and verdict of a measurement of perplexity, as its report holds them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ctxext.measuring.provenance import Provenance, Report
from ctxext.measuring.statistics import PairedDifference
from ctxext.measuring.truncation import TRUNCATED, UNPATCHED, is_reference

# The two kinds of score: positions start..stop of a text, and a protocol's own average at a length.
POSITIONS, LENGTH = "positions", "length"


@dataclass(frozen=True, kw_only=True)
class PerplexityScore:
    """One number of a reading.

    Args:
        kind: ``positions``: the mean loss at the positions ``start <= i < stop``. ``length``: the protocol's average
            with texts or windows of ``stop`` tokens; in position mode that is the mean over all positions below.
        start: tokens; 0 for a length.
        versus_truncation: the loss minus the best truncation's on the same tokens, every token weighing the same;
            None inside the trained window, where nothing is truncated, for the best truncation itself, and for a
            single token.
        window: of a truncation, beyond the trained window: the tokens that it sees; for the best one, those of the
            window that is best on the tokens of this score.
    """

    kind: str
    start: int
    stop: int
    tokens: int
    loss: float
    versus_truncation: PairedDifference | None = None
    window: int | None = None

    @property
    def perplexity(self) -> float:
        """``exp(loss)``, dimensionless."""
        return math.exp(self.loss)


@dataclass(frozen=True, kw_only=True)
class PerplexityReading:
    """One way to read the texts.

    Args:
        name: ``unpatched``; ``truncated 2048`` for the last 2,048 tokens, and ``truncated`` for whichever of such is
            best on the tokens of a score; or a method's name.
        scores: positions first, then lengths.
        in_window: the loss inside the trained window minus the unpatched model's on the same tokens; None where there
            is no unpatched model to compare with, and for the references.
        dynamic: whether positions follow the length of the text, so that every length took a pass of its own.
        tokens: that went through the model, in all passes.
    """

    name: str
    scores: tuple[PerplexityScore, ...]
    in_window: PairedDifference | None = None
    dynamic: bool = False
    passes: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def at(self, kind: str) -> tuple[PerplexityScore, ...]:
        """Return the scores of one kind, by increasing length."""
        return tuple(score for score in self.scores if score.kind == kind)


@dataclass(frozen=True, kw_only=True)
class PerplexityResult(Report):
    """A whole measurement.

    Args:
        mode: ``position``, ``sliding``, ``yarn`` or ``longlora``; see ``ctxext.measuring.loss``.
        trained_length: tokens of the longest truncation.
        stride: of the windows, in tokens; None in position mode.
    """

    TITLE, FORMAT = "a perplexity result", 2

    mode: str
    trained_length: int
    lengths: tuple[int, ...]
    stride: int | None
    readings: tuple[PerplexityReading, ...]
    notes: tuple[str, ...]
    provenance: Provenance

    def find(self, name: str) -> PerplexityReading | None:
        """Return the reading of one name; None where it was not made."""
        return next((reading for reading in self.readings if reading.name == name), None)

    @property
    def extension(self) -> PerplexityReading | None:
        """The reading of the extended model, None where the checkpoint was measured as it is."""
        return next((reading for reading in self.readings if not is_reference(reading.name)), None)

    def sentence(self) -> str:
        """Say in one sentence whether the extended model uses its window."""
        measured = self.extension or self.find(UNPATCHED)
        scores = measured.scores if measured else ()
        compared = [(score, score.versus_truncation) for score in scores if score.versus_truncation is not None]
        positions = [pair for pair in compared if pair[0].kind == POSITIONS]
        if measured is None or not compared:
            return f"Nothing here lies beyond the trained {self.trained_length:,} tokens, so nothing was truncated."
        score, difference = (positions or compared)[-1]
        where = f"positions {score.start:,} to {score.stop:,}" if score.kind == POSITIONS else f"length {score.stop:,}"
        answer = {"better": "yes", "worse": "no", "no difference": "not measurably"}[difference.verdict]
        return (
            f"Does {measured.name} at {where} beat the best truncation, feeding only the last "
            f"{self._best_window(score):,} tokens? {answer}{difference.scope(len(self.provenance.documents))}: "
            f"{difference} nats per token (over {difference.units} {difference.over})."
        )

    def _best_window(self, score: PerplexityScore) -> int:
        """Return the window of the best truncation on the tokens of a score."""
        best, place = self.find(TRUNCATED), (score.kind, score.start, score.stop)
        windows = [
            other.window for other in (best.scores if best else ()) if (other.kind, other.start, other.stop) == place
        ]
        return windows[0] if windows and windows[0] is not None else self.trained_length
