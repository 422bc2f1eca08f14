"""A stale cache: what a dynamic method does when the positions of a sequence change under what is cached of it.

The rule. A dynamic method fits its positions to a length (``Method.fitted_length``), and one pass of the model gives
all tokens of a document the positions for one such length. What is cached of the document is right as long as the pass
that goes on has the same fitted length as the pass that filled the cache, and wrong as soon as it has another. Not
only the keys are: the hidden states of a layer were computed by the layers below with the positions of their time,
so caching keys before rotation would not help. There are two ways out, and both ask the same question.
``generate()`` has all tokens at hand and computes the cache again (``RecomputeStaleCache``); a loop of the user's own
is refused in the pass itself (``refuse_stale_cache``), with a sentence that says what to do.

The length at which a cache was filled is not the length that it has now (it may have been cropped), so every pass
writes it down: see ``caches.py``.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ctxext.errors import IncompatibleError
from ctxext.methods import Method
from ctxext.surgery.caches import Filled, cache_in, current_filling, empty, filled, guards_of, remember
from ctxext.surgery.edits import Edits


@dataclass(frozen=True)
class LengthRule:
    """Which positions a text of so many tokens gets on one model: a dynamic method, and the length that it starts from.

    Args:
        method: a dynamic method.
        trained_length: tokens that the checkpoint was trained for.
    """

    method: Method
    trained_length: int

    def fitted(self, length: int) -> int:
        """The length that positions of ``length`` tokens are fitted to."""
        return self.method.fitted_length(self.trained_length, length)

    def cached(self, known: Filled | None, row: int, rows: int, before: int) -> int | None:
        """The length whose positions a row's ``before`` cached tokens have; None where nobody knows.

        What nothing is remembered of is no text that was read: a learned prefix, or the part of a text before a shard.
        """
        return self.fitted(before) if known is None else known.of(row, rows)


def refuse_stale_cache(rule: LengthRule, row: int, rows: int, cached: list[int], now: list[int]) -> None:
    """Raise if tokens of a row were cached under other positions than the sequence has now; else note what it has.

    Called by what computes positions, once for each row of a pass. A document of which nothing came before this call
    has nothing that could be stale; of any other, the fitted lengths of then and now must agree.

    Args:
        rule: of the model.
        row: which row of the batch.
        rows: how many rows the batch has.
        cached: per document of the row, tokens that came before this call.
        now: per document of the row, tokens including this call's.

    Raises:
        IncompatibleError: saying what to do.
    """
    filling = current_filling()
    known = None if filling is None else filling.before
    for before, length in zip(cached, now, strict=True):
        cached_as = rule.cached(known, row, rows, before)
        if not before or cached_as == rule.fitted(length):
            continue
        said = f" have (those of a sequence of {cached_as})"
        if not cached_as:
            said = " have (rows of different lengths were picked or reordered, or a pass failed half-way)"
        shard = (
            " If this call holds a shard of a longer sequence, pass ctxext_length=<global length in tokens>, the same "
            "on every rank."
        )
        raise IncompatibleError(
            f"Method {rule.method.name!r} gives a sequence of {length} tokens other positions than the {before} tokens "
            f"that are cached of it{'' if known is None else said}, so these no longer fit. model.generate() "
            f"recomputes them; in a loop of your own, call the model on the whole sequence without a cache."
            f"{shard if known is None else ''}"
        )
    note_fitted_lengths(row, [max(map(rule.fitted, now), default=rule.trained_length)])


def note_fitted_lengths(row: int, fitted_lengths: list[int]) -> None:
    """Note the length whose positions the rows from ``row`` on have in the pass that this thread is inside of.

    What a row held before is either cached under the same positions, or padding, which has none.
    """
    filling = current_filling()
    if filling is not None:
        filling.note(row, fitted_lengths)


@dataclass
class RecomputeStaleCache:
    """Stands in for ``model.prepare_inputs_for_generation``: empties the cache when positions change.

    ``generate`` then gives what greedy decoding without a cache gives, with any cache and with chunked prefill.

    Args:
        model: the patched model.
        rule: its positions.
    """

    model: nn.Module
    rule: LengthRule

    def __call__(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        *,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Takes and returns what transformers' own method does."""
        cache = cache_in(kwargs)
        cached = 0 if cache is None else int(cache.get_seq_length())
        new = input_ids if next_sequence_length is None else input_ids[:, -next_sequence_length:]
        total = cached + new.shape[1]
        whole = self._whole(input_ids, new, cache, cached, total)
        model: Any = self.model
        is_decoder = not model.config.is_encoder_decoder  # else the mask is that of the encoder's text
        mask = attention_mask if is_decoder else None
        if cached and self._changes(cache, mask, kwargs.get("position_ids"), new, total):
            if whole is None or inputs_embeds is not None:
                raise IncompatibleError(
                    f"Method {self.rule.method.name!r} changes positions at {total} tokens and the tokens before are "
                    f"not at hand to recompute them (the prompt was given as embeddings, or the cache came from "
                    f"elsewhere). Generate from input_ids, with a cache of its own."
                )
            empty(cache)
            input_ids, next_sequence_length = whole, None
            mask = mask[:, :total] if mask is not None else None
            attention_mask = mask if is_decoder else attention_mask
            kwargs |= {"is_first_iteration": True} | _whole_positions(kwargs, mask, whole)
            self._warn()
        if cache is not None:
            remember(cache, expected=whole)
        return type(model).prepare_inputs_for_generation(
            model,
            input_ids,
            next_sequence_length=next_sequence_length,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )

    def _whole(self, input_ids: Tensor, new: Tensor, cache: Any, cached: int, total: int) -> Tensor | None:
        """All tokens so far; chunked prefill hands over only the new ones."""
        if input_ids.shape[1] == total:
            return input_ids
        known = filled(cache)
        if known is not None and known.tokens is not None and known.tokens.shape == (new.shape[0], cached):
            return torch.cat((known.tokens, new), dim=1)
        return None

    def _changes(self, cache: Any, mask: Tensor | None, positions: Tensor | None, new: Tensor, total: int) -> bool:
        """Whether what is cached has other positions than the sequence gets with this call."""
        if not all(guard.stands(cache) for guard in guards_of(self.model)):
            return True
        known, rows = filled(cache), new.shape[0]
        before, now = [total - new.shape[1]] * rows, [total] * rows
        if mask is not None and mask.ndim == 2:
            before, now = mask[:, : before[0]].sum(-1).tolist(), mask[:, :total].sum(-1).tolist()
        if positions is not None and positions.ndim == 3:  # an image takes fewer positions than it has tokens
            now = (positions[-3:].amax(dim=(0, 2)) + 1).tolist()  # a fourth plane, the first, counts tokens
        return any(
            earlier and self.rule.cached(known, row, rows, earlier) != self.rule.fitted(later)
            for row, (earlier, later) in enumerate(zip(before, now, strict=True))
        )

    def _warn(self) -> None:
        method = self.rule.method
        if getattr(method, "growth", None) == "exact":
            warnings.warn(
                f"{method.name} with growth='exact' recomputes the whole sequence for every token beyond the trained "
                f"window of {self.rule.trained_length}; growth='doubling' does so only when the length doubles.",
                stacklevel=3,
            )


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
class RefuseAssistedDecoding:
    """Stands in for ``model._get_candidate_generator``: assisted decoding only where positions cannot change.

    It verifies several tokens in one pass, with the positions of the longest; greedy decoding gives each its own.

    Args:
        model: the patched model.
        rule: its positions.
    """

    model: nn.Module
    rule: LengthRule

    def __call__(self, *, generation_config: Any, input_ids: Tensor, **kwargs: Any) -> Any:
        """Takes and returns what transformers' own method does."""
        first, last = input_ids.shape[1], generation_config.max_length
        if self.rule.fitted(first) != self.rule.fitted(last):
            raise IncompatibleError(
                f"Method {self.rule.method.name!r} changes positions between {first} and {last} tokens, and assisted "
                f"decoding (assistant_model, prompt_lookup_num_tokens) verifies several tokens in one pass, with one "
                f"set of positions. Generate without it, or let the method grow by doubling and stay between doublings."
            )
        model: Any = self.model
        return type(model)._get_candidate_generator(
            model, generation_config=generation_config, input_ids=input_ids, **kwargs
        )


