"""What `make test` runs of a product of cases: each value once; `make nightly` runs all the others as well."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def some(values: Iterable[Any], *kept: Any) -> list[Any]:
    """All values as cases; those that are not ``kept`` are nightly."""
    listed = list(values)
    assert all(value in listed for value in kept), "what is kept is one of them"
    return [pytest.param(one, marks=[] if one in kept else pytest.mark.nightly, id=str(one)) for one in listed]


def crossed(rows: Sequence[Any], columns: Sequence[Any]) -> list[Any]:
    """All pairs as cases; those with neither the first row nor the first column are nightly."""
    return [
        pytest.param(
            *(row, column), marks=[pytest.mark.nightly] * (i > 0 and j > 0), id=f"{_name(row)}-{_name(column)}"
        )
        for i, row in enumerate(rows)
        for j, column in enumerate(columns)
    ]


def pairwise(*axes: Sequence[Any]) -> list[Any]:
    """Few cases, in which each value of an axis meets each value of every other; nightly without a value new by day.

    Greedy: the first pair that has not met yet, and of each other axis the value that meets most of these anew, and of
    such the least used. A value may be a ``pytest.param`` of several arguments with marks.
    """
    places = [[(axis, value) for value in range(len(values))] for axis, values in enumerate(axes)]
    left = dict.fromkeys(pair for two in itertools.combinations(places, 2) for pair in itertools.product(*two))
    rows, used = [], Counter[tuple[int, int]]()
    while left:
        row = dict(next(iter(left)))
        for axis in [axis for axis in range(len(axes)) if axis not in row]:
            met = {place: sum(tuple(sorted((place, other))) in left for other in row.items()) for place in places[axis]}
            row[axis] = max(places[axis], key=lambda place: (met[place], -used[place]))[1]
        used.update(row.items())
        for pair in itertools.combinations(sorted(row.items()), 2):
            left.pop(pair, None)
        rows.append(sorted(row.items()))
    seen: set[tuple[int, int]] = set()
    cases = {}
    for row in random.Random(0).sample(rows, len(rows)):  # so that the first value has no more days than another
        each = [_case(axes[axis][value]) for axis, value in row]
        marks = [mark for case in each for mark in case.marks]
        if seen.issuperset(row) or any(mark.name == "nightly" for mark in marks):
            marks.append(pytest.mark.nightly)
        else:
            seen.update(row)
        arguments = [argument for case in each for argument in case.values]
        cases[tuple(row)] = pytest.param(*arguments, marks=marks, id="-".join(str(case.id) for case in each))
    return [case for _, case in sorted(cases.items())]


def _case(value: Any) -> Any:
    return value if hasattr(value, "marks") else pytest.param(value, id=_name(value))


def _name(value: Any) -> str:
    return str(getattr(value, "__name__", value))
