"""What came out of a passkey run: every trial, and what they add up to by length and depth."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ctxext.evaluation._proportion import wilson_interval
from ctxext.evaluation.provenance import Provenance

__all__ = ["PasskeyCell", "PasskeyResult", "PasskeyTrial"]


@dataclass(frozen=True)
class PasskeyTrial:
    """The outcome of one prompt.

    Args:
        length: tokens in the prompt.
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
        length: tokens in the prompts.
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
    """All trials of a run, in the order they were made.

    Args:
        trials: of all cells.
        haystack: what the key was hidden in.
        provenance: of the model; None where nobody asked for it.
    """

    trials: tuple[PasskeyTrial, ...]
    haystack: str = "noise"
    provenance: Provenance | None = None

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
        return replace(self, trials=tuple(trial for trial in self.trials if trial.length == length))
