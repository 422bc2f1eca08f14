"""Models that add sinusoids to their input: Marian, Pegasus, FSMT, XGLM, M2M-100, NLLB, Seamless, CTRL and others."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ctxext.architectures.base import Architecture, refuse_attention_choices, rotates_by_table
from ctxext.architectures.table import trained_lengths
from ctxext.errors import IncompatibleError, VerificationError
from ctxext.methods import METHODS, Method, RopeMethod
from ctxext.methods.parameters import checked_rows
from ctxext.methods.remap import RemapMethod
from ctxext.spec import Extension, Request, RopeSpec
from ctxext.surgery.edits import Edits
from ctxext.surgery.lookups import table_of
from ctxext.surgery.rope_types import GUARD
from ctxext.surgery.sinusoids import Growing, Sinusoid, remaker_of, sinusoid_of
from ctxext.surgery.tables import (
    PositionTable,
    prove,
    replace_tables,
    twin_of,
    twins_of,
    values_of,
    weight_of,
)
from ctxext.surgery.texts import field_of

# Numbers that configs of these models hold and that every stock class reads, checking that they are numbers.
GUARDED = ("layer_norm_epsilon", "dropout", "hidden_dropout")
ASKED = RopeSpec(rotary_dim=64, base=10000.0, trained_length=4096)  # which methods there are is asked of this


@dataclass(frozen=True)
class Site:
    """One table of sinusoids, and what becomes of it.

    Args:
        table: where it is.
        formula: what it was computed by.
        trained: tokens that it is for.
    """

    table: PositionTable
    formula: Sinusoid
    trained: int


class Sinusoids(Architecture):
    """Tables of sinusoids, whose rows are computed anew at the frequencies that a method for rotations gives.

    A table that is saved among the weights is all there is to it, and stock transformers loads the result. Where stock
    code computes the table whenever it builds the model, the config is written so that stock code refuses it.
    """

    name: ClassVar[str] = "sinusoid"
    positions: ClassVar[str] = "sinusoids"

    def matches(self, model: PreTrainedModel) -> bool:
        return twins_of(model).has_sinusoids and not rotates_by_table(model)

    def tables(self, model: PreTrainedModel) -> list[PositionTable]:
        """The tables that ``apply`` computes anew.

        Raises:
            IncompatibleError: if there is none of which it can be said which row stands for which position.
        """
        return twins_of(model).sinusoids

    def trained_length(self, model: PreTrainedModel) -> int | None:
        try:
            return max(_positions(model, table) for table in self.tables(model))
        except IncompatibleError:  # said where it is to be extended; what the config says holds all the same
            return super().trained_length(model)

    def apply(self, model: PreTrainedModel, method: Method, request: Request, edits: Edits) -> Extension:
        rotation = _checked(model, method, request)
        tables, twins = self.tables(model), twins_of(model)
        lengths = trained_lengths({table.name: _positions(model, table) for table in tables}, request)
        sites = [Site(table, _formula(model, table), lengths[table.name]) for table in tables]
        inv_freq = {site.table.name: _frequencies(model, rotation, site) for site in sites}
        targets = {name: checked_rows(method.name, method.target_length(length)) for name, length in lengths.items()}
        fields = _fields(model, tables, targets)
        original: dict[str, Any] = {name: getattr(*field_of(model.config, name)) for name in fields}
        has_reserved = any(table.first for table in tables)
        after = _as_made(model, tables, fields) if has_reserved else twin_of(model, fields)
        new = {
            name: _recomputed(site, table_of(after, name).detach(), table_of(model, name), inv_freq[name])
            for name, site in zip(lengths, sites, strict=True)
        }
        stored = all(_is_stored(model, table.name) for table in tables)
        guarded = None if stored else _guarded_field(model)
        replace_tables(twins, new, fields, edits, after=after)
        prove(after, [table.of_rows(len(new[table.name])) for table in tables])
        for site in sites:
            _go_on(model, site, inv_freq[site.table.name], edits)
            _prove(model, site, inv_freq[site.table.name])
        if guarded is not None:
            original[guarded] = getattr(model.config, guarded)
            edits.set_unchecked(model.config, guarded, GUARD)
        longest = max(lengths, key=lambda name: lengths[name])
        return Extension(
            trained_length=lengths[longest],
            target_length=targets[longest],
            stored_as=_stored_as(fields, stored),
            stock=stored,
            fingerprint=_fingerprint(sites, inv_freq),
            notes=_notes(model, sites, targets, stored),
            original=original,
        )

    def revert(self, model: PreTrainedModel, original: dict[str, Any], edits: Edits) -> None:
        tables, twins = self.tables(model), twins_of(model)
        fields = {name: original[name] for name in {table.field for table in tables}}
        before = _as_made(model, tables, fields)
        old = {one.name: table_of(before, one.name).detach().to(table_of(model, one.name)) for one in tables}
        replace_tables(twins, old, fields, edits, after=before)
        for name in original.keys() & set(GUARDED):
            edits.set(model.config, name, original[name])

    def spec(self, model: PreTrainedModel) -> RopeSpec:
        """What a method may know of the table that is for most tokens.

        Raises:
            IncompatibleError: as for ``tables``, and if its formula is not known.
        """
        table = max(self.tables(model), key=lambda one: _positions(model, one))
        return _formula(model, table).spec(_positions(model, table))

    def replaces_weights(self, model: PreTrainedModel, saved: dict[str, Any] | None = None) -> bool:
        return any(_is_stored(model, name) for growth in twins_of(model).growths for name in growth.tables)

    def replaced_weights(self, model: PreTrainedModel) -> dict[str, nn.Parameter]:
        names = [table.name for table in self.tables(model)]
        return {name: weight_of(model, name) for name in names if _is_stored(model, name)}


def usable_methods() -> list[str]:
    """Methods, by name, that give one set of frequencies and nothing else, as they are without further parameters."""
    found = [(name, cls.example(ASKED)) for name, cls in METHODS.items() if issubclass(cls, RopeMethod)]
    given = [(name, one.frequencies(ASKED, ASKED.trained_length)) for name, one in found if _why_not(one) is None]
    return [name for name, one in given if one.attention_scale == 1 and one.inv_freq.any()]


def _why_not(method: Method) -> str | None:
    """Why a method says nothing about a vector that is added to each token; None where it does."""
    if not isinstance(method, RopeMethod):
        return "is not for them: it gives no frequencies"
    if isinstance(method, RemapMethod):
        return "gives a token other positions for each key that looks at it, and what is added to a token is one vector"
    if method.dynamic:
        return "follows the length of each text, and the table is one for all"
    return None


def _checked(model: PreTrainedModel, method: Method, request: Request) -> RopeMethod:
    """The method, if it is one for sinusoids that are added.

    Raises:
        IncompatibleError: if it is not.
        InvalidParameterError: for a choice that says nothing here.
    """
    refuse_attention_choices(request, "other sinusoids in the input leave")
    reason = _why_not(method)
    if reason is None and isinstance(method, RopeMethod):
        return method
    raise IncompatibleError(
        f"This {model.config.model_type} adds sinusoids to its input. Method {method.name!r} {reason}. Methods for "
        f"it: {', '.join(usable_methods())}, and yarn with attention_factor=1.0."
    )


def _positions(model: PreTrainedModel, table: PositionTable) -> int:
    """Tokens that a table is for: what its config field says, where it has rows for as many."""
    said: int = getattr(*field_of(model.config, table.field))
    return min(said, table.positions)


def _formula(model: PreTrainedModel, table: PositionTable) -> Sinusoid:
    """What a table was computed by.

    Raises:
        IncompatibleError: if it was by another formula, or something else stands in its place.
    """
    if any(table.name in growth.tables for growth in twins_of(model).growths):
        weight_of(model, table.name)  # refuses one that is quantised, sharded or not there
    if (found := sinusoid_of(values_of(twins_of(model), table.name), table.first)) is not None:
        return found
    raise IncompatibleError(
        f"The table of positions {table.name} of this {model.config.model_type} holds sinusoids, but not those of the "
        f"Transformer's paper or of fairseq, in the precision of {table_of(model, table.name).dtype}: its frequencies "
        f"are not known, so they cannot be changed. Load the original checkpoint."
    )


def _frequencies(model: PreTrainedModel, method: RopeMethod, site: Site) -> Tensor:
    """By how much each angle shall grow from token to token.

    Raises:
        IncompatibleError: if the method is more than frequencies.
    """
    spec, kind = site.formula.spec(site.trained), model.config.model_type
    found = method.frequencies(spec, method.target_length(site.trained))
    if found.attention_scale != 1:
        raise IncompatibleError(
            f"Method {method.name!r} also multiplies cos and sin by {found.attention_scale:.4g}: where queries and "
            f"keys are rotated, that makes attention sharper. This {kind} adds its sinusoids to its input, where it "
            f"would only be another input. Leave it out, where the method lets you: attention_factor=1.0. Methods "
            f"without it: {', '.join(usable_methods())}."
        )
    if not found.inv_freq.any():
        raise IncompatibleError(
            f"This {kind} adds sinusoids to its input. Method {method.name!r} would add the same vector to every "
            f"token, and is for rotation, which there is none of here. Methods for it: {', '.join(usable_methods())}."
        )
    return found.inv_freq


def _fields(model: PreTrainedModel, tables: list[PositionTable], targets: dict[str, int]) -> dict[str, int]:
    """The config fields of the tables, by dotted name; a table that has enough rows keeps them."""
    return {
        table.field: getattr(*field_of(model.config, table.field))
        + max(0, targets[table.name] - _positions(model, table))
        for table in tables
    }


def _as_made(model: PreTrainedModel, tables: list[PositionTable], fields: dict[str, int]) -> PreTrainedModel:
    """A twin with other fields whose tables are as the model's class fills them."""
    more = {one.name: fields[one.field] - getattr(*field_of(model.config, one.field)) for one in tables}
    return twin_of(
        model, fields, real=[(one.rows + more[one.name], table_of(model, one.name).shape[1]) for one in tables]
    )


