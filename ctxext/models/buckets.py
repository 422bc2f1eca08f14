"""Models with learned scores for buckets of relative distances: T5 and its descendants."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ctxext.core.architecture import Architecture, refuse_choices, required_length
from ctxext.core.edits import Edits
from ctxext.core.rebuild import Rebuild
from ctxext.core.scaling import REFUSALS
from ctxext.core.subject import Subject
from ctxext.errors import IncompatibleError, VerificationError
from ctxext.files import JsonObject, digest
from ctxext.methods import BucketMethod, Method
from ctxext.models.table_rows import follow_fields, weight_of
from ctxext.spec import BucketSpec, Extension, ExtensionArguments

FIELD = "relative_attention_max_distance"
LENGTH = "n_positions"  # T5's config.json states it; no code reads it
QUERIES = ("q", "query")  # names of the projection to queries in attention modules
ROUNDED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SEEN = 2**16  # distances to check; a longer table of scores would only cost memory
TOUCHES = 1e-5  # fraction of a bucket: at the edge of a bucket, float32 may round to either side


def buckets_of(
    distances: Float[Tensor, " pairs"], *, buckets: int, max_distance: int, both_ways: bool
) -> Float[Tensor, " pairs"]:
    """Compute the bucket of each distance in float64, not rounded down: a whole number where a bucket begins.

    Half of the buckets hold one distance each; the others are equally wide in the logarithm of the distance, up to
    ``max_distance``.

    Args:
        distances: tokens from a query to a key, positive where the key comes later.
        buckets: number of buckets.
        max_distance: tokens from which all distances share the last bucket.
        both_ways: True if later keys have separate buckets, the second half of all; else they share bucket 0.

    Source: Raffel et al., arXiv:1910.10683, section 2.1; the authors' code, ``_relative_position_bucket`` in
    mesh_tensorflow/transformer/transformer_layers.py of tensorflow/mesh@0cb87fe.
    """
    each = buckets // 2 if both_ways else buckets
    single = each // 2
    back = distances.abs() if both_ways else (-distances).clamp(min=0)
    wide = single + (back.clamp(min=single) / single).log() / math.log(max_distance / single) * (each - single)
    bucket = torch.where(back < single, back, wide.clamp(max=each - 1))
    return bucket + each * (distances > 0) if both_ways else bucket


class Buckets(Architecture):
    """Encoders, decoders or both, whose attention modules bucket distances up to a number in their config."""

    name = "buckets"
    positions = "relative"

    def matches(self, subject: Subject) -> bool:
        return any(True for _ in _tables(subject.model))

    def trained_length(self, subject: Subject) -> int | None:
        length = getattr(subject.text, LENGTH, None) or super().trained_length(subject)
        return int(length) if length else None

    def apply(self, subject: Subject, method: Method, request: ExtensionArguments, edits: Edits) -> Extension:
        config, kind = subject.text, subject.kind
        if not isinstance(method, BucketMethod):
            path, _, table = next(_tables(subject.model))
            raise IncompatibleError(
                f"This {kind} has a learned score for each of {table.num_embeddings} buckets of relative distances "
                f"({path}), which method {method.name!r} cannot change. Method for it: stretch_buckets."
            )
        reason = f"this {kind} has only buckets of relative distances"
        refuse_choices(request, ("sliding_window", "scaling", "attention"), reason)
        trained_length = required_length(subject, request)
        old = getattr(config, FIELD, None)
        if not isinstance(old, int):
            raise IncompatibleError(
                f"The config of this {kind} has no field {FIELD}, so the extension could not be saved."
            )
        for path, module, _ in _tables(subject.model):
            if (live := getattr(module, FIELD)) != old:
                raise IncompatibleError(
                    f"{path} of this {kind} buckets distances up to {live}, but its config says {FIELD}={old}. "
                    f"transformers reads this field only when it builds the model. Set it back, and load again."
                )
        spec = BucketSpec(getattr(config, "relative_attention_num_buckets", 0), old, trained_length)
        new, target = method.max_distance(spec), method.target_length(trained_length)
        fields: JsonObject = {FIELD: new}
        if isinstance(getattr(config, LENGTH, None), int):
            fields[LENGTH] = target
        original = {name: getattr(config, name) for name in fields}
        try:
            rebuild = Rebuild(subject, fields)
        except REFUSALS as error:
            raise IncompatibleError(f"The config of this {kind} does not accept {fields} ({error}).") from error
        # Twins prove the formula before any edit: with another formula, the effect of a new number is unknown.
        _prove(Rebuild(subject), spec, old)
        _prove(rebuild, spec, new)
        sharper = _divided(subject, method.temperature) if method.temperature != 1 else {}
        at = f" at {method.temperature!r}" if method.temperature != 1 else ""
        rebuild.apply(edits)
        edits.replace_weights(subject.model, sharper)
        follow_fields(subject.model, rebuild.whole, fields, edits)
        # Modules copy the field when they are built, so each live one has to have the new number.
        for path, module, _ in _tables(subject.model):
            if (live := getattr(module, FIELD)) != new:
                raise VerificationError(f"{path} of this {kind} still buckets distances up to {live}.")
        return Extension(
            trained_length=trained_length,
            target_length=target,
            stored_as=f"stock {FIELD} {old} -> {new}" + (", and weights of self-attention" if sharper else ""),
            stock=True,
            fingerprint=digest(f"{spec.buckets} buckets to {new}{at}"),
            notes=_notes(spec, new, method.temperature),
            original=original,
        )

    def revert(self, subject: Subject, original: JsonObject, edits: Edits) -> None:
        if (reason := self.why_final(subject)) is not None:
            raise IncompatibleError(reason)
        rebuild = Rebuild(subject, original)
        rebuild.apply(edits)
        follow_fields(subject.model, rebuild.whole, original, edits)

    def why_final(self, subject: Subject) -> str | None:
        temperature = _temperature_in(subject.saved)
        if temperature == 1:
            return None
        return (
            f"Weights of this {subject.kind}'s self-attention were divided by a temperature of {temperature:g} and "
            f"rounded, so the original ones cannot be recovered. Load the original checkpoint."
        )

    def replaces_weights(self, subject: Subject, saved: JsonObject | None = None) -> bool:
        return _temperature_in(saved) != 1

    def replaced_weights(self, subject: Subject) -> dict[str, nn.Parameter]:
        sharper = self.replaces_weights(subject, subject.saved)
        names = _weights_of_scores(subject.model) if sharper else []
        return {name: weight_of(subject.model, name, f"{name} cannot be kept") for name in names}


def _tables(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Embedding]]:
    """Yield each module with a learned score per bucket and head: its path, the module and its table."""
    for path, module in model.named_modules():
        if isinstance(getattr(module, FIELD, None), int):
            for table in module.children():
                if isinstance(table, nn.Embedding):
                    yield path, module, table


def _prove(rebuild: Rebuild, spec: BucketSpec, max_distance: int) -> None:
    """Compare the rows that the model's own code looks up, for every distance, with the mathematics of the paper.

    Raises:
        IncompatibleError: if they differ, so that the effect of an extension is unknown.
    """
    kind = rebuild.subject.kind
    for path, module in rebuild.whole.named_modules():
        table = getattr(module, "relative_attention_bias", None)
        if isinstance(table, nn.Embedding) and not isinstance(getattr(module, FIELD, None), int):
            raise IncompatibleError(
                f"This {kind} has buckets of relative distances ({path}) whose largest distance is in its code and not "
                f"in its config. A reload would not stretch them."
            )
    for path, module, table in _tables(rebuild.whole):
        parameters = inspect.signature(module.compute_bias).parameters  # type: ignore[arg-type]
        if not {"query_length", "key_length", "past_seen_tokens"} <= parameters.keys():
            raise IncompatibleError(
                f"The encoder of this {kind} sees only the tokens around each token ({path}), in the same buckets. An "
                f"extension would make these coarser without reaching further."
            )
        length = min(max_distance + 2, SEEN)
        looked_up = {seen: _rows_looked_up(module, table, length, seen) for seen in (0, length - 1)}
        both_ways = bool(looked_up[0].any())  # true if later keys have other rows
        for seen, rows in looked_up.items():
            distances = torch.arange(length, dtype=torch.float64) - seen
            exact = buckets_of(distances, buckets=spec.buckets, max_distance=max_distance, both_ways=both_ways)
            begins = (exact - exact.round()).abs() <= TOUCHES
            near = begins & ((rows - exact).abs() <= 1 + TOUCHES)
            wrong = (rows != exact.floor()) & ~near
            if bool(wrong.any()):
                distance = int(distances[wrong.nonzero()[0]])
                raise IncompatibleError(
                    f"{path} of this {kind} does not bucket a distance of {distance} tokens as T5 does, so the effect "
                    f"of another {FIELD} is unknown."
                )


def _rows_looked_up(module: Any, table: nn.Embedding, length: int, seen: int) -> Tensor:
    """Return the row of its table that a module on meta looks up for each key, for the query after ``seen`` tokens."""
    lookups: list[Tensor] = []
    name = next(name for name, child in module.named_children() if child is table)
    module.add_module(name, nn.Embedding(table.num_embeddings, 1, device="cpu"))
    handle = getattr(module, name).register_forward_pre_hook(lambda _, args: lookups.append(args[0]))
    try:
        with torch.no_grad(), torch.device("cpu"):
            module.compute_bias(1, length, past_seen_tokens=seen)
    finally:
        handle.remove()
        module.add_module(name, table)
    return lookups[0].flatten().double()


def _weights_of_scores(model: nn.Module) -> list[str]:
    """Return the names of the weights that scale whole attention scores: queries and buckets.

    Often only the first layer of a stack has a table, whose scores the other layers reuse. Their self-attention is at
    the same place in other blocks; attention to another text is at another place.

    Raises:
        IncompatibleError: if an attention module has no projection of queries.
    """
    names = []
    for owner, module, table in _tables(model):
        names += [f"{owner}.{name}.weight" for name, child in module.named_children() if child is table]
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
            names += [f"{path}.{queries[0]}.weight"]
            names += [f"{path}.{queries[0]}.bias"] if getattr(projection, "bias", None) is not None else []
    return list(dict.fromkeys(names))


def _place(path: str) -> str:
    """Return a module's path without the number of its block."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path, count=1)


