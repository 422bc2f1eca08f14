"""Losses of candidates, asked for as jobs of a survey: each is measured once, and kept in its journal."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from ctxext.choosing.halving import PIECES, Costs, Finish, Sizes, Stop
from ctxext.choosing.verdict import HeldOut, judge_held_out
from ctxext.evaluation.passkey import make_prompts
from ctxext.files import JsonObject, digest
from ctxext.measuring.forward import Progress, pass_cost, ticking
from ctxext.measuring.labels import label_of
from ctxext.measuring.loss import Window, loss_while
from ctxext.measuring.readings import Reader, Reading, Readings
from ctxext.measuring.selection import selection_windows
from ctxext.measuring.survey import Answer, Job, LossJob, Survey, jobs_of
from ctxext.measuring.truncation import SELECTED, UNPATCHED, tail_windows, window_name, window_of
from ctxext.texts.corpus import TokenisedDocument
from ctxext.texts.stretches import SplitTexts, TextStretch

Passes = Callable[[str, TextStretch], Sequence[Window]]  # of a reading, by its name, over a text
# Where hidden keys stand: at the very start, which is the hardest, and farther on, beyond the window of the question.
DEPTHS = (0.0, 0.25, 0.5)
# Candidates whose first reading says how long a pass takes.
TIMED = 3


@dataclass(frozen=True, eq=False, kw_only=True)
class WholeTextJob(Job):
    """Reads one text with one candidate, chunk by chunk, until ``stop``, called with all losses, returns a reason."""

    text: TokenisedDocument
    stop: Stop

    def ask(self, model: nn.Module, progress: Progress) -> Answer:
        """Return the losses of the text as far as it was read."""
        piece = -(-(self.text.tokens - 1) // PIECES)
        with ticking(model, self.name, self.cost / PIECES, progress):
            losses = loss_while(model, self.text.input_ids, piece=piece, go_on=lambda seen: self.stop(seen) is None)
        return Answer({"item": self.text.name}, losses)


@dataclass(eq=False, kw_only=True)
class MeasuredLosses:
    """Losses of a model's readings, in nats per token; see ``CandidateLosses``.

    Args:
        sizes: sizes of the rounds; None until a budget in time is known in passes.
        passes: cost of each answer, in passes over the target, by its job's key.
    """

    survey: Survey[Job]
    readings: Readings
    entered: tuple[Reading, ...]
    costs: Costs
    split: SplitTexts
    seed: int
    progress: Progress
    sizes: Sizes | None = None
    passes: dict[str, float] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._finished = self.survey.journal.finished()
        every = (*self.readings.find(())[0], Reading(name=SELECTED, label=label_of(SELECTED)), *self.entered)
        self.readers = {reading.name: Reader(reading, self.readings, ()) for reading in every}

    def answers(self, jobs: Sequence[Job]) -> list[JsonObject]:
        """Return the journal's line of each job, after doing the jobs that no earlier run finished."""
        missing = [job for job in jobs if job.key not in self._finished]
        for job in jobs:
            if job.key in self._finished and job.key not in self.passes:
                self.progress(job.name, job.cost)
            self.passes.setdefault(job.key, job.cost / pass_cost(self.costs.length, self.costs.turning_point))
        if missing:
            survey = replace(self.survey, jobs=missing)
            survey.measure(survey.begin(), progress=self.progress)
            self._finished = self.survey.journal.finished()
        return [self._finished[job.key] for job in jobs]

    @property
    def seconds(self) -> float:
        """Seconds of computing that the answers took, now or in an earlier run."""
        return sum((float(self._finished[key]["seconds"]) for key in self.passes), 0.0)

    def _losses(
        self, names: Sequence[str], stretches: Sequence[TextStretch], windows: Passes
    ) -> dict[str, list[Tensor]]:
        """Return the losses of each reading on each text, [scored], by the passes that ``windows`` gives for both."""
        jobs = [self._job(name, stretch, windows(name, stretch)) for name in names for stretch in stretches]
        losses = iter([self.survey.journal.losses(line) for line in self.answers(jobs)])
        return {name: [next(losses) for _ in stretches] for name in names}

    def _job(self, name: str, stretch: TextStretch, windows: Sequence[Window]) -> LossJob:
        reader, text = self.readers[name], stretch.text
        label = f"{reader.reading.label}, {text.name}, {windows[0].positions:,} tokens"
        return LossJob.of(reader, text, windows, name=label, turning_point=self.costs.turning_point)

    def _beginning(self, tokens: int) -> Passes:
        return lambda *_: [Window(0, tokens + 1, tokens)]

    def inside(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return the losses of each reading at the beginnings of the first texts."""
        first = self.split.choosing[: 1 if self.sizes is None else self.sizes.first]
        windows = self._beginning(self.costs.prefix)
        return {name: torch.cat(read) for name, read in self._losses(names, first, windows).items()}

    def whole(self, name: str, text: int, stop: Stop) -> Tensor:
        """Return the losses of a whole text, or until ``stop`` returns something for what was read."""
        job = self._whole(name, self.split.choosing[text], stop)
        losses = self.survey.journal.losses(self.answers([job])[0])
        self.passes[job.key] = self.costs.of(len(losses))
        return losses

    def keys(self, names: Sequence[str]) -> dict[str, tuple[float, ...]]:
        """Return the loss of every hidden key by each reading."""
        assert self.sizes is not None
        tokenizer, turning_point = self.survey.checkpoint.tokenizer, self.costs.turning_point
        depths, length = DEPTHS[: self.sizes.keys], self.costs.length
        prompts = make_prompts(tokenizer, [length], depths, seed=self.seed, turning_point=turning_point)
        readers = [replace(self.readers[name], lengths=(length,)) for name in names]
        answers = iter(self.answers(jobs_of(readers, prompts)))
        return {name: tuple(float(next(answers)["trial"]["loss"]) for _ in prompts) for name in names}

    def held_out(self, finish: Finish, stretches: Sequence[TextStretch]) -> HeldOut:
        """Return the verdict on texts that were never read before."""
        usual, trained = self.entered[0].name, self.costs.trained
        names = dict.fromkeys(name for name in (finish.choice, finish.runner_up, usual) if name)
        losses = self._losses(list(names), stretches, self._beginning(self.costs.length))
        dynamic = [name for name in names if self.readers[name].reading.dynamic]
        # Of a dynamic method inside the window, the losses of texts of that length count.
        for name, short in self._losses(dynamic, stretches, self._beginning(trained)).items():
            pairs = zip(short, losses[name], strict=True)
            losses[name] = [torch.cat([inside, whole[trained:]]) for inside, whole in pairs]
        unpatched = self._losses([UNPATCHED], stretches, self._beginning(trained))[UNPATCHED]
        span = {"start": self.costs.end, "positions": self.costs.length}
        block = self.costs.length - self.costs.end  # chunks are chosen once

        def passes(name: str, stretch: TextStretch) -> Sequence[Window]:
            window, text = window_of(name), stretch.text
            if window is None:
                return selection_windows(text.input_ids, window=trained, block=block, prefix=text.prefix, **span)
            return tail_windows(window, prefix=text.prefix, **span)

        tails = self._losses([*map(window_name, self.readings.windows), SELECTED], stretches, passes)
        return judge_held_out(
            losses,
            choice=finish.choice,
            usual=usual,
            runner_up=finish.runner_up,
            unpatched=unpatched,
            truncations=tails,
            documents=[stretch.document for stretch in stretches],
            trained=trained,
            same_documents=self.split.same_documents,
        )

    def timed(self, seconds: float, judged: Sequence[str]) -> tuple[float, Costs]:
        """Return the passes that a budget in time lasts for, and the costs by the clock.

        Args:
            judged: names of candidates that are judged inside the window.

        Raises:
            InvalidParameterError: a budget that does not last for the smallest sizes.
        """
        # A budget that is far too small is refused before the published YaRN reads a whole text, which every budget has
        # to hold. Calls of 256 tokens are slower than their share: they refuse only what a pass 16 times as fast could
        # not hold.
        for tokens, doubt in ((min(256, self.costs.prefix), 16.0), (self.costs.prefix, 1.0)):
            text, passes = self.split.choosing[0], self._beginning(tokens)
            inside = self._seconds([self._job(name, text, passes(name, text)) for name in judged[:TIMED]])
            self.costs.sizes(seconds / inside * self.costs.of(tokens), seconds, doubt)
        whole = self._seconds([self._whole(self.entered[0].name, self.split.choosing[0], lambda _: None)])
        return seconds / whole, self.costs.timed(inside, whole)

    def _seconds(self, jobs: Sequence[Job]) -> float:
        return max(statistics.median(float(line["seconds"]) for line in self.answers(jobs)), 1e-3)

    def _whole(self, name: str, stretch: TextStretch, stop: Stop) -> WholeTextJob:
        reader, text = self.readers[name], stretch.text
        # Where a candidate is stopped depends on all others; the published YaRN never is, so that it serves any plan.
        names = [reading.name for reading in self.entered]
        plan = [repr(self.sizes), names, [stretch.text.sha256 for stretch in self.split.choosing]]
        task = [] if name == self.entered[0].name else [digest(json.dumps(plan))]
        return WholeTextJob(
            key=self.readings.key(reader.reading.identity, text=text.sha256, whole=task),
            cost=pass_cost(self.costs.length, self.costs.turning_point),
            reader=reader,
            name=f"{reader.reading.label}, {text.name}, {self.costs.length:,} tokens",
            text=text,
            stop=stop,
        )
