"""Models with a learned vector for each position: GPT-2, OPT, BERT, RoBERTa, BART and many more."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from ctxext.architectures.base import Architecture, refuse_attention_choices
from ctxext.errors import IncompatibleError, InvalidParameterError
from ctxext.methods import METHODS, Method, TableMethod, saved_class
from ctxext.methods.base import Rows
from ctxext.methods.parameters import checked_rows
from ctxext.spec import Extension, Request
from ctxext.surgery.edits import Edits
from ctxext.surgery.subject import Subject, field_of
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

# Configs of GPT-2's time state the length twice: transformers reads the other field, some programs this one.
SAID_TWICE = "n_ctx"


class LearnedTable(Architecture):
    """Tables of learned positions, found by twins of the model that differ in one length.

    The longer table is an ordinary weight, and the config states its length, so plain transformers loads the result.
    """

    name: ClassVar[str] = "table"

    def matches(self, subject: Subject) -> bool:
        return twins_of(subject.model).has_learned

    def tables(self, subject: Subject) -> list[PositionTable]:
        """Return the tables that ``apply`` lengthens.

        Raises:
            IncompatibleError: if there is no table whose rows can be assigned to positions.
        """
        return twins_of(subject.model).tables

    def trained_length(self, subject: Subject) -> int | None:
        try:
            return max(table.positions for table in self.tables(subject))
        except IncompatibleError:  # apply raises it; the length in the config holds all the same
            return super().trained_length(subject)

    def apply(self, subject: Subject, method: Method, request: Request, edits: Edits) -> Extension:
        _refuse(subject, method, request)
        assert isinstance(method, TableMethod)
        tables = self.tables(subject)
        lengths = trained_lengths({table.name: table.positions for table in tables}, request)
        targets = {name: checked_rows(method.name, method.target_length(length)) for name, length in lengths.items()}
        rows = {table.name: method.rows(lengths[table.name], targets[table.name]) for table in tables}
        fields = _fields(subject, tables, targets)
        original = {name: getattr(*field_of(subject.config, name)) for name in fields}
        new = {
            table.name: mixed(weight_of(subject.model, table.name), table.first, rows[table.name]) for table in tables
        }
        after, others = replace_tables(twins_of(subject.model), new, fields, edits)
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

    def revert(self, subject: Subject, original: dict[str, Any], edits: Edits) -> None:
        old, reason = _old_tables(subject, self.tables(subject))
        if reason is not None:
            raise IncompatibleError(reason)
        fields = {name: value for name, value in original.items() if value is not None}
        replace_tables(twins_of(subject.model), old, fields, edits)

    def why_final(self, subject: Subject) -> str | None:
        return _old_tables(subject, self.tables(subject))[1]

    def replaces_weights(self, subject: Subject, saved: dict[str, Any] | None = None) -> bool:
        return True

    def replaced_weights(self, subject: Subject) -> dict[str, nn.Parameter]:
        return {table.name: weight_of(subject.model, table.name) for table in self.tables(subject)}

    def kept_rows(self, subject: Subject) -> dict[str, Bool[Tensor, " rows"]]:
        """Mark the rows in tables of an extended model that are learned rows from before the extension.

        These are the rows for padding, and the first copy of each learned row: the first ``trained_length`` rows of
        ``tile`` and ``hierarchical``, every ``factor``-th row of ``pi``.
        """
        kept = {}
        for table, trained, _, rows in _made_of(subject, self.tables(subject)):
            kept[table.name] = torch.arange(table.rows) < table.first
            kept[table.name][table.first + places_of(trained, rows)] = True
        return kept


def _refuse(subject: Subject, method: Method, request: Request) -> None:
    config = subject.config
    if not isinstance(method, TableMethod):
        names = ", ".join(name for name, cls in METHODS.items() if issubclass(cls, TableMethod))
        tables = " and ".join(f"{table.positions:,} tokens ({table.name})" for table in twins_of(subject.model).tables)
        raise IncompatibleError(
            f"This {config.model_type} has learned positions, one vector each for {tables}, which method "
            f"{method.name!r} cannot change. Methods for it: {names}."
        )
    refuse_attention_choices(request, "a longer table of positions leaves")


def trained_lengths(known: dict[str, int], request: Request) -> dict[str, int]:
    """Return the trained length of each table, as the user passed it, or else its number of positions.

    Args:
        known: the number of positions of each table, by its name.
        request: the request of the user.

    Raises:
        InvalidParameterError: if the length that the user passed contradicts the tables.
    """
    longest, is_one = max(known.values()), len(set(known.values())) == 1
    if request.trained_length in (None, longest):
        return known
    if not is_one or request.trained_length > longest:
        raise InvalidParameterError(
            f"trained_length={request.trained_length}: {' and '.join(known)} have rows for "
            f"{' and '.join(f'{length:,}' for length in known.values())} tokens. Leave trained_length out"
            f"{', or pass less, if not all of them were trained' if is_one else ''}."
        )
    return dict.fromkeys(known, request.trained_length)


def _fields(subject: Subject, tables: list[PositionTable], targets: dict[str, int]) -> dict[str, int]:
    """Return the config fields of the longer tables, by dotted name."""
    fields: dict[str, int] = {}
    for table in tables:
        part, leaf = field_of(subject.config, table.field)
        more = targets[table.name] - table.positions
        if more < 0:
            raise InvalidParameterError(
                f"The target of {targets[table.name]:,} tokens is below the {table.positions:,} that {table.name} has "
                f"rows for. Pass a larger target_length or factor."
            )
        value = getattr(part, leaf) + more
        if fields.setdefault(table.field, value) != value:
            raise IncompatibleError(
                f"{table.field} of this {subject.kind} sets the size of several tables, which would need "
                f"different values."
            )
        if vars(part).get(SAID_TWICE) == getattr(part, leaf):
            fields[table.field.removesuffix(leaf) + SAID_TWICE] = value
    return fields


def fingerprint(tables: list[PositionTable], rows: dict[str, Rows]) -> str:
    """Return 12 hexadecimal digits of a hash of the tables and the mixtures of their rows."""
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
    """Return the notes for a user of the model, one or two sentences each."""
    notes = []
    if len(set(lengths.values())) > 1:
        names = [table.name for table in tables]
        each = ", ".join(f"{name} {lengths[name]:,} -> {targets[name]:,} tokens" for name in names)
        notes.append(f"Its tables differ in length: {each}.")
    name = max(lengths, key=lambda key: lengths[key])
    trained = lengths[name]
    if is_kept(rows[name], trained) and not others:
        notes.append(f"Texts of up to {trained:,} tokens are read exactly as before.")
    elif is_kept(rows[name], trained):
        notes.append(f"The rows of the first {trained:,} tokens are the trained ones.")
    else:
        notes.append("Positions of short texts change too: train before use, or compare.")
    if others:
        notes.append(
            f"{others[0]} depends on the length too ({len(others)} such attributes), so its layers compute "
            f"differently, on short texts as well: compare before use."
        )
    return tuple(notes)


def is_kept(rows: Rows, trained: int) -> bool:
    """Return whether the first rows are the trained ones."""
    indices, weights = rows[0][:trained], rows[1][:trained]
    places = indices == indices.new_tensor(range(trained))[:, None]
    return bool(((weights * places).sum(1) == 1).all()) and bool((weights * ~places == 0).all())


def _old_tables(subject: Subject, tables: list[PositionTable]) -> tuple[dict[str, Tensor], str | None]:
    """Return the tables from before the extension of a loaded model, or the reason why they are lost."""
    originals: dict[str, Tensor] = {}
    for table, trained, kept, rows in _made_of(subject, tables):
        old = unmixed(weight_of(subject.model, table.name), table.first, trained, rows)
        if old is None or trained != kept:
            method = _saved_method(subject)
            return {}, (
                f"Its {trained:,} learned rows cannot be recovered from the {table.positions:,} that method "
                f"{method.name!r} (factor {method.factor:g}) made of them. Load the original checkpoint."
            )
        originals[table.name] = old
    return originals, None


def _made_of(subject: Subject, tables: list[PositionTable]) -> Iterator[tuple[PositionTable, int, int, Rows]]:
    """Yield each table of an extended model, its learned rows that were used, all learned rows, and its mixtures."""
    saved, method = subject.config.ctxext, _saved_method(subject)
    for table in tables:
        grown = getattr(*field_of(subject.config, table.field)) - saved["original"][table.field]
        kept = table.positions - grown
        trained = min(saved["trained_length"], kept)
        yield table, trained, kept, method.rows(trained, table.positions)


def _saved_method(subject: Subject) -> TableMethod:
    saved = subject.config.ctxext["method"]
    method = saved_class(saved["method"]).from_dict(saved)
    assert isinstance(method, TableMethod)
    return method
