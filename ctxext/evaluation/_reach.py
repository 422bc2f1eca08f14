"""For how many tokens a model is meant, before somebody measures it at more and calls the result a finding."""

from __future__ import annotations

from torch import nn

from ctxext.errors import InvalidParameterError
from ctxext.evaluation._cached import length_dependent
from ctxext.patching import describe, patched_state
from ctxext.surgery.wrappers import base_model

__all__ = ["check_reach"]


def check_reach(model: nn.Module, length: int, *, beyond: bool) -> None:
    """Raise ``InvalidParameterError`` if ``length`` tokens are more than the model is meant for.

    A dynamic extension follows the length of the text, so that no length is beyond it.

    Args:
        model: a transformers model, extended or not.
        length: tokens.
        beyond: whether the user asked to see how the model fails; then nothing is refused.
    """
    meant, base = describe(model), base_model(model)
    patched = patched_state(base)
    follows = length_dependent(base) if patched is None else patched.method.dynamic
    if beyond or follows or meant.target_length is None or length <= meant.target_length:
        return
    state = "is trained for" if meant.method is None else f"was extended to, by {meant.method['method']}"
    raise InvalidParameterError(
        f"{length:,} tokens are more than the {meant.target_length:,} that this model {state}. Ask for fewer, extend "
        f"it further, or allow it, to see how it fails: beyond=True (--beyond)."
    )
