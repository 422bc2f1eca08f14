"""When the positions of a sequence change, everything cached of it is wrong: refuse to go on, or recompute.

Not only the keys: the hidden states of a layer were computed by the layers below with the positions of their time. So
caching un-rotated keys would not be enough, and a cache is only right while the method's regime stays the same.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ctxext.errors import IncompatibleError
from ctxext.methods import Method

__all__ = ["RecomputingInputs", "refuse_mixed_regimes"]


def refuse_mixed_regimes(method: Method, trained_length: int, cached: list[int], now: list[int]) -> None:
    """Raise if tokens were cached under other positions than the sequence has now.

    Args:
        method: a dynamic method.
        trained_length: tokens that the checkpoint was trained for.
        cached: per row, tokens that came before this call.
        now: per row, tokens including this call's.

    Raises:
        IncompatibleError: saying what to do.
    """
    for before, length in zip(cached, now, strict=True):
        if before and method.regime(trained_length, before) != method.regime(trained_length, length):
            raise IncompatibleError(
                f"Method {method.name!r} gives a sequence of {length} tokens other positions than it gave its first "
                f"{before}, so what is cached of those no longer fits. model.generate() recomputes it; in a loop of "
                f"your own, call the model on the whole sequence without a cache. If this call holds a shard of a "
                f"longer sequence, pass ctxext_length=<global length in tokens>, the same on every rank."
            )


@dataclass
class RecomputingInputs:
    """Stands in for ``model.prepare_inputs_for_generation``: empties the cache when positions change.

    ``generate`` then gives what greedy decoding without a cache gives, with any cache and with chunked prefill.

    Args:
        model: the patched model.
        method: its dynamic method.
        trained_length: tokens that the checkpoint was trained for.
    """

    model: nn.Module
    method: Method
    trained_length: int
    _seen: Tensor | None = field(default=None, repr=False)

    def __call__(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Arguments and result of transformers' own method."""
        cached = int(past_key_values.get_seq_length()) if past_key_values is not None else 0
        new = input_ids if next_sequence_length is None else input_ids[:, -next_sequence_length:]
        total = cached + new.shape[1]
        whole = self._whole(input_ids, new, cached, total)
        self._seen = whole
        if cached and self._changes(attention_mask, new.shape[0], cached, total):
            if whole is None:
                raise IncompatibleError(
                    f"Method {self.method.name!r} changes positions at {total} tokens and the tokens before are not at "
                    f"hand to recompute them (the prompt was given as embeddings, or the cache came from elsewhere). "
                    f"Generate from input_ids, with a cache of its own."
                )
            past_key_values.reset()
            input_ids, next_sequence_length = whole, None
            attention_mask = attention_mask[:, :total] if attention_mask is not None else None
            if kwargs.get("position_ids") is not None:
                kwargs["position_ids"] = _positions(attention_mask, whole)
            self._warn(cached)
        model: Any = self.model
        return type(model).prepare_inputs_for_generation(
            model,
            input_ids,
            next_sequence_length=next_sequence_length,
            past_key_values=past_key_values,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )

    def _whole(self, input_ids: Tensor, new: Tensor, cached: int, total: int) -> Tensor | None:
        """All tokens so far; chunked prefill hands over only the new ones."""
        if input_ids.shape[1] == total:
            return input_ids
        seen = self._seen
        if cached and seen is not None and seen.shape == (new.shape[0], cached):
            return torch.cat((seen, new), dim=1)
        return None

    def _changes(self, mask: Tensor | None, rows: int, cached: int, total: int) -> bool:
        if mask is None or mask.ndim != 2:
            before, now = [cached] * rows, [total] * rows
        else:
            before, now = mask[:, :cached].sum(-1).tolist(), mask[:, :total].sum(-1).tolist()
        regime = self.method.regime
        return any(
            earlier and regime(self.trained_length, earlier) != regime(self.trained_length, later)
            for earlier, later in zip(before, now, strict=True)
        )

    def _warn(self, cached: int) -> None:
        if getattr(self.method, "growth", None) == "exact":
            warnings.warn(
                f"{self.method.name} with growth='exact' recomputes the whole sequence for every token beyond the "
                f"trained window of {self.trained_length}; growth='doubling' does so only when the length doubles.",
                stacklevel=3,
            )


def _positions(mask: Tensor | None, ids: Tensor) -> Tensor:
    if mask is None:
        return torch.arange(ids.shape[1], device=ids.device)[None].expand(ids.shape[0], -1)
    return (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0)
