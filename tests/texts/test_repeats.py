"""What a longer window has to offer a text, against pairs of places counted one by one."""

from __future__ import annotations

import random

import pytest

from ctxext.errors import InvalidParameterError
from ctxext.texts.repeats import STRING, Repeats, far_repeats, repeats_of


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
