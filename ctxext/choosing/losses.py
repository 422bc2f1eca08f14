"""The losses that a race asks for, measured with a model: each text is one cell that is read once and kept."""

from __future__ import annotations

import contextlib
import hashlib
import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ctxext.choosing.budget import Costs, prefix_of
from ctxext.choosing.race import PIECES, Sizes
from ctxext.choosing.texts import SplitTexts, TextStretch
from ctxext.errors import InvalidParameterError
from ctxext.evaluation.forward import Progress, pass_cost, ticking
from ctxext.evaluation.loss import loss_by_position, loss_while
from ctxext.evaluation.passkey import PasskeyPrompt, make_prompts
from ctxext.evaluation.readings import Reader, Reading, Readings
from ctxext.evaluation.statistics import check_finite
from ctxext.evaluation.survey import Answer, Job, Survey
from ctxext.evaluation.truncation import UNPATCHED, tail_losses, tail_passes, window_name

# Where hidden keys stand: at the very start, which is the hardest, and farther on, beyond the window of the question.
DEPTHS = (0.0, 0.25, 0.5)
# Where a key stands that any model finds which finds keys: not at the start of a full window, whose distances were the
# rarest in training (SmolLM2-135M finds 0 of 3 there, and 12 of 12 nearer).
READABLE = 0.25


@dataclass(frozen=True, eq=False, kw_only=True)
class RaceCell(Job):
    """One reading of one text, or of several short ones.

    Args:
        read: what is done with the reader's model.
        heard: where the answer is put too, by the cell's key.
    """

    read: Callable[[nn.Module, Progress], Answer]
    heard: dict[str, Answer]

    def ask(self, model: nn.Module, progress: Progress) -> Answer:
        """The losses of the text, or of the tokens of a key."""
        answer = self.read(model, progress)
        if answer.losses is not None:
            check_finite(answer.losses, self.name)
        self.heard[self.key] = answer
        return answer


@dataclass(eq=False)
class ModelInUse:
    """A model that stays as the last reader had it, since extending and proving it takes longer than a short text.

    Args:
        readings: of the model.
    """

    readings: Readings
    current: Reading | None = field(init=False, default=None)
    stack: contextlib.ExitStack = field(init=False, default_factory=contextlib.ExitStack)

    def show(self, reading: Reading | None) -> None:
        """Let the model read as one reading does; None gives it back as it was."""
        if reading is not self.current:
            self.current = None
            self.stack.close()
            if reading is not None:
                self.stack.enter_context(self.readings.applied(reading))
            self.current = reading


@dataclass(frozen=True, eq=False)
class StayingReader(Reader):
    """A reader that does not leave when a cell is done, see ``ModelInUse``.

    Args:
        stage: where it stays.
    """

    stage: ModelInUse

    def applied(self) -> contextlib.AbstractContextManager[None]:
        """The model as this reader has it, inside a ``with`` and until another one comes."""
        self.stage.show(self.reading)
        return contextlib.nullcontext()


