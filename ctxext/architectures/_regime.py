"""When the positions of a sequence change, everything cached of it is wrong: refuse to go on, or recompute.

Not only the keys: the hidden states of a layer were computed by the layers below with the positions of their time. So
caching un-rotated keys would not be enough, and a cache is only right while the method's regime stays the same.
"""

from __future__ import annotations

import warnings
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer

from ctxext._edits import Edits
from ctxext.errors import IncompatibleError
from ctxext.methods import Method

__all__ = ["RecomputingInputs", "SteadyCandidates", "recompute_in_generate", "refuse_mixed_regimes"]


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
    _seen: _Seen = field(default_factory=lambda: _Seen(), repr=False)

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
        whole = self._whole(input_ids, new, past_key_values, cached, total)
        self._seen.note(past_key_values, whole)
        if cached and self._changes(attention_mask, new.shape[0], cached, total):
            if whole is None or inputs_embeds is not None:
                raise IncompatibleError(
                    f"Method {self.method.name!r} changes positions at {total} tokens and the tokens before are not at "
                    f"hand to recompute them (the prompt was given as embeddings, or the cache came from elsewhere). "
                    f"Generate from input_ids, with a cache of its own."
                )
            _empty(past_key_values)
            input_ids, next_sequence_length = whole, None
            attention_mask = attention_mask[:, :total] if attention_mask is not None else None
            kwargs |= {"is_first_iteration": True} | _whole_positions(kwargs, attention_mask, whole)
            self._warn()
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

    def _whole(self, input_ids: Tensor, new: Tensor, cache: Any, cached: int, total: int) -> Tensor | None:
        """All tokens so far; chunked prefill hands over only the new ones."""
        if input_ids.shape[1] == total:
            return input_ids
        seen = self._seen.inside(cache)
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

    def _warn(self) -> None:
        if getattr(self.method, "growth", None) == "exact":
            warnings.warn(
                f"{self.method.name} with growth='exact' recomputes the whole sequence for every token beyond the "
                f"trained window of {self.trained_length}; growth='doubling' does so only when the length doubles.",
                stacklevel=3,
            )


class _Seen:
    """The tokens inside one cache. It does not keep the cache alive, and is empty in a copy of the model."""

    def __init__(self) -> None:
        self._cache: weakref.ref[Any] | None = None
        self._tokens: Tensor | None = None

    def __reduce__(self) -> tuple[type[_Seen], tuple[()]]:
        return (_Seen, ())

    def note(self, cache: Any, tokens: Tensor | None) -> None:
        """Remember what ``cache`` will hold after the call that is being prepared."""
        self._cache, self._tokens = (None, None) if cache is None else (weakref.ref(cache), tokens)

    def inside(self, cache: Any) -> Tensor | None:
        """The tokens in ``cache``, None where it is not the one that was seen last."""
        return self._tokens if self._cache is not None and self._cache() is cache else None


def _empty(cache: Any) -> None:
    """Empty a cache that grows or that has slots. Before 5.18, transformers' ``reset`` of a growing one only zeroes."""
    cache.reset()
    for layer in cache.layers:
        if isinstance(layer, DynamicLayer):
            layer.keys = layer.values = None
            layer.is_initialized = False
    if int(cache.get_seq_length()):
        raise IncompatibleError(f"A {type(cache).__name__} cannot be emptied, which dynamic methods need.")


def _whole_positions(kwargs: dict[str, Any], mask: Tensor | None, ids: Tensor) -> dict[str, Tensor]:
    """Positions of the whole sequence, where positions are given at all; chunked prefill gives only the new ones."""
    given = kwargs.get("position_ids")
    if given is None or given.shape[-1] == ids.shape[1]:
        return {}
    if given.ndim != 2:
        raise IncompatibleError(
            f"The positions of the tokens before are not at hand to recompute them: position_ids has the shape "
            f"{tuple(given.shape)}. Prefill in one piece (prefill_chunk_size=None)."
        )
    if mask is None:
        return {"position_ids": torch.arange(ids.shape[1], device=ids.device)[None].expand(ids.shape[0], -1)}
    return {"position_ids": (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0)}


@dataclass
class SteadyCandidates:
    """Stands in for ``model._get_candidate_generator``: assisted decoding only where positions cannot change.

    It verifies several tokens in one pass, with the positions of the longest; greedy decoding gives each its own.

    Args:
        model: the patched model.
        method: its dynamic method.
        trained_length: tokens that the checkpoint was trained for.
    """

    model: nn.Module
    method: Method
    trained_length: int

    def __call__(self, *, generation_config: Any, input_ids: Tensor, **kwargs: Any) -> Any:
        """Arguments and result of transformers' own method."""
        first, last = input_ids.shape[1], generation_config.max_length
        if self.method.regime(self.trained_length, first) != self.method.regime(self.trained_length, last):
            raise IncompatibleError(
                f"Method {self.method.name!r} changes positions between {first} and {last} tokens, and assisted "
                f"decoding (assistant_model, prompt_lookup_num_tokens) verifies several tokens in one pass, with one "
                f"set of positions. Generate without it, or let the method grow by doubling and stay between doublings."
            )
        model: Any = self.model
        return type(model)._get_candidate_generator(
            model, generation_config=generation_config, input_ids=input_ids, **kwargs
        )


def recompute_in_generate(model: PreTrainedModel, method: Method, trained_length: int, edits: Edits) -> None:
    """Let ``model.generate`` follow a dynamic method."""
    edits.set(model, "prepare_inputs_for_generation", RecomputingInputs(model, method, trained_length))
    if hasattr(model, "_get_candidate_generator"):
        edits.set(model, "_get_candidate_generator", SteadyCandidates(model, method, trained_length))
