"""Models with learned scores for buckets of relative distances: T5 and what was built on it."""

from __future__ import annotations

import hashlib
import inspect
import re
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
from ctxext.surgery.old_form import REFUSALS
from ctxext.surgery.rebuild import Rebuild
from ctxext.surgery.tables import put_weights, weight_of
from ctxext.surgery.texts import text_of

FIELD = "relative_attention_max_distance"
LENGTH = "n_positions"  # T5's config.json says it; no code reads it
QUERIES = ("q", "query")  # what attention modules call the projection that makes queries
ROUNDED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SEEN = 2**16  # distances that are looked at, beyond which a table of scores would only cost memory
TOUCHES = 1e-5  # of a bucket: where a bucket begins, float32 may round to either side


class Buckets(Architecture):
    """Encoders, decoders or both, whose attention modules bucket distances up to a number in their config."""

    name: ClassVar[str] = "buckets"
    positions: ClassVar[str] = "relative"

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
        sharper = _divided(model, method.temperature) if method.temperature != 1 else {}
        rebuild.apply(edits)
        put_weights(model, sharper, edits)
        _follow(model, fields, edits)
        for path, module, _ in _tables(model):
            if (found := getattr(module, FIELD)) != new:
                raise VerificationError(f"{path} of this {kind} still buckets distances up to {found}.")
        return Extension(
            trained_length=trained_length,
            target_length=target,
            stored_as=f"stock {FIELD} {old} -> {new}" + (", and weights of self-attention" if sharper else ""),
            stock=True,
            fingerprint=_fingerprint(spec, new, method.temperature),
            notes=_notes(spec, new, method.temperature),
            original=original,
        )

    def revert(self, model: PreTrainedModel, original: dict[str, Any], edits: Edits) -> None:
        if (reason := self.why_final(model)) is not None:
            raise IncompatibleError(reason)
        Rebuild(model, original).apply(edits)
        _follow(model, original, edits)

    def why_final(self, model: PreTrainedModel) -> str | None:
        temperature = _temperature_in(getattr(model.config, "ctxext", None))
        if temperature == 1:
            return None
        return (
            f"Weights of its self-attention were divided by a temperature of {temperature:g} and rounded, so that what "
            f"they were cannot be read back from them. Load the checkpoint from before that."
        )

    def replaces_weights(self, model: PreTrainedModel, saved: dict[str, Any] | None = None) -> bool:
        return _temperature_in(saved) != 1

    def replaced_weights(self, model: PreTrainedModel) -> dict[str, nn.Parameter]:
        sharper = self.replaces_weights(model, getattr(model.config, "ctxext", None))
        names = _weights_of_scores(model) if sharper else []
        return {name: weight_of(model, name, f"{name} cannot be kept") for name in names}


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


def _weights_of_scores(model: nn.Module) -> list[str]:
    """The weights that attention scores grow with as a whole: of queries, and of buckets.

    Only a stack's first layer may have a table, whose scores the other layers are handed; the attention of those stands
    at the same place as that one, in other blocks. Attention to another text stands at another place.

    Raises:
        IncompatibleError: where an attention module has no queries of its own.
    """
    found = []
    for owner, module, table in _tables(model):
        found += [f"{owner}.{name}.weight" for name, child in module.named_children() if child is table]
        for path, inside in model.named_modules():
            if _place(path) != _place(owner):
                continue
            queries = [name for name, _ in inside.named_children() if name in QUERIES]
            if len(queries) != 1:
                raise IncompatibleError(
                    f"{path} of this {type(model).__name__} has no projection of queries ({' or '.join(QUERIES)}), so "
                    f"its scores cannot be divided. Leave temperature out."
                )
            projection = inside.get_submodule(queries[0])
            found += [f"{path}.{queries[0]}.weight"]
            found += [f"{path}.{queries[0]}.bias"] if getattr(projection, "bias", None) is not None else []
    return list(dict.fromkeys(found))


def _place(path: str) -> str:
    """Where in its block a module stands."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path, count=1)


def _divided(model: PreTrainedModel, temperature: float) -> dict[str, Tensor]:
    """The weights of scores as they are at a temperature, by name; computed in float64 and rounded once.

    Raises:
        IncompatibleError: where one is no plain weight, or something else depends on it, or it would be too large.
    """
    kind, names = model.config.model_type, _weights_of_scores(model)
    held = dict(model.named_parameters(remove_duplicate=False))
    found: dict[str, Tensor] = {}
    done = set()
    for name in names:
        refusal = f"{name} of this {kind} cannot be divided by a temperature"
        weight = weight_of(model, name, refusal)
        if weight.dtype not in ROUNDED:
            raise IncompatibleError(
                f"{refusal}: it is quantised ({weight.dtype}). Extend the checkpoint as it was before."
            )
        if others := [alias for alias, other in held.items() if other is weight and alias not in names]:
            raise IncompatibleError(f"{refusal}: {others[0]} is the same weight. Leave temperature out.")
        if id(weight) in done:  # one that layers share
            continue
        done.add(id(weight))
        found[name] = _quotient(weight, temperature)
        if not weight.is_meta and not bool(found[name].isfinite().all()):
            raise IncompatibleError(f"{refusal} of {temperature:g}: it would be too large for {weight.dtype}.")
    return found


def _quotient(weight: Tensor, temperature: float) -> Tensor:
    if weight.is_meta:
        return torch.empty_like(weight)
    exact = weight.detach().to("cpu", torch.float64) / temperature  # not every device knows float64
    return exact.to(weight.dtype).to(weight.device)


def _temperature_in(saved: dict[str, Any] | None) -> float:
    """The temperature that the weights have in them after the extension that a config holds; 1 for no such one."""
    return float((saved or {}).get("method", {}).get("temperature", 1.0))


def _fingerprint(spec: BucketSpec, max_distance: int, temperature: float) -> str:
    said = f"{spec.buckets} buckets to {max_distance}" + (f" at {temperature!r}" if temperature != 1 else "")
    return hashlib.sha256(said.encode()).hexdigest()[:12]


def _notes(spec: BucketSpec, max_distance: int, temperature: float) -> tuple[str, ...]:
    single = spec.buckets // 4
    notes = (
        f"Distances below {single} tokens in an encoder and {2 * single} in a decoder "
        f"{'are read as before' if temperature == 1 else 'keep their buckets'}. Those from "
        f"there to {spec.max_distance} share buckets with farther ones now; those from {spec.max_distance} to "
        f"{max_distance} tokens, which were all alike, are told apart.",
    )
    if temperature == 1:
        return notes
    return (
        *notes,
        f"Scores of self-attention are divided by {temperature:g}, in texts of every length: compare before use, short "
        f"texts included. The weights hold it, so once saved it cannot be taken off.",
    )
