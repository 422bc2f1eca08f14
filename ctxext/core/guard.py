"""Keep programs without ctxext out of a checkpoint whose config has no field about its extension: a guard.

The guard is a sentence in place of a number. transformers 5 checks types: the sentence stops every class, and the error
quotes it. Programs without checks, such as transformers 4, cannot compute with a sentence. Live modules of a patched
model have the number.
"""

from __future__ import annotations

from typing import Any

from ctxext.core.subject import Subject
from ctxext.errors import IncompatibleError
from ctxext.rope_types import GUARD as GUARD

GUARDED_FIELD = "layer_norm_epsilon"
"""The guarded number of models with ALiBi."""

GUARDED = (GUARDED_FIELD, "dropout", "hidden_dropout", "rms_norm_eps")
"""Numbers that every class of transformers with such a field reads and checks to be numbers."""


def guarded_field(subject: Subject, otherwise: str) -> str:
    """Return the config field whose guard makes plain transformers refuse a checkpoint.

    Raises:
        IncompatibleError: if there is no such field.
    """
    for name in GUARDED:
        if isinstance(vars(subject.config).get(name), int | float):
            return name
    raise IncompatibleError(
        f"Plain transformers {otherwise}, and ctxext cannot make it refuse the checkpoint of this {subject.kind}. That "
        f"needs one of the fields {', '.join(GUARDED)} in the config."
    )


def without_guard(config: Any) -> None:
    """Replace guards in a config by the original numbers, in place."""
    for name in [name for name, value in vars(config).items() if value == GUARD]:
        setattr(config, name, config.ctxext["original"][name])
