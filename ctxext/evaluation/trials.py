"""Prompts that ask for things hidden in long texts, their trials by kind and length, and what a reading keeps.

A command yields prompts, and each prompt scores its answer as a trial. The rest is here: which tokens a window shows,
the table of trials of every reading, its intervals, and the share of a score that is kept at greater lengths.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar, get_args, get_type_hints

import torch
from jaxtyping import Int
from torch import Tensor

from ctxext.measuring.provenance import Provenance, Report, from_json
from ctxext.measuring.statistics import wilson_interval
from ctxext.measuring.survey import PromptJob, Survey
from ctxext.measuring.truncation import UNPATCHED

KEPT = 0.85

# Not typing.Self, as in methods/base.py.
TrialsT = TypeVar("TrialsT", bound="Trials")
ReportT = TypeVar("ReportT", bound="TrialReport")


def without(tokens: Int[Tensor, " tokens"], dropped: int, *, prefix: int) -> Int[Tensor, " kept"]:
    """Leave out ``dropped`` tokens behind the first ``prefix``."""
    return torch.cat([tokens[:prefix], tokens[prefix + dropped :]])


@dataclass(frozen=True)
class Trials:
    """All answers of one way to read; a subclass says what a trial is.

    Args:
        trials: Outcomes in the order they were made, each with a ``row`` (a task, or the depth of a key), a ``length``
            and a ``score`` from 0 to 100.
        reading: Name of the way to read: ``unpatched``, ``truncated``, ``as saved``, or a method with its factor.
    """

    trials: tuple[Any, ...]
    reading: str = UNPATCHED
    label: str = UNPATCHED

    @property
    def rows(self) -> tuple[Any, ...]:
        """Tasks or depths, in the order they were measured."""
        return tuple(dict.fromkeys(trial.row for trial in self.trials))

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
    def cells(self: TrialsT) -> dict[tuple[Any, int], TrialsT]:
        """The trials by row and length, where there are some, in the order of lengths and then of rows."""
        places = sorted({(trial.length, trial.row) for trial in self.trials})
        return {(row, length): self.only(row=row, length=length) for length, row in places}

    @property
    def averages(self) -> dict[int, float]:
        """Mean score over all rows, each weighing the same, at every length at which all of them were measured."""
        cells, rows = self.cells, len(self.rows)
        scores = {length: [cell.score for (_, at), cell in cells.items() if at == length] for length in self.lengths}
        return {length: sum(of_rows) / rows for length, of_rows in scores.items() if len(of_rows) == rows}

    def only(self: TrialsT, *, row: Any = None, length: int | None = None) -> TrialsT:
        """Return the trials of one row, of one length, or of both."""
        kept = [trial for trial in self.trials if row in (None, trial.row) and length in (None, trial.length)]
        return replace(self, trials=tuple(kept))

    def longer_than(self: TrialsT, length: int) -> TrialsT:
        """Return the trials of more than ``length`` tokens."""
        return replace(self, trials=tuple(trial for trial in self.trials if trial.length > length))


def trials_of(kind: type[TrialsT], survey: Survey[PromptJob], **about: Any) -> tuple[TrialsT, ...]:
    """Sort the trials of a finished survey by reading; ``about`` are more fields of each."""
    return tuple(
        from_json(kind, {"trials": trials, "reading": reader.reading.name, "label": reader.reading.label} | about)
        for reader, trials in survey.trials()
    )


@dataclass(frozen=True, kw_only=True)
class TrialReport(Report):
    """A whole measurement: the same prompts, read in several ways.

    Args:
        readings: Trials of each way to read, the unextended model's first, where it was asked too.
    """

    readings: tuple[Any, ...]
    trained_length: int
    provenance: Provenance

    @property
    def lengths(self) -> list[int]:
        """All lengths of any reading, in tokens, increasing."""
        return sorted({length for reading in self.readings for length in reading.lengths})

    @classmethod
    def of(
        cls: type[ReportT], survey: Survey[PromptJob], provenance: Provenance, *, in_each: Any = None, **about: Any
    ) -> ReportT:
        """Summarise a finished survey; ``in_each`` has more fields of every reading, ``about`` of the report."""
        kind, _ = get_args(get_type_hints(cls)["readings"])
        return cls(
            readings=trials_of(kind, survey, **(in_each or {})),
            trained_length=survey.readers[0].readings.trained_length,
            provenance=survey.with_extensions(provenance),
            **about,
        )


def relative_effective_length(scores: Mapping[int, float]) -> int | None:
    """Return the largest length at which the score keeps 85 percent of the shortest length's score.

    This is *not* RULER's effective length, which is the largest length with an average above 85.6, the score of
    Llama-2-7B at 4K: a bar that a small model misses at every length. This one asks how much of the score at the
    shortest length is kept. It says nothing of how good that score is.

    Returns:
        Tokens; None where the score at the shortest length is 0, so that nothing can be kept.

    """
    bar = KEPT * scores[min(scores)]
    return max(length for length, score in scores.items() if score >= bar) if bar > 0 else None
