"""Which texts are chosen on and which judge, and which sizes a budget lasts for; what is too little is said at once."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from ctxext.choosing.halving import LADDER, Costs
from ctxext.errors import InvalidParameterError
from ctxext.quantities import parse_budget

COSTS = Costs(
    trained=8192,
    length=16384,
    judged=90,
    others=5,
    windows=(2048, 4096, 6144, 8192),
    turning_point=4096,
    choosing=9,
    held_out=15,
    keys=True,
)


def test_a_budget_is_time_or_passes() -> None:
    assert parse_budget("30min").seconds == 1800
    assert (parse_budget("1.5h").seconds, parse_budget("90 s").seconds) == (5400, 90)
    assert (parse_budget("25 passes").passes, parse_budget(None).passes) == (25, None)
    for wrong in ("30", "half an hour", "0min", "-3h", 30.0):
        with pytest.raises(InvalidParameterError, match="30min"):
            parse_budget(wrong)


def test_smaller_budgets_make_smaller_sizes_that_they_last_for() -> None:
    whole = COSTS.sizes(None)
    assert (whole.whole, whole.finalists, whole.first, whole.texts, whole.held_out, whole.keys) == (10, 3, 1, 3, 5, 3)
    costs = [COSTS.most(COSTS.sizes(allowed)) for allowed in (60.0, 50.0, 40.0, 30.0, 20.0)]
    assert all(cost <= allowed for cost, allowed in zip(costs, (60.0, 50.0, 40.0, 30.0, 20.0), strict=True))
    assert all(later <= earlier for earlier, later in pairwise(costs))
    with pytest.raises(InvalidParameterError, match=r"budget is too small: it comes to 3\.0 passes over 16,384 tokens"):
        COSTS.sizes(3.0)
    assert replace(COSTS, choosing=1, held_out=1, keys=False).sizes(None).texts == 1
    assert len(LADDER) >= 5


def test_an_hour_on_two_cores_ends_in_a_verdict_on_five_texts() -> None:
    """A hundred candidates, and the forty passes that two cores read in an hour: the choice was once judged on one."""
    costs = replace(COSTS, judged=98, others=5, choosing=3, held_out=5)
    sizes = costs.sizes(40.0)
    assert (sizes.held_out, costs.most(sizes) <= 40) == (5, True)
    assert sizes.whole >= 3, "and still chooses among more than the published YaRN"
    assert costs.sizes(32.0).held_out == 3


def test_short_targets_take_more_texts() -> None:
    short, long = replace(COSTS, trained=128, length=512), replace(COSTS, length=65536)
    assert (COSTS.stretches, short.stretches) == (1, 11)
    assert (COSTS.prefix, long.prefix) == (4096, 8192)


@pytest.mark.parametrize("turning_point", [1, 1600, 40_000])
def test_the_clock_says_what_attention_costs(turning_point: int) -> None:
    """Two timed passes; on CPUs without matrix units a pass over 16K tokens took a fifth more than operations say."""

    def seconds(tokens: int) -> float:
        return 1e-3 * tokens + 1e-3 * tokens**2 / turning_point

    timed = COSTS.timed(seconds(4096), seconds(16384))
    assert timed.turning_point == turning_point
    assert timed.of(8192) == pytest.approx(seconds(8192) / seconds(16384))
    assert replace(timed, turning_point=COSTS.turning_point) == COSTS


@pytest.mark.parametrize(("share", "eighth"), [(0.01, 1 / 64), (0.25, 1 / 8), (0.9, 1 / 8)])
def test_a_clock_that_says_more_than_all_or_nothing(share: float, eighth: float) -> None:
    """Attention is at most all of a pass, at least nothing; a tiny model's calls cost something beside both."""
    assert COSTS.timed(share, 1.0).of(2048) == pytest.approx(eighth, rel=1e-2)
