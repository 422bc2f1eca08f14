"""Models with learned scores for buckets of relative distances: T5 and what was built on it."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ctxext.architectures.base import Architecture
from ctxext.errors import IncompatibleError, InvalidParameterError, VerificationError
from ctxext.methods import BucketMethod, Method
from ctxext.methods.formulas import buckets_of
from ctxext.spec import BucketSpec, Extension, Request
from ctxext.surgery.edits import Edits
from ctxext.surgery.rebuild import REFUSALS, Rebuild
from ctxext.surgery.texts import text_of

__all__ = ["Buckets"]

FIELD = "relative_attention_max_distance"
LENGTH = "n_positions"  # T5's config.json says it; no code reads it
SEEN = 2**16  # distances that are looked at, beyond which a table of scores would only cost memory
TOUCHES = 1e-5  # of a bucket: where a bucket begins, float32 may round to either side


class Buckets(Architecture):
    """Encoders, decoders or both, whose attention modules bucket distances up to a number in their config."""

    name: ClassVar[str] = "buckets"

    def matches(self, model: PreTrainedModel) -> bool:
        return any(True for _ in _tables(model))

    def trained_length(self, model: PreTrainedModel) -> int | None:
        length = getattr(text_of(model.config), LENGTH, None) or super().trained_length(model)
        return int(length) if length else None

    def apply(self, model: PreTrainedModel, method: Method, request: Request, edits: Edits) -> Extension:
        config, kind = text_of(model.config), model.config.model_type
        if not isinstance(method, BucketMethod):
            path, _, table = next(_tables(model))
            raise IncompatibleError(
                f"This {kind} learned a score for each of {table.num_embeddings} buckets of relative distances ({path})"
                f", and has no positions that method {method.name!r} could change. Method for it: stretch_buckets."
            )
        _refuse_choices(request, kind)
        trained_length = self.known_length(model, request)
        old = getattr(config, FIELD, None)
        if not isinstance(old, int):
            raise IncompatibleError(
                f"The config of this {kind} does not hold {FIELD}, so no saved form would bring the extension back."
            )
        for path, module, _ in _tables(model):
            if (live := getattr(module, FIELD)) != old:
                raise IncompatibleError(
                    f"{path} of this {kind} buckets distances up to {live}, but its config says {FIELD}={old}: stock "
                    f"code reads that once, when it builds the model. Set it back, and load the checkpoint again."
                )
        spec = BucketSpec(getattr(config, "relative_attention_num_buckets", 0), old, trained_length)
        new, target = method.max_distance(spec), method.target_length(trained_length)
        fields: dict[str, Any] = {FIELD: new}
        if isinstance(getattr(config, LENGTH, None), int):
            fields[LENGTH] = target
        original = {name: getattr(config, name) for name in fields}
        rebuild = _rebuilt(model, fields)
        _prove(Rebuild(model), spec, old)
        _prove(rebuild, spec, new)
        rebuild.apply(edits)
        _follow(model, fields, edits)
        for path, module, _ in _tables(model):
            if (found := getattr(module, FIELD)) != new:
                raise VerificationError(f"{path} of this {kind} still buckets distances up to {found}.")
        return Extension(
            trained_length=trained_length,
            target_length=target,
            stored_as=f"stock {FIELD} {old} -> {new}",
            stock=True,
            fingerprint=_fingerprint(spec, new),
            notes=_notes(spec, new),
            original=original,
        )

    def revert(self, model: PreTrainedModel, original: dict[str, Any], edits: Edits) -> None:
        Rebuild(model, original).apply(edits)
        _follow(model, original, edits)


def _tables(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Embedding]]:
    """Each module that has learned one score per bucket and head, with its path and its table."""
    for path, module in model.named_modules():
        if isinstance(getattr(module, FIELD, None), int):
            for table in module.children():
                if isinstance(table, nn.Embedding):
                    yield path, module, table


def _refuse_choices(request: Request, kind: str) -> None:
    for name in ("sliding_window", "scaling", "attention"):
        if getattr(request, name) is not None:
            raise InvalidParameterError(
                f"{name} says nothing about buckets of relative distances, which is all that this {kind} has; leave it "
                f"out."
            )


def _rebuilt(model: PreTrainedModel, fields: dict[str, Any]) -> Rebuild:
    """The model that transformers builds from the extended config, if it builds one.

    Raises:
        IncompatibleError: if the config's class does not take the fields.
    """
    try:
        return Rebuild(model, fields)
    except REFUSALS as error:
        raise IncompatibleError(
            f"The config of this {model.config.model_type} does not accept {fields} ({error})."
        ) from error


def _follow(model: PreTrainedModel, fields: dict[str, Any], edits: Edits) -> None:
    """Let the copies of the config that encoder and decoder hold say the same: each of them may be saved alone."""
    done = {id(text_of(model.config))}
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if config is not None and id(config) not in done and hasattr(config, FIELD):
            done.add(id(config))
            for name, value in fields.items():
                if hasattr(config, name):
                    edits.set(config, name, value)


def _prove(rebuild: Rebuild, spec: BucketSpec, max_distance: int) -> None:
    """Compare the rows that the model's own code looks up, for every distance, with the mathematics of the paper.

    Raises:
        IncompatibleError: if they are others, so that the extension would be one of something else.
    """
    kind = rebuild.model.config.model_type
    for path, module in rebuild.whole.named_modules():
        table = getattr(module, "relative_attention_bias", None)
        if isinstance(table, nn.Embedding) and not isinstance(getattr(module, FIELD, None), int):
            raise IncompatibleError(
                f"This {kind} has buckets of relative distances ({path}) whose largest distance stands in its code and "
                f"not in its config, so that a reload would not stretch them."
            )
    for path, module, table in _tables(rebuild.whole):
        asked = inspect.signature(module.compute_bias).parameters  # type: ignore[arg-type]
        if not {"query_length", "key_length", "past_seen_tokens"} <= asked.keys():
            raise IncompatibleError(
                f"The encoder of this {kind} looks at the tokens around each one only ({path}) and counts their "
                f"distances in the same buckets, which an extension would make coarser without reaching further."
            )
        length = min(max_distance + 2, SEEN)
        looked_up = {seen: _rows_looked_up(module, table, length, seen) for seen in (0, length - 1)}
        both_ways = bool(looked_up[0].any())  # whether keys after the query have rows of their own
        for seen, rows in looked_up.items():
            distances = torch.arange(length, dtype=torch.float64) - seen
            exact = buckets_of(distances, buckets=spec.buckets, max_distance=max_distance, both_ways=both_ways)
            begins = (exact - exact.round()).abs() <= TOUCHES
            near = begins & ((rows - exact).abs() <= 1 + TOUCHES)
            wrong = (rows != exact.floor()) & ~near
            if bool(wrong.any()):
                at = int(distances[wrong.nonzero()[0]])
                raise IncompatibleError(
                    f"{path} of this {kind} does not bucket distances as T5 does (a distance of {at} tokens), so "
                    f"ctxext does not know what another {FIELD} would do to it."
                )


def _rows_looked_up(module: Any, table: nn.Embedding, length: int, seen: int) -> Tensor:
    """Which row of its table a module without data asks for, for the query after ``seen`` tokens and each key."""
    found: list[Tensor] = []
    name = next(name for name, child in module.named_children() if child is table)
    module.add_module(name, nn.Embedding(table.num_embeddings, 1, device="cpu"))
    handle = getattr(module, name).register_forward_pre_hook(lambda _, args: found.append(args[0]))
    try:
        with torch.no_grad(), torch.device("cpu"):
            module.compute_bias(1, length, past_seen_tokens=seen)
    finally:
        handle.remove()
        module.add_module(name, table)
    return found[0].flatten().double()


def _fingerprint(spec: BucketSpec, max_distance: int) -> str:
    return hashlib.sha256(f"{spec.buckets} buckets to {max_distance}".encode()).hexdigest()[:12]


def _notes(spec: BucketSpec, max_distance: int) -> tuple[str, ...]:
    single = spec.buckets // 4
    return (
        f"Distances below {single} tokens in an encoder and {2 * single} in a decoder are read as before. Those from "
        f"there to {spec.max_distance} share buckets with farther ones now; those from {spec.max_distance} to "
        f"{max_distance} tokens, which were all alike, are told apart.",
    )