def _recomputed(site: Site, made: Tensor, old: Tensor, inv_freq: Tensor) -> Tensor:
    """A table at other frequencies, rounded once; rows before the first token's are as the model's class makes them."""
    first = site.table.first
    rows = site.formula.rows(first, len(made), inv_freq)
    if first:
        rows = torch.cat([made[:first].to(rows), rows])
    return rows.to(old.dtype).to(old.device)


def _is_stored(model: PreTrainedModel, name: str) -> bool:
    """Whether a checkpoint holds the table, so that a reload reads it and does not compute it."""
    weights = dict(model.named_parameters(remove_duplicate=False))
    return name in weights and name not in (model._keys_to_ignore_on_save or ())


def _guarded_field(model: PreTrainedModel) -> str:
    """The config field by which stock code is made to refuse a checkpoint."""
    for name in GUARDED:
        if isinstance(vars(model.config).get(name), int | float):
            return name
    raise IncompatibleError(
        f"Stock transformers computes the sinusoids of this {model.config.model_type} whenever it builds the model, so "
        f"it has to refuse the extended checkpoint, and its config has none of the fields that make it refuse: "
        f"{', '.join(GUARDED)}."
    )


def _go_on(model: PreTrainedModel, site: Site, inv_freq: Tensor, edits: Edits) -> None:
    """Let a table that its module computes anew for a longer text go on as it was extended."""
    path, _, leaf = site.table.name.rpartition(".")
    module = model.get_submodule(path)
    if (name := remaker_of(module)) is not None:
        edits.set(module, name, Growing(module, leaf, site.formula, inv_freq))


