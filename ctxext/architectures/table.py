"""Models that have learned a vector for each position: GPT-2, OPT, BERT, RoBERTa, BART and many more."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from jaxtyping import Bool
from torch import Tensor, nn
from transformers import PreTrainedModel

from ctxext.architectures.base import Architecture, refuse_attention_choices
from ctxext.errors import IncompatibleError, InvalidParameterError
from ctxext.methods import METHODS, Method, TableMethod, saved_class
from ctxext.methods.base import Rows
from ctxext.methods.parameters import checked_rows
from ctxext.spec import Extension, Request
from ctxext.surgery.edits import Edits
from ctxext.surgery.tables import (
    PositionTable,
    mixed,
    places_of,
    prove,
    replace_tables,
    twins_of,
    unmixed,
    weight_of,
)
from ctxext.surgery.texts import field_of

# Configs of GPT-2's time say the length twice; transformers reads the other field, and some other readers this one.
SAID_TWICE = "n_ctx"


class LearnedTable(Architecture):
    """Tables of learned positions, found by twins of the model that differ in one length.

    The longer table is a weight as any other, and the config says how long it is: stock transformers loads the result.
    """

    name: ClassVar[str] = "table"

    def matches(self, model: PreTrainedModel) -> bool:
        return twins_of(model).has_learned

    def tables(self, model: PreTrainedModel) -> list[PositionTable]:
        """The tables that ``apply`` makes longer.

        Raises:
            IncompatibleError: if there is none of which it can be said which row stands for which position.
        """
        return twins_of(model).tables

    def trained_length(self, model: PreTrainedModel) -> int | None:
        try:
            return max(table.positions for table in self.tables(model))
        except IncompatibleError:  # said where it is to be extended; what the config says holds all the same
            return super().trained_length(model)

    def apply(self, model: PreTrainedModel, method: Method, request: Request, edits: Edits) -> Extension:
        _refuse(model, method, request)
        assert isinstance(method, TableMethod)
        tables = self.tables(model)
        lengths = trained_lengths({table.name: table.positions for table in tables}, request)
        targets = {name: checked_rows(method.name, method.target_length(length)) for name, length in lengths.items()}
        rows = {table.name: method.rows(lengths[table.name], targets[table.name]) for table in tables}
        fields = _fields(model, tables, targets)
        original = {name: getattr(*field_of(model.config, name)) for name in fields}
        new = {table.name: mixed(weight_of(model, table.name), table.first, rows[table.name]) for table in tables}
        after, others = replace_tables(twins_of(model), new, fields, edits)
        longer = [table.of_rows(len(new[table.name])) for table in tables]
        prove(after, longer)
        longest = max(tables, key=lambda table: lengths[table.name]).name
        return Extension(
            trained_length=lengths[longest],
            target_length=targets[longest],
            stored_as=f"{', '.join(f'{name}={value}' for name, value in fields.items())} and a longer table of weights",
            stock=True,
            fingerprint=fingerprint(tables, rows),
            notes=_notes(tables, lengths, targets, rows, others),
            original=original,
        )

    def revert(self, model: PreTrainedModel, original: dict[str, Any], edits: Edits) -> None:
        old, reason = _old_tables(model, self.tables(model))
        if reason is not None:
            raise IncompatibleError(reason)
        fields = {name: value for name, value in original.items() if value is not None}
        replace_tables(twins_of(model), old, fields, edits)

    def why_final(self, model: PreTrainedModel) -> str | None:
        return _old_tables(model, self.tables(model))[1]

    def replaces_weights(self, model: PreTrainedModel, saved: dict[str, Any] | None = None) -> bool:
        return True

    def replaced_weights(self, model: PreTrainedModel) -> dict[str, nn.Parameter]:
        return {table.name: weight_of(model, table.name) for table in self.tables(model)}

    def kept_rows(self, model: PreTrainedModel) -> dict[str, Bool[Tensor, " rows"]]:
        """Which rows of the tables of an extended model are learned ones, as they were before it.

        Those are the rows for padding, and of each learned row the first that is a copy of it: the first
        ``trained_length`` of ``tile`` and ``hierarchical``, every ``factor``-th of ``pi``.
        """
        found = {}
        for table, trained, _, rows in _made_of(model, self.tables(model)):
            found[table.name] = torch.arange(table.rows) < table.first
            found[table.name][table.first + places_of(trained, rows)] = True
        return found


def _refuse(model: PreTrainedModel, method: Method, request: Request) -> None:
    config = model.config
    if not isinstance(method, TableMethod):
        names = ", ".join(name for name, cls in METHODS.items() if issubclass(cls, TableMethod))
        tables = " and ".join(f"{one.positions:,} tokens ({one.name})" for one in twins_of(model).tables)
        raise IncompatibleError(
            f"This {config.model_type} has learned positions, one vector each for {tables}, and nothing that method "
            f"{method.name!r} could change. Methods for it: {names}."
        )
    refuse_attention_choices(request, "a longer table of positions leaves")


def trained_lengths(known: dict[str, int], request: Request) -> dict[str, int]:
    """Tokens that each table was trained for, as the user says or else as many as it is for.

    Args:
        known: by the table's name, tokens that it is for.
        request: what the user said.

    Raises:
        InvalidParameterError: if what the user says cannot be.
    """
    longest, is_one = max(known.values()), len(set(known.values())) == 1
    if request.trained_length in (None, longest):
        return known
    if not is_one or request.trained_length > longest:
        raise InvalidParameterError(
            f"trained_length={request.trained_length}: {' and '.join(known)} have rows for "
            f"{' and '.join(f'{length:,}' for length in known.values())} tokens. Leave trained_length out"
            f"{', or give less, if not all of them were trained' if is_one else ''}."
        )
    return dict.fromkeys(known, request.trained_length)


def _fields(model: PreTrainedModel, tables: list[PositionTable], targets: dict[str, int]) -> dict[str, int]:
    """The config fields of the longer tables, by dotted name."""
    fields: dict[str, int] = {}
    for table in tables:
        part, leaf = field_of(model.config, table.field)
        more = targets[table.name] - table.positions
        if more < 0:
            raise InvalidParameterError(
                f"The target of {targets[table.name]:,} tokens is below the {table.positions:,} that {table.name} has "
                f"rows for, so nothing would be extended. Ask for more: target_length=... or a larger factor."
            )
        value = getattr(part, leaf) + more
        if fields.setdefault(table.field, value) != value:
            raise IncompatibleError(
                f"{table.field} of this {model.config.model_type} sets the size of several tables, which would need "
                f"different values of it."
            )
        if vars(part).get(SAID_TWICE) == getattr(part, leaf):
            fields[table.field.removesuffix(leaf) + SAID_TWICE] = value
    return fields


def fingerprint(tables: list[PositionTable], rows: dict[str, Rows]) -> str:
    """12 hexadecimal digits that two extensions share exactly when they mix the same rows alike."""
    digest = hashlib.sha256()
    for table in tables:
        indices, weights = rows[table.name]
        digest.update(f"{table.name} {table.first}".encode() + indices.numpy().tobytes() + weights.numpy().tobytes())
    return digest.hexdigest()[:12]


def _notes(
    tables: list[PositionTable],
    lengths: dict[str, int],
    targets: dict[str, int],
    rows: dict[str, Rows],
    others: tuple[str, ...],
) -> tuple[str, ...]:
    """What a user must know before relying on the model, one sentence or two each."""
    notes = []
    if len(set(lengths.values())) > 1:
        each = ", ".join(f"{one.name} {lengths[one.name]:,} -> {targets[one.name]:,} tokens" for one in tables)
        notes.append(f"Its tables reach differently far: {each}.")
    name = max(lengths, key=lambda one: lengths[one])
    trained = lengths[name]
    if is_kept(rows[name], trained) and not others:
        notes.append(f"Texts of up to {trained:,} tokens are read exactly as before.")
    elif is_kept(rows[name], trained):
        notes.append(f"The rows of the first {trained:,} tokens are those that were trained.")
    else:
        notes.append("Short texts are read at other positions than before, too: train before use, or compare.")
    if others:
        notes.append(
            f"{others[0]} follows from the length too ({len(others)} such attributes), so that its layers compute "
            f"otherwise, on short texts as well: compare before use."
        )
    return tuple(notes)


def is_kept(rows: Rows, trained: int) -> bool:
    """Whether the first rows are the trained ones."""
    indices, weights = rows[0][:trained], rows[1][:trained]
    places = indices == indices.new_tensor(range(trained))[:, None]
    return bool(((weights * places).sum(1) == 1).all()) and bool((weights * ~places == 0).all())


def _old_tables(model: PreTrainedModel, tables: list[PositionTable]) -> tuple[dict[str, Tensor], str | None]:
    """The tables from before the extension that a model was loaded with, or why they are not to be had."""
    found: dict[str, Tensor] = {}
    for table, trained, kept, rows in _made_of(model, tables):
        old = unmixed(weight_of(model, table.name), table.first, trained, rows)
        if old is None or trained != kept:
            method = _saved_method(model)
            return {}, (
                f"Its {trained:,} learned rows cannot be read back from the {table.positions:,} that method "
                f"{method.name!r} (factor {method.factor:g}) made of them. Load the checkpoint from before that."
            )
        found[table.name] = old
    return found, None


def _made_of(model: PreTrainedModel, tables: list[PositionTable]) -> Iterator[tuple[PositionTable, int, int, Rows]]:
    """Each table of an extended model, learned rows that were used and that there were, and what its rows mix."""
    saved, method = model.config.ctxext, _saved_method(model)
    for table in tables:
        grown = getattr(*field_of(model.config, table.field)) - saved["original"][table.field]
        kept = table.positions - grown
        trained = min(saved["trained_length"], kept)
        yield table, trained, kept, method.rows(trained, table.positions)


def _saved_method(model: PreTrainedModel) -> TableMethod:
    saved = model.config.ctxext["method"]
    method = saved_class(saved["method"]).from_dict(saved)
    assert isinstance(method, TableMethod)
    return method
