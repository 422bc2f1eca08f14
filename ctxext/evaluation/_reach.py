"""For how many tokens a model is meant, before somebody measures it at more and calls the result a finding."""

from __future__ import annotations

from torch import nn

from ctxext._api import describe
from ctxext.errors import InvalidParameterError

__all__ = ["check_reach"]


def check_reach(model: nn.Module, length: int, *, beyond: bool) -> None:
    """Raise ``InvalidParameterError`` if ``length`` tokens are more than the model is meant for.

    Args:
        model: a transformers model, extended or not.
        length: tokens.
        beyond: whether the user asked to see how the model fails; then nothing is refused.
    """
    meant = describe(model)
    if beyond or meant.target_length is None or length <= meant.target_length:
        return
    state = "is trained for" if meant.method is None else f"was extended to, by {meant.method['method']}"
    raise InvalidParameterError(
        f"{length:,} tokens are more than the {meant.target_length:,} that this model {state}. Ask for fewer, extend "
        f"it further, or allow it, to see how it fails: beyond=True (--beyond)."
    )
