"""What a longer window has to offer a text, against pairs of places counted one by one."""

from __future__ import annotations

import csv
import math
import random
import statistics
from pathlib import Path

import pytest

from ctxext.errors import InvalidParameterError
from ctxext.measuring.statistics import students_quantile
from ctxext.texts.repeats import MEAN, SLOPE, SQUARES, START, STRING, TEXTS, WIDTH, Repeats, far_repeats, repeats_of

MEASURED = Path(__file__).parents[2] / "docs" / "evidence" / "need.csv"


def counted(ids: list[int], window: int, last: int) -> float:
    """Look every string up at every place before it."""
    covered = set()
    for start in range(len(ids) - last, len(ids) - STRING + 1):
        before = [at for at in range(start) if ids[at : at + STRING] == ids[start : start + STRING]]
        if before and start - before[-1] > window:
            covered |= set(range(start, start + STRING))
    return len(covered) / last


@pytest.mark.parametrize("seed", range(6))
def test_it_is_the_share_of_strings_that_stand_far_before_and_not_nearer(seed: int) -> None:
    draw = random.Random(seed)
    pieces = [[draw.randrange(9) for _ in range(draw.randrange(5, 15))] for _ in range(6)]
    ids = [token for _ in range(40) for token in draw.choice(pieces)]
    for window, last in ((10, 200), (60, len(ids)), (250, 100), (1, 30)):
        assert far_repeats(ids, window, last) == pytest.approx(counted(ids, window, last), abs=1e-12)


def test_a_text_said_twice_repeats_where_the_first_time_is_far() -> None:
    ids = list(range(100)) * 2
    assert repeats_of("twice", ids, 50) == Repeats("twice", 200, 150, 100 / 150)
    assert repeats_of("twice", ids, 100) == Repeats("twice", 200, 100, 0.0), "a window that holds both"
    assert repeats_of("short", ids, 200) == Repeats("short", 200, 0, 0.0)


@pytest.mark.parametrize(("window", "last"), [(0, 5), (5, 0), (5, 11)])
def test_numbers_that_mean_nothing(window: int, last: int) -> None:
    with pytest.raises(InvalidParameterError, match=f"found {window} and {last}"):
        far_repeats(list(range(10)), window, last)


def test_the_law_is_that_of_the_measured_texts() -> None:
    with MEASURED.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    shares = [float(row["repeats from afar"].rstrip("%")) / 100 for row in rows]
    gains = [float(row["Self-Extend"]) for row in rows]
    slope, start = statistics.linear_regression(shares, gains)
    mean, count = statistics.fmean(shares), len(rows)
    rest = math.sqrt(
        sum((gain - start - slope * share) ** 2 for share, gain in zip(shares, gains, strict=True)) / (count - 2)
    )
    width = rest * students_quantile(0.05, count - 2)
    assert (count, round(start, 5), round(slope, 5)) == (TEXTS, START, SLOPE)
    assert (round(mean, 5), round(sum((share - mean) ** 2 for share in shares), 5)) == (MEAN, SQUARES)
    assert pytest.approx(width, abs=5e-6) == WIDTH
    missed = sum(not one.gain[1] <= gain <= one.gain[2] for one, gain in _read(shares, gains))
    assert 0 < missed <= 5  # of 51 texts, 5 percent are 2.6


def _read(shares: list[float], gains: list[float]) -> list[tuple[Repeats, float]]:
    return [(Repeats("text", 16384, 8192, share), gain) for share, gain in zip(shares, gains, strict=True)]


@pytest.mark.parametrize(
    ("share", "verdict", "interval"),
    [  # as scipy 1.18's t distribution gives them
        (0.0, "little to gain (0.0 % repeat from beyond the window, below 5 %)", (0.0266, -0.3090, 0.3622)),
        (0.041, "little to gain (4.1 % repeat from beyond the window, below 5 %)", (0.0806, -0.2541, 0.4153)),
        (0.051, "may gain (5.1 % repeat from beyond the window)", (0.0938, -0.2408, 0.4284)),
        (0.3, "likely to gain (30.0 % repeat from beyond the window)", (0.4220, 0.0793, 0.7646)),
        (0.744, "likely to gain (74.4 % repeat from beyond the window)", (1.0072, 0.6034, 1.4110)),
    ],
)
def test_what_is_predicted(share: float, verdict: str, interval: tuple[float, float, float]) -> None:
    one = Repeats("text", 16384, 8192, share)
    assert one.verdict == verdict
    assert one.gain == pytest.approx(interval, abs=2e-4)
