"""Scores of several tasks at several lengths, and what is left of a score at greater lengths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ctxext.errors import InvalidParameterError
from ctxext.measuring.statistics import wilson_interval
from ctxext.measuring.truncation import UNPATCHED

KEPT = 0.85

# Not typing.Self, as in methods/base.py.
ResultT = TypeVar("ResultT", bound="TaskResult")


@dataclass(frozen=True)
class TaskResult:
    """All answers of one way to read; a subclass says what a trial is.

    Args:
        trials: in the order they were made, each with a ``task``, a ``length`` and a ``score`` from 0 to 100.
        reading: ``unpatched``, ``truncated``, ``as saved``, or how the model was extended.
    """

    trials: tuple[Any, ...]
    reading: str = UNPATCHED
    label: str = UNPATCHED

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names, in the order they were measured."""
        return tuple(dict.fromkeys(trial.task for trial in self.trials))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of prompt and answer, increasing."""
        return tuple(sorted({trial.length for trial in self.trials}))

    @property
    def score(self) -> float:
        """Mean score of the answers, 0 to 100."""
        total: float = sum(trial.score for trial in self.trials)
        return total / len(self.trials)

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 percent confidence interval of the score that more prompts would give."""
        low, high = wilson_interval(self.score / 100, len(self.trials))
        return 100 * low, 100 * high

    @property
    def cells(self: ResultT) -> dict[tuple[str, int], ResultT]:
        """The answers of each task at each length that was measured."""
        trials_of: dict[tuple[str, int], list[Any]] = {}
        for trial in self.trials:
            trials_of.setdefault((trial.task, trial.length), []).append(trial)
        return {cell: replace(self, trials=tuple(trials)) for cell, trials in trials_of.items()}

    @property
    def averages(self) -> dict[int, float]:
        """Mean score over all tasks, each weighing the same, at every length at which all of them were measured."""
        cells, tasks = self.cells, len(self.tasks)
        scores = {length: [cell.score for (_, at), cell in cells.items() if at == length] for length in self.lengths}
        return {length: sum(of_tasks) / tasks for length, of_tasks in scores.items() if len(of_tasks) == tasks}


def relative_effective_length(scores: Mapping[int, float], *, keep: float = KEPT) -> int | None:
    """Return the largest length at which the score keeps 85 percent of the shortest length's score.

    This is *not* RULER's effective length, which is the largest length with an average above 85.6, the score of
    Llama-2-7B at 4K: a bar that a small model misses at every length. This one asks what is left of the model's own
    score. It says nothing of how good that score is.

    Args:
        keep: share of the score at the shortest length, above 0 and at most 1.

    Returns:
        Tokens; None where the score at the shortest length is 0, of which nothing can be kept.

    Raises:
        InvalidParameterError: no score, or ``keep`` out of range.
    """
    if not scores or not 0 < keep <= 1:
        raise InvalidParameterError(
            f"A relative effective length needs scores and a share above 0 and at most 1, found {len(scores)} scores "
            f"and {keep}."
        )
    bar = keep * scores[min(scores)]
    return max(length for length, score in scores.items() if score >= bar) if bar > 0 else None