def _never_compiles(*_: Any, **__: Any) -> bool:
    """Stands in for ``model._valid_auto_compile_criteria``."""
    return False


def compile_nothing_in_generate(model: PreTrainedModel, edits: Edits) -> None:
    """Let ``model.generate`` compile nothing by itself.

    On CUDA it does so for static caches; positions that follow the length, and attention in pieces, would break such a
    graph at every layer, and with more than eight layers torch gives up. The model's ``generation_config`` could say so
    too, but it is saved with the model and belongs to the user.
    """
    if hasattr(model, "_valid_auto_compile_criteria"):
        edits.set(model, "_valid_auto_compile_criteria", _never_compiles)


def _refuse_continuous_batching(method: str, *_: Any, **__: Any) -> Any:
    """Stands in for ``model.init_continuous_batching``, which ``generate_batch`` calls too.

    Continuous batching puts requests of several lengths into one row, end to end, as one call; where their positions
    happen to rise, such a row is one document to whoever looks at positions, and a short request would get the
    frequencies of a long one.
    """
    raise IncompatibleError(
        f"Positions of {method!r} follow the length of each text, and continuous batching puts several texts into one "
        f"row. Call generate() with a padded batch, or extend by a method of fixed positions, like yarn."
    )


def recompute_in_generate(model: PreTrainedModel, rule: LengthRule, edits: Edits) -> None:
    """Let ``model.generate`` follow a dynamic method."""
    edits.set(model, "prepare_inputs_for_generation", RecomputeStaleCache(model, rule))
    compile_nothing_in_generate(model, edits)
    optional = {
        "init_continuous_batching": functools.partial(_refuse_continuous_batching, rule.method.name),
        "_get_candidate_generator": RefuseAssistedDecoding(model, rule),
    }
    for name, stand_in in optional.items():
        if hasattr(model, name):
            edits.set(model, name, stand_in)
