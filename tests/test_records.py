"""Every measuring command gives the numbers that it gave when it was recorded, to the last digit.

On the same arithmetic, that is: the last digits of a float depend on the processor and on the versions of torch and
transformers. Where these are the recorded ones, reports are equal in everything. Elsewhere numbers with a decimal point
are compared to ``Case.close``, 1e-5 where nothing is trained, and everything else is equal. ``tests/_records.py`` says
what is recorded and how to record it anew.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest

from tests._products import some
from tests._records import CASES, FOLDER, arithmetic, differences, measured, results, stored


def floats(report: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """List the places of all numbers with a decimal point."""
    if isinstance(report, float):
        return [place]
    parts = report.items() if isinstance(report, dict) else enumerate(report) if isinstance(report, list) else ()
    return [inner for name, part in parts for inner in floats(part, (*place, name))]


def changed(report: Any, place: tuple[Any, ...], value: Any) -> Any:
    """Copy a report with another value in one place."""
    whole = copy.deepcopy(report)
    *path, last = place
    part = whole
    for name in path:
        part = part[name]
    part[last] = value
    return whole


@pytest.mark.slow
@pytest.mark.parametrize("name", some(CASES, *(CASES.keys() - {"choose"})))
def test_a_command_gives_what_it_gave(name: str) -> None:
    record = stored(name)
    close = 0.0 if record["provenance"]["arithmetic"] == arithmetic() else CASES[name].close
    found = list(differences(record["report"], results(measured(name)), close))
    assert found == [], f"{len(found)} differences, compared to {close:g}"


def test_there_is_a_record_of_every_case_and_no_other() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(CASES)
    for name in CASES:
        record = stored(name)
        assert record["provenance"].keys() == {"command", "measured", "made_at", "python", "arithmetic"}
        assert len(floats(record["report"])) >= 2, name


@pytest.mark.parametrize("name", CASES)
def test_a_record_sees_the_last_digit_of_every_number(name: str) -> None:
    report = stored(name)["report"]
    assert list(differences(report, copy.deepcopy(report))) == []
    for place in floats(report)[::67]:
        value = report
        for part in place:
            value = value[part]
        other = changed(report, place, math.nextafter(value, math.inf))
        assert len(list(differences(report, other))) == 1
        assert list(differences(report, other, 1e-5)) == []
        assert len(list(differences(report, changed(report, place, value * 1.001 + 0.001), 1e-4))) == 1


def test_structure_and_everything_but_floats_are_compared_exactly() -> None:
    report = {"label": "YaRN", "tokens": 512, "losses": [1.0, 2.0], "best": None, "beats": True}
    for name, value in (
        ("label", "yarn"),
        ("tokens", 513),
        ("tokens", 512.0),
        ("losses", [1.0]),
        ("best", 0),
        ("beats", 1),
    ):
        assert len(list(differences(report, report | {name: value}, 1.0))) == 1, name
    assert len(list(differences(report, report | {"new": 1}, 1.0))) == 1
    assert len(list(differences(report, {"label": "YaRN"}, 1.0))) == 4


def test_circumstances_and_sentences_are_no_results() -> None:
    assert results({"date": "now", "rows": [{"seconds": 3.0, "loss": 2.0}], "sentences": ["It is better."]}) == {
        "rows": [{"loss": 2.0}]
    }