def _prove(model: PreTrainedModel, site: Site, inv_freq: Tensor) -> None:
    """Compare the live table with the method's own mathematics, at every position."""
    live, first = table_of(model, site.table.name), site.table.first
    if live.is_meta:
        return
    exact = site.formula.rows(first, len(live), inv_freq)
    error = (live.detach()[first:].to(exact) - exact).abs().max()
    if not error <= torch.finfo(live.dtype).eps:
        raise VerificationError(f"The patched {site.table.name} is off by {float(error):.2g} from the method's rows.")


def _stored_as(fields: dict[str, int], stored: bool) -> str:
    said = ", ".join(f"{name}={value}" for name, value in fields.items())
    if stored:
        return f"{said} and another table of weights"
    return f"{said} and config.ctxext; stock code refuses the checkpoint"


def _fingerprint(sites: list[Site], inv_freq: dict[str, Tensor]) -> str:
    """12 hexadecimal digits that two extensions share exactly when they add the same vectors."""
    digest = hashlib.sha256()
    for site in sites:
        digest.update(repr((site.table.name, site.formula)).encode())
        digest.update(inv_freq[site.table.name].float().numpy().tobytes())
    return digest.hexdigest()[:12]


def _notes(model: PreTrainedModel, sites: list[Site], targets: dict[str, int], stored: bool) -> tuple[str, ...]:
    """What a user must know before relying on the model, one sentence or two each."""
    notes = []
    if len({site.trained for site in sites}) > 1:
        each = ", ".join(f"{s.table.name} {s.trained:,} -> {targets[s.table.name]:,} tokens" for s in sites)
        notes.append(f"Its tables reach differently far: {each}.")
    notes.append("Short texts are read at other positions than before, too: train before use, or compare.")
    grows = any(remaker_of(model.get_submodule(site.table.name.rpartition(".")[0])) for site in sites)
    if grows and stored:
        notes.append(
            f"Beyond {max(targets.values()):,} tokens the table goes on as it is extended. Stock code, which loads it, "
            f"does not: for a longer text it computes the table anew, without the extension, and keeps that. Load it "
            f"with ctxext.load where texts may be longer."
        )
    elif grows:
        notes.append(f"Beyond {max(targets.values()):,} tokens the table goes on as it is extended.")
    return tuple(notes)
