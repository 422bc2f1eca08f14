"""A length curriculum: one run that begins with a smaller extension and shorter sequences."""

from __future__ import annotations

import bisect
import contextlib
import itertools
from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import TrainerCallback

from ctxext.core import patching
from ctxext.core.patching import patched_state
from ctxext.core.subject import Subject
from ctxext.errors import IncompatibleError
from ctxext.methods.base import resolve
from ctxext.methods.parameters import MOST_TOKENS
from ctxext.training.documents import TokenisedDocuments
from ctxext.training.lora import encodings
from ctxext.training.memory import Memory
from ctxext.training.sequences import Item, PackedSequences, Sequences, TrainingSequences
from ctxext.training.settings import ExtensionSettings, Settings


def stages_of(settings: Settings) -> list[tuple[int, ExtensionSettings, int]]:
    """Return the steps, extension and sequence length of each stage of a run; the last stage is the settings' own."""
    left = settings.training.steps - sum(stage.steps for stage in settings.stages)
    given = settings.extension.model_dump() | {"factor": None, "target_length": None}
    early = [
        (
            stage.steps,
            ExtensionSettings(**given | stage.model_dump(include={"factor", "target_length"})),
            stage.length or settings.data.length,
        )
        for stage in settings.stages
    ]
    return [*early, (left, settings.extension, settings.data.length)]


def try_stages(model: nn.Module, settings: Settings) -> None:
    """Extend a model as each stage of a run will, and undo it: what one cannot be is said before anything is trained.

    The weights of the model may be missing.
    """
    for _, extension, _ in stages_of(settings):
        with patching.patched(model, extension.method, **extension.arguments()):
            pass


def sequences_of(
    settings: Settings, documents: TokenisedDocuments, per_step: int = 1, trained_length: int | None = None
) -> Sequences:
    """Build the training sequences of a run, all its stages together.

    Args:
        per_step: sequences of a step.
        trained_length: tokens; None before the model is loaded, where only texts that are too short are refused.

    Raises:
        InvalidParameterError: if sequences exceed a stage's window, or the documents do not fill one sequence.
    """
    data = settings.data
    parts: list[Sequences] = []
    for number, (steps, extension, length) in enumerate(stages_of(settings)):
        target = MOST_TOKENS
        if trained_length is not None:
            asked = (extension.factor, extension.target_length, trained_length, extension.parameters)
            target = resolve(extension.method, *asked).target_length(trained_length)
        given: dict[str, Any] = {
            "length": length,
            "count": steps * per_step,
            "seed": settings.seed + number,
            "target_length": target,
            "shortest": data.shortest,
        }
        if data.positions == "packed":
            parts.append(PackedSequences(documents, **given))
        else:
            parts.append(TrainingSequences(documents, positions=data.positions, **given))
    return StagedSequences(parts) if len(parts) > 1 else parts[0]


class StagedSequences(Sequences):
    """Sequences of several stages, one stage after the other."""

    def __init__(self, parts: Sequence[Sequences]) -> None:
        self.parts = parts
        self._stops = list(itertools.accumulate(len(part) for part in parts))

    def __len__(self) -> int:
        return self._stops[-1]

    def __getitem__(self, index: int) -> Item:
        """Return the item of the stage that the index lies in."""
        part, place = self._place(index)
        item = part[place]
        return item | {"index": item["index"] + (index - place)}

    def length_of(self, index: int) -> int:
        part, place = self._place(index)
        return part.length_of(place)

    def origin_of(self, index: int) -> str:
        """Name the stage of an item, and the texts that the item holds."""
        part, place = self._place(index)
        return f"stage {self.parts.index(part) + 1}, {part.origin_of(place)}"

    def __str__(self) -> str:
        """Return a line for each stage."""
        return "\n".join(f"stage {number}: {part}" for number, part in enumerate(self.parts, start=1))

    def _place(self, index: int) -> tuple[Sequences, int]:
        self.require_index(index)
        number = bisect.bisect_right(self._stops, index)
        return self.parts[number], index - (self._stops[number - 1] if number else 0)


class Curriculum(TrainerCallback):  # type: ignore[misc]
    """Gives the model the extension of each step's stage; weights and optimiser state stay.

    At the end of training the model has the last stage's extension. Put this callback before ``ExtensionCallback``, so
    that a checkpoint on the border of two stages carries the extension of the next step.

    Args:
        memory: Way in which the model holds its activations. A change of stages undoes its edits first, since they
            may wrap the edits of the extension.

    Raises:
        IncompatibleError: for stages of a dynamic method, whose positions follow the length of the text already, or of
            an encoding with weights, which a change of stages would drop.
    """

    def __init__(
        self,
        model: nn.Module,
        stages: Sequence[tuple[int, ExtensionSettings, int]],
        memory: Memory,
        held: contextlib.ExitStack,
    ) -> None:
        self.base, self.memory, self.held = Subject.of(model).model, memory, held
        self.extensions = [extension for _, extension, _ in stages]
        self._stops = list(itertools.accumulate(steps for steps, _, _ in stages))
        self._current = self.extensions[-1]
        patched = patched_state(self.base)
        if len(stages) == 1 or patched is None:
            return
        if patched.method.dynamic:
            raise IncompatibleError(
                f"{patched.method.name} follows the length of the text by itself; stages of it have nothing to change. "
                f"Leave out the stages."
            )
        if encodings(self.base):
            raise IncompatibleError(
                f"{patched.method.name} brings weights of its own, and a change of stages would put new ones in their "
                f"place, which no optimiser has. Leave out the stages."
            )

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Set the extension of the next step's stage, also after a resume."""
        stage = min(bisect.bisect_right(self._stops, state.global_step), len(self.extensions) - 1)
        wanted = self.extensions[stage]
        if wanted is not self._current:
            self.held.close()
            patching.unpatch(self.base)
            patching.patch(self.base, wanted.method, **wanted.arguments())
            self.held = self.memory.apply(self.base)
            self._current = wanted

    on_step_end = on_train_begin  # before a checkpoint is written