def _divided(subject: Subject, temperature: float) -> dict[str, Tensor]:
    """Return the weights of scores divided by a temperature, by name, computed in float64 and rounded once.

    Raises:
        IncompatibleError: if one is not a plain weight, is shared with another module, or would be too large.
    """
    kind, names = subject.kind, _weights_of_scores(subject.model)
    held = dict(subject.model.named_parameters(remove_duplicate=False))
    quotients: dict[str, Tensor] = {}
    done = set()
    for name in names:
        refusal = f"{name} of this {kind} cannot be divided by a temperature"
        weight = weight_of(subject.model, name, refusal)
        if weight.dtype not in ROUNDED:
            raise IncompatibleError(
                f"{refusal}: it is quantised ({weight.dtype}). Extend the checkpoint before quantising it."
            )
        if others := [alias for alias, parameter in held.items() if parameter is weight and alias not in names]:
            raise IncompatibleError(f"{refusal}: {others[0]} is the same weight. Leave temperature out.")
        if id(weight) in done:  # layers share it
            continue
        done.add(id(weight))
        if weight.is_meta:
            quotients[name] = torch.empty_like(weight)
        else:
            exact = weight.detach().to("cpu", torch.float64) / temperature  # not every device has float64
            quotients[name] = exact.to(weight.dtype).to(weight.device)
            if not bool(quotients[name].isfinite().all()):
                raise IncompatibleError(f"{refusal} of {temperature:g}: it would be too large for {weight.dtype}.")
    return quotients


def _temperature_in(saved: JsonObject | None) -> float:
    """Return the temperature that a saved extension has put into the weights; 1 for none."""
    return float((saved or {}).get("method", {}).get("temperature", 1.0))


def _notes(spec: BucketSpec, max_distance: int, temperature: float) -> tuple[str, ...]:
    single = spec.buckets // 4
    notes = (
        f"Distances below {single} tokens in an encoder and {2 * single} in a decoder "
        f"{'are read as before' if temperature == 1 else 'keep their buckets'}. Those from "
        f"there to {spec.max_distance} share buckets with farther ones now. Those from {spec.max_distance} to "
        f"{max_distance} tokens, which shared one bucket, are distinguished.",
    )
    if temperature == 1:
        return notes
    return (
        *notes,
        f"Scores of self-attention are divided by {temperature:g} in texts of every length: compare before use, short "
        f"texts included. The temperature is in the weights, so a saved checkpoint cannot be reverted.",
    )
