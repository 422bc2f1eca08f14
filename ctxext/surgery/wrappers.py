"""TODO."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ctxext.errors import (
    IncompatibleError,
)


def base_model(model: nn.Module) -> PreTrainedModel:
    """Unwrap PEFT, torch.compile and data-parallel wrappers.

    Raises:
        IncompatibleError: if there is no transformers model inside.
    """
    inner = unwrapped(model)[-1]
    if not isinstance(inner, PreTrainedModel):
        raise IncompatibleError(f"ctxext extends transformers models; found {type(model).__name__}.")
    return inner


def is_zero3(model: nn.Module) -> bool:
    """Whether DeepSpeed ZeRO-3 has shared a model's weights out: it puts an id on each."""
    return any(hasattr(weight, "ds_id") for weight in model.parameters())


def unwrapped(model: Any) -> list[Any]:
    """The chain of wrappers around a transformers model, outermost first: torch.compile, data-parallel, PEFT."""
    chain = [model]
    while not isinstance(chain[-1], PreTrainedModel):
        outer = chain[-1]
        compiled = dict(outer.named_children()).get("_orig_mod") if isinstance(outer, nn.Module) else None
        if compiled is not None:  # asked first: it answers for every attribute of what is inside
            chain.append(compiled)
        elif hasattr(outer, "get_base_model"):
            chain.append(outer.get_base_model())
        elif isinstance(getattr(outer, "module", None), nn.Module):
            chain.append(outer.module)
        else:
            break
    return chain
