"""Where positions live, one file per model family. This folder is the registry: ``ARCHITECTURES``."""

from __future__ import annotations

import sys

from transformers import PreTrainedModel

from ctxext.architectures.base import Architecture, why_absent
from ctxext.errors import IncompatibleError
from ctxext.registry import discover
from ctxext.surgery.published import refuse_other_positions

__all__ = ["ARCHITECTURES", "Architecture", "architecture_of", "find_architecture"]

ARCHITECTURES: dict[str, type[Architecture]] = discover(sys.modules[__name__], Architecture)  # type: ignore[type-abstract]


def find_architecture(base: PreTrainedModel) -> Architecture | None:
    """The first architecture whose structure is found in the model; None if its positions live elsewhere."""
    return next((found for architecture in ARCHITECTURES.values() if (found := architecture()).matches(base)), None)


def architecture_of(base: PreTrainedModel) -> Architecture:
    """The first architecture whose structure is found in the model.

    Raises:
        IncompatibleError: if positions live nowhere that ctxext knows, or the config asks for others than were built.
    """
    if (found := find_architecture(base)) is not None:
        refuse_other_positions(base, found.positions)
        return found
    raise IncompatibleError(
        f"{type(base).__name__} ({base.config.model_type}) has no positions that ctxext can extend: "
        f"{why_absent(base)}. Known families: {', '.join(ARCHITECTURES)}."
    )
