"""Models with a learned vector for each position: GPT-2, OPT, BERT, RoBERTa, BART and many more."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from ctxext.core.architecture import Architecture, refuse_choices
from ctxext.core.edits import Edits
from ctxext.core.saved import saved_method
from ctxext.core.subject import Subject, field_of
from ctxext.errors import IncompatibleError, InvalidParameterError
from ctxext.files import JsonObject, digest
from ctxext.methods import METHODS, Method, TableMethod
from ctxext.methods.base import Rows
from ctxext.methods.parameters import checked_rows
from ctxext.models.table_rows import (
    PositionTable,
    mixed,
    places_of,
    prove,
    replace_tables,
    twins_of,
    unmixed,
    weight_of,
)
from ctxext.spec import Extension, ExtensionArguments

# Configs of GPT-2's time state the length twice: transformers reads the other field, some programs this one.
SAID_TWICE = "n_ctx"


@dataclass(frozen=True)
class LongerTable:
    """A table of positions, with its trained length and its length under a method, in tokens."""

    table: PositionTable
    trained: int
    target: int


class TableArchitecture(Architecture):
    """Tables with a row for each position, found by twins of the model that differ in one length."""

    @abstractmethod
    def tables(self, subject: Subject) -> list[PositionTable]:
        """Return the tables that ``apply`` makes longer.

        Raises:
            IncompatibleError: if no table has rows that can be assigned to positions.
        """

    def counted(self, subject: Subject, table: PositionTable) -> int:
        """Return the number of tokens that a table was made for."""
        return table.positions

    def trained_length(self, subject: Subject) -> int | None:
        try:
            return max(self.counted(subject, table) for table in self.tables(subject))
        except IncompatibleError:  # apply raises it; the length in the config holds all the same
            return super().trained_length(subject)

    def replaced_weights(self, subject: Subject) -> dict[str, nn.Parameter]:
        names = [table.name for table in self.tables(subject)]
        return {name: weight_of(subject.model, name) for name in names if is_stored(subject, name)}

    def longer(self, subject: Subject, method: Method, request: ExtensionArguments) -> list[LongerTable]:
        """Return the tables with their lengths; trained is what the user passed, or else all of each table.

        Raises:
            InvalidParameterError: if the length that the user passed contradicts the tables.
        """
        known = {table: self.counted(subject, table) for table in self.tables(subject)}
        longest, is_one, given = max(known.values()), len(set(known.values())) == 1, request.trained_length
        if given is not None and (given > longest or (given < longest and not is_one)):
            raise InvalidParameterError(
                f"trained_length={given}: {' and '.join(table.name for table in known)} have rows for "
                f"{' and '.join(f'{length:,}' for length in known.values())} tokens. Leave trained_length out"
                f"{', or pass less, if not all of them were trained' if is_one else ''}."
            )
        if given is not None and is_one:
            known = dict.fromkeys(known, given)
        return [
            LongerTable(table, length, checked_rows(method.name, method.target_length(length)))
            for table, length in known.items()
        ]


def extension_of(
    longer: list[LongerTable],
    fields: dict[str, int],
    *,
    original: JsonObject,
    stored_as: str,
    stock: bool,
    fingerprint: str,
    notes: Iterable[str],
) -> Extension:
    """Return the record of an extension of tables, with the lengths of the longest table."""
    longest = max(longer, key=lambda each: each.trained)
    if len({each.trained for each in longer}) > 1:
        each = ", ".join(f"{one.table.name} {one.trained:,} -> {one.target:,} tokens" for one in longer)
        notes = [f"Its tables differ in length: {each}.", *notes]
    return Extension(
        trained_length=longest.trained,
        target_length=longest.target,
        stored_as=f"{', '.join(f'{name}={value}' for name, value in fields.items())} and {stored_as}",
        stock=stock,
        fingerprint=fingerprint,
        notes=tuple(notes),
        original=original,
    )


def is_stored(subject: Subject, name: str) -> bool:
    """Return whether a checkpoint holds the table, so that a reload reads it instead of computing it."""
    weights = dict(subject.model.named_parameters(remove_duplicate=False))
    return name in weights and name not in (subject.model._keys_to_ignore_on_save or ())


class LearnedTable(TableArchitecture):
    """Tables of learned positions.

    The longer table is an ordinary weight, and the config states its length, so plain transformers loads the result.
    """

    name = "table"
    methods = TableMethod

    def matches(self, subject: Subject) -> bool:
        return twins_of(subject.model).has_learned

    def tables(self, subject: Subject) -> list[PositionTable]:
        return twins_of(subject.model).tables

    def apply(self, subject: Subject, method: Method, request: ExtensionArguments, edits: Edits) -> Extension:
        _refuse(subject, method, request)
        assert isinstance(method, TableMethod)
        longer = self.longer(subject, method, request)
        rows = {each.table.name: method.rows(each.trained, each.target) for each in longer}
        fields = _fields(subject, longer)
        original = {name: getattr(*field_of(subject.config, name)) for name in fields}
        tables = [each.table for each in longer]
        new = {each.name: mixed(weight_of(subject.model, each.name), each.first, rows[each.name]) for each in tables}
        after, others = replace_tables(twins_of(subject.model), new, fields, edits)
        prove(after, tables, new)
        longest = max(longer, key=lambda each: each.trained)
        return extension_of(
            longer,
            fields,
            original=original,
            stored_as="a longer table of weights",
            stock=True,
            fingerprint=fingerprint(tables, rows),
            notes=_notes(longest.trained, rows[longest.table.name], others),
        )

    def revert(self, subject: Subject, original: JsonObject, edits: Edits) -> None:
        old, reason = _old_tables(subject, self.tables(subject))
        if reason is not None:
            raise IncompatibleError(reason)
        fields = {name: value for name, value in original.items() if value is not None}
        replace_tables(twins_of(subject.model), old, fields, edits)

    def why_final(self, subject: Subject) -> str | None:
        return _old_tables(subject, self.tables(subject))[1]

    def replaces_weights(self, subject: Subject, saved: JsonObject | None = None) -> bool:
        return True

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


def _refuse(subject: Subject, method: Method, request: ExtensionArguments) -> None:
    config = subject.config
    if not isinstance(method, TableMethod):
        names = ", ".join(name for name, cls in METHODS.items() if issubclass(cls, TableMethod))
        tables = " and ".join(f"{table.positions:,} tokens ({table.name})" for table in twins_of(subject.model).tables)
        raise IncompatibleError(
            f"This {config.model_type} has learned positions, one vector each for {tables}, which method "
            f"{method.name!r} cannot change. Methods for it: {names}."
        )
    refuse_choices(
        request, ("sliding_window", "attention"), "a longer table of positions leaves attention to the model"
    )


def _fields(subject: Subject, longer: list[LongerTable]) -> dict[str, int]:
    """Return the config fields of the longer tables, by dotted name."""
    fields: dict[str, int] = {}
    for table, target in ((each.table, each.target) for each in longer):
        part, leaf = field_of(subject.config, table.field)
        more = target - table.positions
        if more < 0:
            raise InvalidParameterError(
                f"The target of {target:,} tokens is below the {table.positions:,} that {table.name} has "
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
    parts = b""
    for table in tables:
        parts += f"{table.name} {table.first}".encode()
        parts += b"".join(part.numpy().tobytes() for part in rows[table.name])
    return digest(parts)


def _notes(trained: int, rows: Rows, others: tuple[str, ...]) -> list[str]:
    """Return the notes for a user of the model, one or two sentences each."""
    notes = []
    if is_kept(rows, trained) and not others:
        notes.append(f"Texts of up to {trained:,} tokens are read exactly as before.")
    elif is_kept(rows, trained):
        notes.append(f"The rows of the first {trained:,} tokens are the trained ones.")
    else:
        notes.append("Positions of short texts change too: compare with the unextended model before use.")
    if others:
        notes.append(
            f"{others[0]} depends on the length too ({len(others)} such attributes), so its layers compute "
            f"differently, on short texts as well: compare before use."
        )
    return notes


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
            method = saved_method(subject.config.ctxext)
            return {}, (
                f"The {trained:,} learned rows of this {subject.kind} cannot be recovered from the "
                f"{table.positions:,} that method {method.name!r} (factor {method.factor:g}) made of them. Load the "
                f"original checkpoint."
            )
        originals[table.name] = old
    return originals, None


def _made_of(subject: Subject, tables: list[PositionTable]) -> Iterator[tuple[PositionTable, int, int, Rows]]:
    """Yield each table of an extended model, its learned rows that were used, all learned rows, and its mixtures."""
    saved = subject.config.ctxext
    method = saved_method(saved)
    assert isinstance(method, TableMethod)
    for table in tables:
        grown = getattr(*field_of(subject.config, table.field)) - saved["original"][table.field]
        kept = table.positions - grown
        trained = min(saved["trained_length"], kept)
        yield table, trained, kept, method.rows(trained, table.positions)
