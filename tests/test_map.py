"""The table of which tests cover a source file, and who makes and reads it."""

from __future__ import annotations

import csv

from scripts.tests_of import ROOT, TABLE, covering, fewest


def test_the_fewest_test_files_that_cover_all_lines() -> None:
    lines = {"a": {1, 2, 3}, "b": {3, 4, 5, 6}, "c": {1, 2}, "d": {6}}
    assert list(fewest(lines)) == [("b", 4), ("a", 2)]
    assert list(fewest({"a": set(range(99)), "b": {99}})) == [("a", 99)]
    assert list(fewest({})) == []


def test_every_file_in_the_table_is_there_and_most_files_are_in_it() -> None:
    with TABLE.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    gone = {path for row in rows for path in (row["source"], row["test"]) if not (ROOT / path).is_file()}
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "ctxext").rglob("*.py")}
    assert gone == set(), "make test-map"
    assert len(sources - {row["source"] for row in rows}) < 60, "make test-map"
    assert "tests/core/test_edits.py" in covering("ctxext/core/edits.py")
