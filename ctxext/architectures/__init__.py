"""Model families by the place of their positions, one file each. This folder is the registry: ``ARCHITECTURES``."""

from __future__ import annotations

import sys

from ctxext.architectures.base import Architecture, why_absent
from ctxext.errors import IncompatibleError
from ctxext.registry import discover
from ctxext.surgery.published import refuse_other_positions
from ctxext.surgery.subject import Subject

__all__ = ["ARCHITECTURES", "Architecture", "architecture_of", "find_architecture"]

ARCHITECTURES: dict[str, type[Architecture]] = discover(sys.modules[__name__], Architecture)  # type: ignore[type-abstract]


def find_architecture(subject: Subject) -> Architecture | None:
    """Return the first architecture that matches the model; None if none does."""
    return next((family for kind in ARCHITECTURES.values() if (family := kind()).matches(subject)), None)


def architecture_of(subject: Subject) -> Architecture:
    """Return the first architecture that matches the model.

    Raises:
        IncompatibleError: if none matches, or the config asks for other positions than the model has.
    """
    if (family := find_architecture(subject)) is not None:
        refuse_other_positions(subject, family.positions)
        return family
    raise IncompatibleError(
        f"{type(subject.model).__name__} ({subject.kind}) has no positions that ctxext can extend: "
        f"{why_absent(subject.model)}. Known families: {', '.join(ARCHITECTURES)}."
    )
