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
from ctxext.texts.repeats import CLASSES, STRING, Repeats, far_repeats, likeness_of, repeats_of

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
    assert repeats_of("twice", ids, 130) == Repeats("twice", 200, 70, 1.0), "a window is not sure to hold both"
    assert repeats_of("twice", ids, 134) == Repeats("twice", 200, 66, 0.0), "a window that holds both"
    assert repeats_of("short", ids, 200) == Repeats("short", 200, 0, 0.0)


@pytest.mark.parametrize(("window", "last"), [(0, 5), (5, 0), (5, 11)])
def test_numbers_that_mean_nothing(window: int, last: int) -> None:
    with pytest.raises(InvalidParameterError, match=f"found {window} and {last}"):
        far_repeats(list(range(10)), window, last)


def measured() -> list[tuple[str, float, float]]:
    """The package, the share of repeats and the gain of each text."""
    rows = csv.DictReader(MEASURED.read_text(encoding="utf-8").splitlines())
    shares = [(row, float(row["repeats from afar"].rstrip("%")) / 100) for row in rows]
    return [(row["text"].split("/")[0], share, float(row["Self-Extend"])) for row, share in shares]


def interval_of(gains: list[float]) -> tuple[float, float]:
    """What 95 percent of further texts gain, if they are drawn as these were."""
    width = statistics.stdev(gains) * math.sqrt(1 + 1 / len(gains)) * students_quantile(0.05, len(gains) - 1)
    return statistics.fmean(gains) - width, statistics.fmean(gains) + width


def test_each_interval_is_that_of_the_measured_texts_of_its_class() -> None:
    texts = measured()
    assert sum(each.texts for each in CLASSES) == len(texts)
    for each in CLASSES:
        gains = [gain for _, share, gain in texts if likeness_of(share) == each]
        assert len(gains) == each.texts
        assert tuple(round(end, 2) for end in interval_of(gains)) == each.gain
    assert CLASSES[0].gain[1] - CLASSES[0].gain[0] < 0.15


def test_intervals_hold_for_packages_that_they_do_not_rest_on() -> None:
    texts, held = measured(), 0
    for package, share, gain in texts:
        others = [other for name, part, other in texts if name != package and likeness_of(part) == likeness_of(share)]
        low, high = interval_of(others)
        held += low <= gain <= high
    assert held == 47  # of 51: 92 percent


GAINS = [(0.0, "little to"), (0.041, "little to"), (0.051, "may"), (0.3, "likely to"), (1.0, "likely to")]


@pytest.mark.parametrize(("share", "verdict"), GAINS)
def test_what_is_predicted(share: float, verdict: str) -> None:
    said = f"{verdict} gain ({100 * share:.1f} % repeat from afar)"
    assert Repeats("text", 16384, 8192, share).verdict == said
