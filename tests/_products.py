"""What `make test` runs of a product of cases: each value once; `make nightly` runs all the others as well."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
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
    return _pairs(rows, columns, lambda row, column: row == 0 or column == 0)


def paired(rows: Sequence[Any], columns: Sequence[Any]) -> list[Any]:
    """All pairs as cases; by day, each of the more with one of the fewer, in turn."""
    turns = min(len(rows), len(columns))
    return _pairs(rows, columns, lambda row, column: row % turns == column % turns)


def _pairs(rows: Sequence[Any], columns: Sequence[Any], by_day: Callable[[int, int], bool]) -> list[Any]:
    return [
        pytest.param(*pair, marks=[] if by_day(*at) else pytest.mark.nightly, id="-".join(map(_name, pair)))
        for at, pair in zip(
            itertools.product(range(len(rows)), range(len(columns))), itertools.product(rows, columns), strict=True
        )
    ]


def _name(value: Any) -> str:
    return str(getattr(value, "__name__", value))
