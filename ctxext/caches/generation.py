"""Handle stale caches: recompute or refuse them when a dynamic method changes the positions of a cached sequence.

The rule. A dynamic method fits its positions to a length (``Method.fitted_length``), and one pass of the model gives
all tokens of a document the positions for one such length. The cached part of the document is right as long as the
next pass has the fitted length of the pass that filled the cache, and stale once it has another. Caching keys before
rotation would not help: the layers below computed the hidden states with the old positions, too. There are two ways
out, under the same rule. ``generate()`` has all tokens at hand and computes the cache again (``RecomputeStaleCache``).
A loop of the user's own is refused in the pass itself (``fit_to_lengths``), with an error that names the way out.
With ``growth="request"`` the length is the one that a text may reach, which ``generate()`` declares
(``RequestedLengths``), so that nothing changes until its end.

A cache may have been cropped since it was filled, so its current length does not tell. Every pass records the fitted
lengths on the cache: see ``records.py``.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ctxext.caches.call import Declared, PositionedForward
from ctxext.caches.guards import guards_of, preparing_class
from ctxext.caches.records import (
    Filled,
    FittedModules,
    Given,
    cache_in,
    cached_tokens,
    current_pass,
    empty,
    filled,
    remember,
)
from ctxext.core.edits import replaced_forward
from ctxext.core.steps import Moment, Step, Work, register
from ctxext.errors import IncompatibleError, InvalidParameterError
from ctxext.methods import Method


@dataclass(frozen=True)
class LengthRule:
    """The rule that fits positions to the length of a text: a dynamic method and a trained length."""

    method: Method
    trained_length: int

    @property
    def by_request(self) -> bool:
        """True if positions stay as they are from the first token of a request to its last."""
        return getattr(self.method, "growth", None) == "request"

    def fitted(self, length: int) -> int:
        """Return the length to which positions of ``length`` tokens are fitted."""
        return self.method.fitted_length(self.trained_length, length)

    def needed(self, length: int, cached: int | None, declared: int | None) -> int:
        """Return the length to which positions of a text have to be fitted now.

        Args:
            length: tokens of the text so far, including this call.
            cached: the length to which its cached tokens are fitted; None if there are none, or it is unknown.
            declared: the ``ctxext_length`` of the call for this text.
        """
        fitted = self.fitted(length if declared is None else declared)
        # The first call of a request reserved positions for a longer text. Shorter ones keep these.
        if declared is None and self.by_request and cached is not None and fitted <= cached:
            return cached
        return fitted

    def require_declared(self, length: int, declared: int | None) -> None:
        """Raise ``InvalidParameterError`` for a text longer than declared."""
        if self.by_request and declared is not None and self.fitted(declared) < self.fitted(length):
            raise InvalidParameterError(
                f"A text of {length} tokens is longer than the {declared} declared for it, by ctxext_length or by the "
                f"prompt and max_new_tokens of generate(). Declare all tokens, those of a learned prompt included."
            )

    def cached(self, known: Filled | None, row: int, rows: int, before: int) -> int | None:
        """Return the fitted length of a row's ``before`` cached tokens; None if it is unknown.

        A cache without a record holds a learned prefix, or the part of a text before a shard. Its tokens are taken as
        fitted to the number of them.
        """
        return self.fitted(before) if known is None else known.of(row, rows)


def fit_to_lengths(
    rule: LengthRule, row: int, rows: int, cached: list[int], now: list[int], declared: Declared | None
) -> list[int]:
    """Return the lengths to which the documents of a row are fitted, and record the longest on the cache.

    The code that computes positions calls this once for each row of a pass. A document that begins in this call has no
    cached tokens; for any other, the fitted lengths before and now must agree.

    For each document of the row, ``cached`` has its tokens before this call, and ``now`` those including this call's.

    Raises:
        IncompatibleError: if cached tokens have other positions than the sequence has now; with the way out.
        InvalidParameterError: if ``declared`` does not fit the batch.
    """
    filling = current_pass.filling
    known = None if filling is None else filling.before
    declared = of_row(declared, row, rows)
    fitted_lengths = []
    for before, length in zip(cached, now, strict=True):
        cached_as = rule.cached(known, row, rows, before) if before else None
        fitted = rule.needed(length, cached_as, declared)
        fitted_lengths.append(fitted)
        rule.require_declared(length, declared)
        is_shard = declared is not None and not current_pass.continues
        if not before or is_shard or cached_as == fitted:
            continue
        description = f" have (those of a sequence of {cached_as})"
        if not cached_as:
            description = " have (rows of different lengths were picked or reordered, or a pass failed half-way)"
        if not current_pass.continues:
            raise IncompatibleError(
                f"Method {rule.method.name!r} follows the length of the text, and positions here begin at {before} "
                f"without a cache. Give positions from 0, or take a method that is not dynamic. If this call holds a "
                f"shard of a longer sequence, pass ctxext_length=<global length in tokens>, the same on every rank."
            )
        request = " Or pass ctxext_length=<tokens that the text may reach> to the first call, which fills the cache."
        raise IncompatibleError(
            f"Method {rule.method.name!r} gives a sequence of {length} tokens other positions than its {before} cached "
            f"tokens{'' if known is None else description}. The patched model's generate() recomputes the cache, "
            f"unless PEFT put a learned prompt into it. In your own loop, call the model on the whole sequence without "
            f"a cache.{request if rule.by_request else ''}"
        )
    cached_as = None if known is None else known.of(row, rows)  # what a row keeps that has padding alone in this call
    note_fitted_lengths(row, [max(fitted_lengths, default=rule.trained_length if cached_as is None else cached_as)])
    return fitted_lengths


def of_row(declared: Declared | None, row: int, rows: int) -> int | None:
    """Return the ``ctxext_length`` of one of ``rows``.

    Raises:
        InvalidParameterError: if it has another number of rows.
    """
    if declared is None or isinstance(declared, int):
        return declared
    if len(declared) != rows:
        raise InvalidParameterError(
            f"ctxext_length={list(declared)} has {len(declared)} numbers, but the batch has {rows} rows. Give one "
            f"number for each row, or one for all."
        )
    return int(declared[row])


def note_fitted_lengths(row: int, fitted_lengths: list[int]) -> None:
    """Record the fitted lengths of the rows from ``row`` on for the running pass of this thread.

    Cached tokens of a row have the same positions, and padding has none.
    """
    filling = current_pass.filling
    if filling is not None:
        filling.note(row, fitted_lengths)


@dataclass
class RecomputeStaleCache:
    """Replacement of ``model.prepare_inputs_for_generation`` that empties the cache when positions change.

    ``generate`` then returns the same tokens as greedy decoding without a cache, with chunked prefill too.
    """

    model: nn.Module
    rule: LengthRule
    rotaries: Sequence[Any]  # the replaced rotary modules of a model whose steps may be compiled

    def __call__(
        self,
        input_ids: Tensor,
        next_sequence_length: Any = None,
        *,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Prepare the inputs as transformers does, from all tokens if the cache is stale."""
        cache, declared = cache_in(kwargs), kwargs.pop("ctxext_length", None)
        cached = cached_tokens(cache)
        new = input_ids if next_sequence_length is None else input_ids[:, -next_sequence_length:]
        total = cached + new.shape[1]
        whole = self._whole(input_ids, new, cache, cached, total)
        model: Any = self.model
        is_decoder = not model.config.is_encoder_decoder  # otherwise the mask covers the encoder's text
        mask = attention_mask if is_decoder else None
        if cached and self._changes(cache, mask, kwargs.get("position_ids"), new, total, declared):
            if whole is None or inputs_embeds is not None:
                raise IncompatibleError(
                    f"Method {self.rule.method.name!r} changes positions at {total} tokens, and the earlier tokens are "
                    f"unknown: the prompt was given as embeddings or learned by PEFT, or the cache is from elsewhere. "
                    f"Generate from input_ids, with a new cache."
                )
            empty(cache)
            input_ids, next_sequence_length = whole, None
            mask = mask[:, :total] if mask is not None else None
            attention_mask = mask if is_decoder else attention_mask
            kwargs |= {"is_first_iteration": True} | _whole_positions(kwargs, mask, whole)
            self._warn()
        if cache is not None:
            remember(cache, expected=whole)
        inputs = preparing_class(model).prepare_inputs_for_generation(
            model,
            input_ids,
            next_sequence_length=next_sequence_length,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        if declared is None:
            return inputs
        inputs["ctxext_length"] = declared
        has_all = inputs.get("input_ids") is not None and inputs.get("position_ids") is not None
        if self.rotaries and has_all and getattr(cache, "is_compileable", False):
            inputs["ctxext_fitted"] = self._fitted(cache, inputs, declared)
        return inputs

    def _fitted(self, cache: Any, inputs: Any, declared: Declared) -> FittedModules:
        """Return the rotary modules of a call that may be compiled, and record on the cache what the call fills in.

        A graph reads no length and changes no record, so that the checks of a pass are made here.
        """
        rows, reaches = len(inputs["input_ids"]), _reaches(inputs["position_ids"])
        lengths = [of_row(declared, row, rows) or 0 for row in range(rows)]
        for reach, length in zip(reaches * (rows // len(reaches)), lengths, strict=True):
            self.rule.require_declared(reach, length)
        fitted_lengths = [self.rule.fitted(length) for length in lengths]
        remember(cache, fitted_lengths=tuple(fitted_lengths))
        for guard in guards_of(self.model):
            guard.claim(cache)
        different = fitted_lengths if len(set(fitted_lengths)) > 1 else fitted_lengths[:1]
        return {key: found for each in self.rotaries for key, found in each.fitted_to(different).items()}

    def _whole(self, input_ids: Tensor, new: Tensor, cache: Any, cached: int, total: int) -> Tensor | None:
        """Return all tokens so far, None if unknown; chunked prefill hands over only the new ones."""
        if input_ids.shape[1] == total:
            return input_ids
        known = filled(cache)
        for tokens in () if known is None else (known.tokens, known.expected):  # a graph leaves the expected ones
            if tokens is not None and tokens.shape == (new.shape[0], cached):
                return torch.cat((tokens, new), dim=1)
        return None

    def _changes(
        self,
        cache: Any,
        mask: Tensor | None,
        positions: Tensor | None,
        new: Tensor,
        total: int,
        declared: Declared | None,
    ) -> bool:
        """Return whether cached tokens have other positions than the sequence gets with this call."""
        if not all(guard.stands(cache) for guard in guards_of(self.model)):
            return True
        known, rows = filled(cache), new.shape[0]
        before, now = [total - new.shape[1]] * rows, [total] * rows
        if mask is not None and mask.ndim == 2:
            before, now = (mask[:, :end].bool().sum(-1).tolist() for end in (before[0], total))
        if positions is not None and positions.ndim == 3:  # an image takes fewer positions than it has tokens
            now = _reaches(positions)
        for row, (earlier, later) in enumerate(zip(before, now, strict=True)):
            fitted = self.rule.cached(known, row, rows, earlier)
            if earlier and fitted != self.rule.needed(later, fitted, of_row(declared, row, rows)):
                return True
        return False

    def _warn(self) -> None:
        method = self.rule.method
        if getattr(method, "growth", None) == "exact":
            warnings.warn(
                f"{method.name} with growth='exact' recomputes the whole sequence for every token beyond the trained "
                f"window of {self.rule.trained_length}. growth='doubling' does so only when the length doubles, and "
                f"growth='request' never.",
                stacklevel=3,
            )


def _reaches(positions: Tensor) -> list[int]:
    """Return the positions that each row has reached."""
    planes = positions if positions.ndim == 3 else positions[None]
    reaches: list[int] = (planes[-3:].amax(dim=(0, 2)) + 1).tolist()  # of four planes, the first counts tokens
    return reaches


def _prompts(model_kwargs: Given, slots: int) -> list[int]:
    """Return the tokens of each row of a prompt without padding, or its ``slots`` where nothing tells the tokens."""
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    if positions is not None and (mask is None or positions.ndim == 3):
        return _reaches(positions)
    prompts: list[int] = [slots] if mask is None else mask.bool().sum(-1).tolist()
    return prompts


def _whole_positions(kwargs: Given, mask: Tensor | None, ids: Tensor) -> dict[str, Tensor]:
    """Return positions of the whole sequence if the call has any; chunked prefill gives only the new ones."""
    given = kwargs.get("position_ids")
    if given is None or given.shape[-1] == ids.shape[1]:
        return {}
    if given.ndim != 2:
        raise IncompatibleError(
            f"position_ids of shape {tuple(given.shape)} lacks the positions of earlier tokens, which have to be "
            f"recomputed. Prefill in one piece (prefill_chunk_size=None)."
        )
    mask = torch.ones_like(ids) if mask is None else mask
    return {"position_ids": (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0)}


def _before_the_end(drafts: Any, most: int, input_ids: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
    """Draft tokens as transformers does, without the ones beyond the end of the text, which it would drop later."""
    ids, logits = type(drafts).get_candidates(drafts, input_ids, *args, **kwargs)
    return ids[:, :most], None if logits is None else logits[:, : max(0, most - input_ids.shape[1])]


@dataclass
class RefuseFixedPositions:
    """Replacements of two steps of ``model.generate`` that refuse what keeps one set of positions while they change.

    Assisted decoding verifies several tokens in one pass, with the positions of the longest prefix, while greedy
    decoding fits positions to each prefix. Guidance reads a negative prompt token by token, through a cache that
    nothing recomputes.
    """

    model: nn.Module
    rule: LengthRule

    def candidates(self, *, generation_config: Any, input_ids: Tensor, model_kwargs: Any, **kwargs: Any) -> Any:
        """Make the candidate generator as transformers does, unless positions change before the last token."""
        if not self.rule.by_request:
            self._require_same(
                _prompts(model_kwargs, input_ids.shape[1]),
                generation_config.max_length - input_ids.shape[1],
                "Assisted decoding (assistant_model, prompt_lookup_num_tokens) verifies several tokens with one set of "
                "positions. Generate without it, or use growth='request'.",
            )
        model: Any = self.model
        drafting = {name: value for name, value in model_kwargs.items() if name != "ctxext_length"}  # another model's
        drafts = type(model)._get_candidate_generator(
            model, generation_config=generation_config, input_ids=input_ids, model_kwargs=drafting, **kwargs
        )
        drafts.get_candidates = functools.partial(_before_the_end, drafts, generation_config.max_length - 1)
        return drafts

    def processors(self, generation_config: Any, input_ids_seq_length: int = 0, *args: Any, **kwargs: Any) -> Any:
        """Make the processors of logits as transformers does, unless guidance needs positions that change."""
        if generation_config.guidance_scale not in (None, 1) and generation_config.use_cache:
            negative, mask = kwargs.get("negative_prompt_ids"), kwargs.get("negative_prompt_attention_mask")
            self._require_same(
                _prompts({"attention_mask": mask}, 1 if negative is None else negative.shape[1]),
                generation_config.max_length - input_ids_seq_length - 1,
                "guidance_scale reads the negative prompt and the answer through a cache of its own, token by token. "
                "Generate without it, or with use_cache=False.",
            )
        model: Any = self.model
        return type(model)._get_logits_processor(model, generation_config, input_ids_seq_length, *args, **kwargs)

    def _require_same(self, prompts: list[int], new: int, why: str) -> None:
        """Refuse prompts whose positions change while ``new`` tokens are added to them."""
        for first in prompts:
            if self.rule.fitted(first) != self.rule.fitted(first + new):
                name = self.rule.method.name
                raise IncompatibleError(
                    f"Method {name!r} changes positions between {first} and {first + new} tokens. {why}"
                )


@dataclass
class FittedForward(PositionedForward):
    """Replacement of ``model.forward``, whose graph gets rotary modules instead of declared lengths."""

    def __call__(self, *args: Any, ctxext_fitted: FittedModules | None = None, **kwargs: Any) -> Any:
        """Run the model; ``ctxext_fitted`` comes from ``model.prepare_inputs_for_generation``."""
        if ctxext_fitted is None or not torch.compiler.is_compiling():
            return super().__call__(*args, **kwargs)
        kwargs.pop("ctxext_length", None)  # a graph would hold for one length only
        current_pass.fitted = ctxext_fitted
        try:
            return super().__call__(*args, **kwargs)
        finally:
            current_pass.fitted = None


@dataclass
class RequestedLengths:
    """Replacements of two steps of ``model.generate``, which declare the length that each row may reach.

    The first of them knows how many tokens of the prompt are new, the second the mask that shows how many are real.
    """

    model: nn.Module

    def prepare_length(self, *, generation_config: Any, input_ids_length: int, **kwargs: Any) -> Any:
        """Prepare the settings of this call as transformers does, and note on them how many tokens may follow."""
        model: Any = self.model
        settings = type(model)._prepare_generated_length(
            model, generation_config=generation_config, input_ids_length=input_ids_length, **kwargs
        )
        settings._ctxext_prompt, settings._ctxext_new = input_ids_length, settings.max_length - input_ids_length
        return settings

    def prepare_cache(self, settings: Any, model_kwargs: Given, *args: Any, **kwargs: Any) -> Any:
        """Prepare the cache as transformers does, and add the declared lengths to the arguments."""
        model: Any = self.model
        prompts = _prompts(model_kwargs, getattr(settings, "_mask_length", settings._ctxext_prompt))
        lengths = tuple(prompt + settings._ctxext_new for prompt in prompts)
        model_kwargs["ctxext_length"] = lengths if len(set(lengths)) > 1 else lengths[0]
        return type(model)._prepare_cache_for_generation(model, settings, model_kwargs, *args, **kwargs)


def _never_compiles(*_: Any, **__: Any) -> bool:
    """Return False, as a replacement of ``model._valid_auto_compile_criteria``."""
    return False


def _recompute_in_generate(work: Work) -> None:
    """Make ``model.generate`` follow a dynamic method."""
    model, edits = work.subject.model, work.edits
    rule = LengthRule(work.method, work.extension.trained_length)
    forwards = [replaced_forward(module) for module in model.modules() if rule.by_request]
    rotaries = [forward for forward in forwards if hasattr(forward, "fitted_to")]
    edits.set(model, "prepare_inputs_for_generation", RecomputeStaleCache(model, rule, rotaries))
    if not rotaries and hasattr(model, "_valid_auto_compile_criteria"):
        # On CUDA, generate() compiles for static caches, and each new length would break the graph. The switch in
        # ``generation_config`` is saved with the model and belongs to the user.
        edits.set(model, "_valid_auto_compile_criteria", _never_compiles)
    refusing = RefuseFixedPositions(model, rule)
    if hasattr(model, "_get_candidate_generator"):
        edits.set(model, "_get_candidate_generator", refusing.candidates)
        edits.set(model, "_get_logits_processor", refusing.processors)
    if rule.by_request and hasattr(model, "generate"):
        requested = RequestedLengths(model)
        edits.set(model, "_prepare_generated_length", requested.prepare_length)
        edits.set(model, "_prepare_cache_for_generation", requested.prepare_cache)
        edits.set(model, "forward", FittedForward.around(model))  # some models pass no keywords to their decoder


register(Step(Moment.MODULES, _recompute_in_generate, applies=lambda work: work.method.dynamic and not work.sides))
