"""The reference model of preference and reinforcement learning: the model as it was before training."""

from __future__ import annotations

import copy
from typing import TypeVar

from torch import nn

from ctxext.core.subject import Subject
from ctxext.errors import PatchStateError

ModelT = TypeVar("ModelT", bound=nn.Module)


def reference(model: ModelT) -> ModelT:
    """Copy an extended model with its extension, frozen and in evaluation mode.

    Use it where a trainer would otherwise load its reference model from the path of the plain checkpoint (TRL's
    ``DPOTrainer`` and ``KTOTrainer``: ``ref_model=reference(model)``). With a PEFT adapter no reference is needed:
    those trainers switch the adapter off.

    Args:
        model: model extended by ctxext, before training. It is left unchanged; the copy takes as much memory again.

    Raises:
        PatchStateError: the model is not extended.
    """
    if (subject := Subject.of(model)).saved is None:
        raise PatchStateError(
            f"This {type(subject.model).__name__} is not extended. Call ctxext.patch(model, ...) first."
        )
    return copy.deepcopy(model).requires_grad_(False).eval()
