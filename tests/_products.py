"""What `make test` runs of a product of cases: each value once; `make nightly` runs all the others as well."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def some(values: Iterable[Any], *kept: Any, ids: Any = None) -> list[Any]:
    """All values as cases; those that are not ``kept`` are nightly."""
    name = ids or str
    listed = list(values)
    assert all(value in listed for value in kept), "what is kept is one of them"
    return [pytest.param(one, marks=[] if one in kept else pytest.mark.nightly, id=name(one)) for one in listed]


def crossed(rows: Sequence[Any], columns: Sequence[Any]) -> list[Any]:
    """All pairs as cases; those with neither the first row nor the first column are nightly."""
    return [
        pytest.param(
            row,
            column,
            marks=[] if row == rows[0] or column == columns[0] else pytest.mark.nightly,
            id=f"{_name(row)}-{_name(column)}",
        )
        for row in rows
        for column in columns
    ]


def paired(rows: Sequence[Any], columns: Sequence[Any]) -> list[Any]:
    """All pairs as cases; by day, each of the more with one of the fewer, in turn."""
    turns = min(len(rows), len(columns))
    return [
        pytest.param(
            row,
            column,
            marks=[] if at % turns == beside % turns else pytest.mark.nightly,
            id=f"{_name(row)}-{_name(column)}",
        )
        for at, row in enumerate(rows)
        for beside, column in enumerate(columns)
    ]


def _name(value: Any) -> str:
    return str(getattr(value, "__name__", value))
