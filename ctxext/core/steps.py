"""The steps of an extension: rooms above the core register theirs from their own files, and ``extend`` runs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum, auto

from transformers import PreTrainedModel

from ctxext import registry
from ctxext.core.edits import Edits
from ctxext.core.subject import Subject
from ctxext.files import JsonObject
from ctxext.methods import Method
from ctxext.spec import Description, Extension, ExtensionArguments


@dataclass(frozen=True)
class ExtendedPart:
    """The extension of a whole model, or of one side of an encoder-decoder."""

    subject: Subject
    method: Method
    extension: Extension


class Moment(IntEnum):
    """Moments of an extension in their order; steps of one moment do not depend on each other."""

    CHECK = auto()
    """Refuse a model. Nothing has been edited yet, and there is no journal to undo."""
    OWN_CONFIG = auto()
    """Give the model a config that no other model changes with."""
    PARTS = auto()
    """Extend the positions of a model that consists of several text models, and fill ``Work.sides``."""
    METHOD = auto()
    """Complete the method of a part by what its config decides, before the positions of the part change."""
    WEIGHTS = auto()
    """Complete the method of a part by what its weights decide, once no argument is wrong."""
    MODULES = auto()
    """Replace methods of live modules; the positions are extended."""
    REPLICAS = auto()
    """Prepare copies of modules; every method that modules run has been replaced."""
    CONFIG = auto()
    """Write into the config and other settings."""
    SAVING = auto()
    """Save the extension with what is put on the model; the model has its state."""
    CACHES = auto()
    """Guard what the model fills; the saved form is in the config."""


@dataclass(eq=False)
class Work:
    """An extension under way, which its steps read and fill in.

    Args:
        arguments: Arguments of ``patch``, or those of each side of an encoder-decoder by its name.
        saved: Extension that the model, or this side of it, was loaded with.
        side: Name of the side of an encoder-decoder; empty for a whole model.
        is_restored: True if the arguments are those of a saved extension.
        former: Tokens that an extension reached which was taken off before; None for none.
    """

    subject: Subject
    arguments: ExtensionArguments | Mapping[str, ExtensionArguments]
    edits: Edits
    saved: JsonObject | None = None
    side: str = ""
    is_restored: bool = False
    former: int | None = None
    sides: dict[str, ExtendedPart] = field(default_factory=dict)
    method: Method = field(init=False)
    extension: Extension = field(init=False)


@dataclass(frozen=True)
class Step:
    """One step of every extension that it applies to; unpatching calls ``undo`` before the journal is undone."""

    moment: Moment
    do: Callable[[Work], None]
    applies: Callable[[Work], object] = lambda work: True
    undo: Callable[[PreTrainedModel], None] = lambda model: None


_STEPS: list[Step] = []
Describer = Callable[[ExtendedPart, Description], Description]
_DESCRIBERS: list[Describer] = []


def register(step: Step) -> None:
    """Add a step to every later extension; a file registers its own steps when it is imported."""
    _STEPS.append(step)


def register_description(describer: Describer) -> None:
    """Add to every later description of a live model what a function knows of a part of it."""
    _DESCRIBERS.append(describer)


def steps() -> list[Step]:
    """Return the steps of all rooms in the order of their moments, and by file within a moment."""
    registry.fill("steps")
    return sorted(_STEPS, key=lambda step: (step.moment, step.do.__module__))


def fill_steps_of(method: Method) -> None:
    """Import the rooms whose steps are for one method, or for all dynamic ones."""
    registry.fill(f"steps of {method.name}")
    if method.dynamic:
        registry.fill("steps of dynamic methods")


def run(work: Work, first: Moment, last: Moment) -> None:
    """Run the steps of these moments that apply."""
    for step in steps():
        if first <= step.moment <= last and step.applies(work):
            step.do(work)


def described(part: ExtendedPart, description: Description) -> Description:
    """Add to a description what each room knows of a part of a live model."""
    registry.fill("steps")
    for describer in sorted(_DESCRIBERS, key=lambda describer: describer.__module__):
        description = describer(part, description)
    return description
