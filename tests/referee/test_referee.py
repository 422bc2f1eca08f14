"""The referee by day: a cover of all pairs, what nights have found, and what it is made of."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from ctxext.methods import self_extend
from tests._programs import ROOT, ran
from tests.referee import mutants
from tests.referee.__main__ import kept
from tests.referee.point import Point, covering, drawn, shrunk
from tests.referee.truth import L
from tests.referee.walk import verdict

POINTS = covering()
SHARES = 12


@pytest.mark.parametrize("share", range(SHARES))
def test_each_pair_of_values_and_most_of_values_and_operations(share: int) -> None:
    failures = [(point, reason) for point in POINTS[share::SHARES] if (reason := verdict(point)) is not None]
    assert failures == []


@pytest.mark.parametrize("entry", kept(), ids=lambda entry: entry["found"][:40])
def test_what_was_found_stays_right(entry: dict[str, Any], request: pytest.FixtureRequest) -> None:
    """A known failure, which has an issue, fails still: take the issue away once it is mended."""
    if "compiled" in dict(entry["point"].operations):
        request.getfixturevalue("_without_checker")
    assert (verdict(entry["point"]) is None) == (entry.get("issue") is None), entry["point"]


def test_a_failure_is_seen_and_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Far keys that count as much as near ones."""
    monkeypatch.setattr(self_extend, "usual_thinning", lambda factor: 0.0)
    walks = ("step", 1), ("read", 2), ("read", 3), ("step", 4), ("whole", 5)
    point = Point(3, walks, method="self_extend", rows=2, mode="inference", cache="of the config")
    small = shrunk(point, lambda smaller: verdict(smaller) is not None)
    assert verdict(point)
    assert (small.rows, small.mode, small.cache, small.method) == (1, "no_grad", "given", "self_extend")
    assert len(small.operations) < len(walks)


def test_points_are_what_their_seeds_say_and_go_through_a_file() -> None:
    points = [drawn(seed) for seed in range(60)]
    assert points == [drawn(seed) for seed in range(60)]
    assert [Point(**json.loads(json.dumps(vars(point)))) for point in points] == points
    assert all(point.limit >= L for point in points)


def test_every_mutant_changes_code_that_is_there() -> None:
    """All lines of the table are looked up, and forty drawn."""
    assert len(set(mutants.drawn())) == 40


@pytest.mark.nightly
def test_the_twins_are_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter, in a process of its own."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    done = ran([str(Path(__file__).with_name("twin_program.py")), "40"], ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.split()) == 40, (done.stdout, sys.version)