@dataclass(eq=False, kw_only=True)
class MeasuredLosses:
    """Losses that a model gives, each text as one cell that is measured once and kept.

    Args:
        survey: that keeps them.
        stage: the model.
        entered: readings of the candidates, the published YaRN first.
        costs: of passes over texts.
        split: the texts.
        seed: of the hidden keys.
        progress: called with what is being done and the cost done since the last call.
        sizes: of the race, once the budget is known.
        asked: passes over the target length that each cell cost, of the cells asked for.
        heard: answers by their cells' keys.
    """

    survey: Survey[RaceCell]
    stage: ModelInUse
    entered: tuple[Reading, ...]
    costs: Costs
    split: SplitTexts
    seed: int
    progress: Progress
    sizes: Sizes | None = None
    asked: dict[str, float] = field(init=False, default_factory=dict)
    heard: dict[str, Answer] = field(init=False, default_factory=dict)

    @property
    def trained(self) -> int:
        """Tokens of the window."""
        return self.costs.trained

    @property
    def length(self) -> int:
        """Tokens of the target."""
        return self.costs.length

    @cached_property
    def finished(self) -> dict[str, dict[str, Any]]:
        """What an earlier run has finished."""
        return self.survey.journal.finished()

    @cached_property
    def readings(self) -> dict[str, Reading]:
        """The references and the candidates by name."""
        return {one.name: one for one in (*self.stage.readings.find(())[0], *self.entered)}

    @cached_property
    def prompts(self) -> tuple[PasskeyPrompt, ...]:
        """The hidden keys."""
        assert self.sizes is not None
        depths = DEPTHS[: self.sizes.keys]
        return make_prompts(self.survey.checkpoint.tokenizer, [self.length], depths, seed=self.seed)

    @property
    def plan(self) -> str:
        """A hash of all that decides where a candidate is stopped."""
        names = [one.name for one in self.entered]
        told = json.dumps([repr(self.sizes), names, [one.text.sha256 for one in self.split.choosing]])
        return hashlib.sha256(told.encode()).hexdigest()[:12]

    # What a race asks for.

    def inside(self, name: str) -> Tensor:
        """The beginnings of the first texts."""
        first = 1 if self.sizes is None else self.sizes.first
        return torch.cat([self._inside(name, stretch) for stretch in self.split.choosing[:first]])

    def whole(self, name: str, text: int, go_on: Callable[[Tensor], bool]) -> Tensor:
        """A whole text, in pieces, for as long as the race wants more."""
        return self._heard(self._cell_of_whole(name, self.split.choosing[text], go_on))

    def keys(self, name: str) -> tuple[float, ...]:
        """The loss of every hidden key."""
        return tuple(self._key(name, prompt) for prompt in self.prompts)

    # What a search asks for.

    def add(self, reading: Reading) -> Reading:
        """Let a reading that was found on the way be measured like those that were entered."""
        self.readings[reading.name] = reading
        return reading

    def beyond(self, name: str) -> float:
        """The mean beyond the window on the texts of the second rung."""
        first = 1 if self.sizes is None else self.sizes.first
        read = [self._whole_at(name, stretch, self.length)[self.trained :] for stretch in self.split.choosing[:first]]
        return torch.cat(read).double().mean().item()

    def key_inside(self) -> float | None:
        """The loss of a key in a full window, unextended; None where the window is too short."""
        try:
            (prompt,) = make_prompts(self.survey.checkpoint.tokenizer, [self.trained], [READABLE], seed=self.seed)
        except InvalidParameterError:
            return None
        return self._key(UNPATCHED, prompt)

    # What the verdict asks for.

    def texts(self, name: str, stretches: Sequence[TextStretch]) -> list[Tensor]:
        """Whole texts that the race never read; inside the window, what texts of that length get."""
        dynamic = self.readings[name].dynamic
        found = []
        for stretch in stretches:
            losses = self._whole_at(name, stretch, self.length)
            if dynamic:
                inside = self._whole_at(name, stretch, self.trained)
                losses = torch.cat([inside, losses[self.trained :]])
            found.append(losses)
        return found

    def plain(self, stretch: TextStretch) -> Tensor:
        """The unextended model inside its window."""
        return self._whole_at(UNPATCHED, stretch, self.trained)

    def truncated(self, window: int, stretch: TextStretch) -> Tensor:
        """The end of a text when the model sees its last tokens only."""
        start, prefix, length = self.costs.end, stretch.text.prefix, self.length
        passes = tail_passes(window, start=start, positions=length, prefix=prefix)

        def read(model: nn.Module) -> Tensor:
            return tail_losses(model, stretch.text.input_ids, window=window, start=start, prefix=prefix)[0]

        return self._losses(
            window_name(window), "end", stretch, window, read, passes=passes, depends=[start], times=passes
        )

    # What a budget in time asks for.

    def seconds_of_inside(self, names: Sequence[str]) -> float:
        """How long candidates take for the beginning of the first text; the median, as a model's first call is slow."""
        return self._seconds(self._cell_of_inside(name, self.split.choosing[0]) for name in names)

    def seconds_of_whole(self) -> float:
        """How long the published YaRN takes for the first text, which it reads in any race."""
        return self._seconds([self._cell_of_whole(self.entered[0].name, self.split.choosing[0], lambda _: True)])

    def _seconds(self, cells: Iterable[RaceCell]) -> float:
        asked = list(cells)
        for cell in asked:
            self._heard(cell)
        finished = self.survey.journal.finished()
        seconds: list[float] = [finished[cell.key]["seconds"] for cell in asked]
        return max(statistics.median(seconds), 1e-3)

    # How cells are made and asked.

    def _inside(self, name: str, stretch: TextStretch) -> Tensor:
        return self._heard(self._cell_of_inside(name, stretch))

    def _cell_of_inside(self, name: str, stretch: TextStretch) -> RaceCell:
        length = prefix_of(self.trained, self.length)
        ids = stretch.text.take(length + 1).input_ids
        return self._cell(name, "inside", stretch, length, lambda model: loss_by_position(model, ids)[0])

    def _cell_of_whole(self, name: str, stretch: TextStretch, go_on: Callable[[Tensor], bool]) -> RaceCell:
        piece = -(-self.length // PIECES)

        def read(model: nn.Module) -> Tensor:
            return loss_while(model, stretch.text.input_ids, piece=piece, go_on=go_on)

        # The published YaRN is never stopped, so that what it read serves any plan.
        depends = [] if name == self.entered[0].name else [self.plan]
        return self._cell(name, "whole", stretch, self.length, read, passes=PIECES, depends=depends)

    def _whole_at(self, name: str, stretch: TextStretch, length: int) -> Tensor:
        ids = stretch.text.take(length + 1).input_ids
        return self._losses(name, "read", stretch, length, lambda model: loss_by_position(model, ids)[0])

    def _losses(self, name: str, kind: str, stretch: TextStretch, length: int, read: Any, **given: Any) -> Tensor:
        return self._heard(self._cell(name, kind, stretch, length, read, **given))

    def _cell(
        self,
        name: str,
        kind: str,
        stretch: TextStretch,
        length: int,
        read: Callable[[nn.Module], Tensor],
        *,
        passes: int = 1,
        times: int = 1,
        depends: Sequence[Any] = (),
    ) -> RaceCell:
        """A cell that reads a text.

        Args:
            name: of the reading.
            kind: of the cell.
            stretch: the text.
            length: tokens that the model may see.
            read: gives the losses.
            passes: calls of the model that the cost is spread over.
            times: passes of that length.
            depends: what the losses depend on beside that, as JSON values.
        """
        reading = self.readings[name]
        cost = times * pass_cost(length, self.costs.turning_point)
        shown = f"{reading.label}, {stretch.text.name}, {length:,} tokens"

        def ask(model: nn.Module, progress: Progress) -> Answer:
            with ticking(model, shown, cost / passes, progress):
                losses = read(model)
            share = self.costs.of(len(losses)) if kind == "whole" else times * self.costs.of(length)
            about = {"kind": kind, "length": length, "item": stretch.text.name, "passes": share}
            return Answer(about, losses)

        return RaceCell(
            key=self.stage.readings.key(
                [name, reading.method, reading.fingerprint], task=[kind, length, stretch.text.sha256, *depends]
            ),
            cost=cost,
            reader=StayingReader(reading, self.stage.readings, (length,), self.stage),
            name=shown,
            read=ask,
            heard=self.heard,
        )

    def _key(self, name: str, prompt: PasskeyPrompt) -> float:
        reading = self.readings[name]
        shown = f"{reading.label}, key, {prompt.name}"
        cost = pass_cost(prompt.length, self.costs.turning_point)

        def ask(model: nn.Module, progress: Progress) -> Answer:
            trial = prompt.watched(model, None, shown, cost, progress)
            share = self.costs.of(prompt.length)
            about = {"kind": "key", "length": prompt.length, "item": prompt.name, "passes": share}
            return Answer(about | {"correct": trial.correct, "loss": trial.loss})

        key = self.stage.readings.key([name, reading.method, reading.fingerprint], task=["key", prompt.identity])
        reader = StayingReader(reading, self.stage.readings, (prompt.length,), self.stage)
        values = self.values(RaceCell(key=key, cost=cost, reader=reader, name=shown, read=ask, heard=self.heard))
        return float(values["loss"])

    def values(self, cell: RaceCell) -> dict[str, Any]:
        """What a cell found, now or in an earlier run."""
        if cell.key not in self.finished and cell.key not in self.heard:
            self.survey.measure([cell], progress=self.progress)
        elif cell.key not in self.asked:
            self.progress(cell.name, cell.cost)
        heard = self.heard.get(cell.key)
        found = self.finished[cell.key] if heard is None else heard.values
        self.asked[cell.key] = found["passes"]
        return found

    def _heard(self, cell: RaceCell) -> Tensor:
        found, heard = self.values(cell), self.heard.get(cell.key)
        if heard is not None and heard.losses is not None:
            return heard.losses
        return self.survey.journal.losses(found)
