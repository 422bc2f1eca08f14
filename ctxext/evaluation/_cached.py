"""One forward pass in pieces with a KV cache: for memory budgets that a whole pass does not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from ctxext.errors import IncompatibleError
from ctxext.patching import patched_state

__all__ = ["CachedPieces", "length_dependent", "regime_of"]

# Stock rope types that follow the length of a call's input.
FOLLOWING = {"dynamic", "longrope"}


class CachedPieces(nn.Module):
    """Stands in for a base model: calls it on consecutive pieces of a text, as if that were one call.

    Args:
        causal: the whole model.
        base: its layers.
        positions: tokens in the text.
        piece: tokens per call.

    Raises:
        IncompatibleError: the positions follow the length of a call's input in a way that cannot be told otherwise.
    """

    def __init__(self, causal: PreTrainedModel, base: nn.Module, *, positions: int, piece: int) -> None:
        super().__init__()
        self.base = base
        self.piece = piece
        self.cache = DynamicCache(config=causal.config)
        patched = patched_state(causal)
        # Positions of a dynamic method follow the length of the whole text, which a piece does not show.
        dynamic = patched is not None and patched.method.dynamic
        self.length = {"ctxext_length": positions} if dynamic else {}
        if patched is None and length_dependent(causal):
            raise IncompatibleError(
                f"The positions of this {type(causal).__name__} follow the length of its input "
                f"(rope_parameters={causal.config.get_text_config(decoder=True).rope_parameters}), so a text cannot be "
                f"read in cached pieces. Allow more --memory, or extend it with ctxext."
            )

    def __getattr__(self, name: str) -> Any:
        modules = self.__dict__["_modules"]
        return modules[name] if name in modules else getattr(modules["base"], name)

    def forward(self, input_ids: Tensor, **kwargs: Any) -> Any:
        options = kwargs | self.length | {"past_key_values": self.cache, "use_cache": True, "return_dict": True}
        output: Any = None
        states = []
        for part in torch.split(input_ids, self.piece, dim=1):
            output = self.base(input_ids=part, **options)
            states.append(output.last_hidden_state)
        output.last_hidden_state = torch.cat(states, dim=1)
        output.past_key_values = None
        return output


def length_dependent(causal: PreTrainedModel) -> bool:
    """Whether stock transformers lets the positions of this model follow the length of each call's input."""
    rope = getattr(causal.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    return bool({part.get("rope_type") for part in (rope, *rope.values()) if isinstance(part, dict)} & FOLLOWING)


def regime_of(causal: PreTrainedModel) -> Callable[[int], int]:
    """What tells lengths apart whose positions differ: lengths of the same regime have the same positions."""
    patched = patched_state(causal)
    if patched is not None:
        method, trained = patched.method, patched.extension.trained_length
        return lambda length: method.regime(trained, length)
    if length_dependent(causal):
        return lambda length: length
    return lambda length: 0
