"""The night in parts: who runs which stage, and the page that the parts write."""

from __future__ import annotations

import pytest

from scripts.nightly import DEALT, SHARED, Row, command, dealt, page


@pytest.mark.parametrize("parts", [1, 2, 3, 5, 8])
def test_each_part_runs_its_share_and_each_other_stage_is_run_once(parts: int) -> None:
    stages = [dealt(number, parts) for number in range(1, parts + 1)]
    assert all(stage[: len(SHARED)] == list(SHARED) for stage in stages)
    assert sorted(name for stage in stages for name in stage[len(SHARED) :]) == sorted(DEALT)
    assert max(map(len, stages)) - min(map(len, stages)) <= 1


def test_a_part_has_its_share_of_the_tests_and_seeds_of_the_referee() -> None:
    assert command("tests", 3, 8)[2:4] == ["pytest", "tests"]  # else pytest looks for --part beside a file of --times
    assert command("tests", 3, 8)[-4:] == ["--part", "3/8", "--times", "runs/night-3-of-8.json"]
    assert command("referee", 3, 8)[-4:] == ["--minutes", "3.75", "--seed", "3000000"]
    assert command("referee", 1, 1)[-2:] == ["--minutes", "30"]


def night(part: str, date: str, commit: str = "abc", failed: str = "") -> list[Row]:
    stages = dealt(*map(int, part.split("/")))
    return [Row(part, name, "failed" if name == failed else "passed", "9", "8", date, commit, "CPU") for name in stages]


def test_a_part_replaces_its_own_rows_and_the_page_remembers_the_last_green_night() -> None:
    text = page(night("1/2", "2026-01-01 02:17"))
    assert "never green" in text
    text = page(night("2/2", "2026-01-01 04:00"), text)
    green = "All parts were last green on 2026-01-01 04:00 UTC, at commit abc."
    assert green in text
    text = page(night("2/2", "2026-01-02 04:00", "def", failed="referee"), text)
    assert green in text
    rows = [line.split(" | ")[:6] for line in text.splitlines() if line.startswith(("| 1", "| 2"))]
    assert [(row[0], row[1]) for row in rows] == [
        (f"| {number}/2", name) for number in (1, 2) for name in dealt(number, 2)
    ]
    assert [row[5] for row in rows if row[0] == "| 2/2"] == ["2026-01-02 04:00"] * len(dealt(2, 2))
    assert next(row[2] for row in rows if row[:2] == ["| 2/2", "referee"]) == "failed"
    text = page(night("1/2", "2026-01-03 04:00", "def"), page(night("2/2", "2026-01-03 03:00", "def")), text)
    assert "last green on 2026-01-03 04:00 UTC, at commit def." in text
    assert "2026-01-02" not in text


def test_a_night_of_uncommitted_changes_is_not_green() -> None:
    assert "never green" in page(night("1/1", "2026-01-01 02:17", "abc+"))
