"""What came out of a passkey run: every trial, and what they add up to by length and depth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from ctxext.errors import InvalidParameterError
from ctxext.evaluation._proportion import wilson_interval
from ctxext.evaluation.provenance import Provenance

__all__ = ["PasskeyCell", "PasskeyReport", "PasskeyResult", "PasskeyTrial"]

# Format 1 judged dynamic methods with the positions of prompt and answer together.
FORMAT, KIND = 2, "passkey"


@dataclass(frozen=True)
class PasskeyTrial:
    """The outcome of one prompt.

    Args:
        length: tokens asked for: in the prompt, or, in a grid, that prompt and answer fit into.
        depth: 0 to 1, as asked for.
        distance: tokens between the key and the answer.
        seed: of this cell.
        key: the five digits.
        correct: whether greedy decoding would produce the key.
        loss: mean over the key's tokens, nats; it moves before ``correct`` does.
    """

    length: int
    depth: float
    distance: int
    seed: int
    key: str
    correct: bool
    loss: float


@dataclass(frozen=True)
class PasskeyCell:
    """All trials of one length and depth.

    Args:
        length: tokens, as in the trials.
        depth: 0 to 1.
        correct: trials in which greedy decoding would produce the key.
        trials: how many there were.
        loss: mean over the trials, nats per token of the key.
    """

    length: int
    depth: float
    correct: int
    trials: int
    loss: float

    @property
    def accuracy(self) -> float:
        """Fraction of correct trials."""
        return self.correct / self.trials

    @property
    def interval(self) -> tuple[float, float]:
        """Where the accuracy of endless trials would be, with 95 percent confidence (Wilson)."""
        return wilson_interval(self.accuracy, self.trials)


@dataclass(frozen=True)
class PasskeyResult:
    """All trials of one way to read, in the order they were made.

    Args:
        trials: of all cells.
        haystack: what the key was hidden in.
        reading: ``unpatched``, ``truncated``, ``as saved``, or how the model was extended.
        label: the same, as a reader wants it.
    """

    trials: tuple[PasskeyTrial, ...]
    haystack: str = "noise"
    reading: str = "unpatched"
    label: str = "unpatched"

    @property
    def accuracy(self) -> float:
        """Fraction of correct trials."""
        return sum(trial.correct for trial in self.trials) / len(self.trials)

    @property
    def interval(self) -> tuple[float, float]:
        """Where the accuracy of endless trials would be, with 95 percent confidence (Wilson)."""
        return wilson_interval(self.accuracy, len(self.trials))

    @property
    def loss(self) -> float:
        """Mean loss of the trials, nats per token of the key."""
        return sum(trial.loss for trial in self.trials) / len(self.trials)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens, ascending."""
        return tuple(sorted({trial.length for trial in self.trials}))

    @property
    def depths(self) -> tuple[float, ...]:
        """Ascending."""
        return tuple(sorted({trial.depth for trial in self.trials}))

    @property
    def cells(self) -> tuple[PasskeyCell, ...]:
        """One per length and depth, by length and then by depth."""
        found: dict[tuple[int, float], list[PasskeyTrial]] = {}
        for trial in sorted(self.trials, key=lambda trial: (trial.length, trial.depth)):
            found.setdefault((trial.length, trial.depth), []).append(trial)
        return tuple(
            PasskeyCell(*cell, sum(t.correct for t in trials), len(trials), sum(t.loss for t in trials) / len(trials))
            for cell, trials in found.items()
        )

    def at(self, length: int) -> PasskeyResult:
        """The trials of one length alone."""
        return self.between(length, length)

    def between(self, least: int, most: int) -> PasskeyResult:
        """The trials of the lengths from ``least`` to ``most``."""
        return replace(self, trials=tuple(trial for trial in self.trials if least <= trial.length <= most))


@dataclass(frozen=True, kw_only=True)
class PasskeyReport:
    """A whole measurement: the same prompts, read in several ways.

    Args:
        readings: the unextended model first, where it was asked too.
        trained_length: tokens that the checkpoint was trained for.
        provenance: what was measured, on what, with what.
    """

    readings: tuple[PasskeyResult, ...]
    trained_length: int
    provenance: Provenance

    def rows(self) -> list[dict[str, Any]]:
        """One flat row per trial, for CSV."""
        return [
            {"checkpoint": self.provenance.checkpoint, "reading": reading.reading, "haystack": reading.haystack}
            | asdict(trial)
            for reading in self.readings
            for trial in reading.trials
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"format": FORMAT, "kind": KIND, **asdict(self), "provenance": self.provenance.to_dict()}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> PasskeyReport:
        """From what ``to_dict`` made.

        Raises:
            InvalidParameterError: something else.
        """
        if (saved.get("format"), saved.get("kind")) != (FORMAT, KIND):
            raise InvalidParameterError(
                f"This is not a passkey report of format {FORMAT}: found kind {saved.get('kind')!r}, format "
                f"{saved.get('format')!r}."
            )
        readings = tuple(
            PasskeyResult(**{**one, "trials": tuple(PasskeyTrial(**trial) for trial in one["trials"])})
            for one in saved["readings"]
        )
        provenance = Provenance.from_dict(saved["provenance"])
        return cls(readings=readings, trained_length=saved["trained_length"], provenance=provenance)
