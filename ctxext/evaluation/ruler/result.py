"""The result of RULER: every reply, and scores by task and length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ctxext.evaluation.task_result import TaskResult, relative_effective_length
from ctxext.measuring.provenance import Provenance, Report


@dataclass(frozen=True)
class RulerTrial:
    """One prompt and the reply to it.

    Args:
        length: tokens asked for, of prompt and reply together.
        answers: what a right reply contains.
        score: 0 to 100.
    """

    task: str
    length: int
    index: int
    prompt_tokens: int
    reply: str
    answers: tuple[str, ...]
    score: float


@dataclass(frozen=True)
class RulerResult(TaskResult):
    """All replies of one way to read."""

    trials: tuple[RulerTrial, ...]

    @property
    def empty(self) -> int:
        """Replies without any text."""
        return sum(not trial.reply.strip() for trial in self.trials)

    @property
    def relative_effective_length(self) -> int | None:
        """The relative effective length of the averages over all tasks, in tokens."""
        return relative_effective_length(self.averages)


@dataclass(frozen=True, kw_only=True)
class RulerReport(Report):
    """A whole measurement: the same prompts, read in several ways.

    Args:
        readings: the unextended model first, where it was asked too.
        chat: whether prompts stood in the model's chat template.
        essay: the text that stands in for NVIDIA's essays, None where no task needed one.
        left_out: why each task that is missing was not measured, by its name.
    """

    TITLE, KIND, FORMAT = "a RULER report", "ruler", 1

    readings: tuple[RulerResult, ...]
    chat: bool
    essay: str | None
    trained_length: int
    left_out: Mapping[str, str]
    provenance: Provenance
