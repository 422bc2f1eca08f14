"""Verdicts on made-up numbers, and errors of differences against their formula written out."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ctxext.laboratory.claims import CLAIMS, EVERY_OTHER, ITSELF_TRUNCATED, Claim, judge, verdicts
from ctxext.laboratory.result import LabReading, paired
from ctxext.laboratory.subjects import subjects
from ctxext.measuring.statistics import PairedDifference
from tests._products import some
from tests.laboratory._results import WINDOWS, nested, noise, of_parity, of_text, result_of


def answer(claim: Claim, *readings: LabReading) -> tuple[str, str]:
    (found,) = verdicts(result_of(*readings), [claim])
    return found.answer, found.why


BETTER = Claim(says="a beats b", source="a paper", better="a", worse="b")


@pytest.mark.parametrize(
    ("own", "other", "expected"), [(2.0, 2.2, "reproduced"), (2.2, 2.0, "contradicted"), (2.0, 2.0, "not at this size")]
)
def test_a_difference_beyond_its_error_decides(own: float, other: float, expected: str) -> None:
    assert answer(BETTER, of_text("a", own), of_text("b", other, seed=5)) == (expected, "")


def test_a_difference_within_its_error_decides_nothing() -> None:
    apart = (of_text("a", 2.0, size=2.0), of_text("b", 2.1, size=2.0, seed=5))
    assert answer(BETTER, *apart)[0] == "not at this size"


def test_who_did_not_learn_order_proves_nothing() -> None:
    found, why = answer(BETTER, of_text("a", 2.0), of_text("b", 2.2, order=0.01))
    assert (found, why) == ("not at this size", "b did not learn order inside the window")
    assert answer(BETTER, of_text("a", 2.0), of_text("b", 2.2, order=0.1))[0] == "reproduced"
    extended = replace(BETTER, better="b + pi")
    assert answer(extended, of_text("b + pi", 2.0), of_text("b", 2.2, order=0.01))[1] == why, "named once"


def test_who_is_missing_is_named() -> None:
    assert answer(BETTER, of_text("a", 2.0)) == ("not measured", "without b")
    assert answer(BETTER, of_parity("a", 1.0, 1.0)) == ("not measured", "without text")
    assert answer(BETTER, of_text("c", 2.0)) == ("not measured", "without a and b")
    cliff = Claim(says="c breaks", source="a paper", better=ITSELF_TRUNCATED, worse="c", multiple=2)
    assert answer(cliff, of_text("a", 2.0)) == ("not measured", "without c")


def test_a_cliff_is_held_against_dropping_the_old_text() -> None:
    cliff = Claim(says="c breaks", source="a paper", better=ITSELF_TRUNCATED, worse="c", multiple=2)
    assert answer(cliff, of_text("c", 2.6, truncated=2.3))[0] == "reproduced"
    assert answer(cliff, of_text("c", 2.2, truncated=2.3))[0] == "contradicted"


ALONE = Claim(says="p alone", source="a paper", better="p", worse=EVERY_OTHER, tasks=("parity",), multiple=4)


def test_alone_is_judged_against_the_best_of_the_others() -> None:
    others = [of_parity("x", 0.6, 0.5), of_parity("y", 0.5, 0.5)]
    assert answer(ALONE, of_parity("p", 1.0, 0.9), *others)[0] == "reproduced"
    assert answer(ALONE, of_parity("p", 1.0, 0.9), *others, of_parity("z", 1.0, 0.95))[0] == "contradicted"


def test_kin_recurrent_models_and_extensions_are_no_rivals() -> None:
    no_rivals = [of_parity(name, 1.0, 1.0) for name in ("p_with_gate", "x + pi")]
    no_rivals += [of_parity("m", 1.0, 1.0, kind="recurrent")]
    assert answer(ALONE, of_parity("p", 1.0, 0.9), of_parity("x", 0.6, 0.5), *no_rivals)[0] == "reproduced"


def test_that_it_did_not_learn_the_puzzle_itself_is_no_success() -> None:
    found, why = answer(ALONE, of_parity("p", 0.51, 0.51), of_parity("x", 0.5, 0.45))
    assert (found, why) == ("not at this size", "p did not learn order inside the window")


def test_the_names_in_the_claims_exist() -> None:
    known = {*subjects(), ITSELF_TRUNCATED, EVERY_OTHER, "path"}
    named = {side.split(" + ")[0] for claim in CLAIMS for side in (claim.better, claim.worse)}
    assert named - known == set()
    assert len(CLAIMS) >= 10


def test_a_rival_that_may_be_better_stands_against_alone() -> None:
    """The best mean is beaten, but of a rival that varies much nobody knows."""
    sure = [PairedDifference(0.1, 0.01, 60, 3), PairedDifference(0.2, 0.01, 60, 3)]
    assert judge(sure) == "reproduced"
    assert judge([*sure, PairedDifference(0.3, 0.2, 60, 3)]) == "not at this size"


def test_the_luckiest_of_many_rivals_contradicts_by_more() -> None:
    """Of three units one rival needs 4.303 standard errors, one of ten 14.089 (0.5 percent, two-sided)."""
    equal = [PairedDifference(0.0, 0.01, 60, 3)] * 9
    for mean, one, many in ((-0.0431, "contradicted", "not at this size"), (-0.1409, "contradicted", "contradicted")):
        lucky = PairedDifference(mean, 0.01, 60, 3)
        assert (judge([lucky]), judge([*equal, lucky])) == (one, many)


@pytest.mark.parametrize("rivals", [1, 13])
@pytest.mark.parametrize("seeds", [2, 3, 5])
@pytest.mark.parametrize("apart", some([0.0, 0.02, 0.05, 0.5], 0.0, 0.05))
def test_equals_contradict_no_claim_and_bear_none_out(rivals: int, seeds: int, apart: float) -> None:
    """All are at chance in 32 puzzles of 160 bits; seeds differ by ``apart``."""
    runs, generator = 120 if rivals > 1 else 400, torch.Generator().manual_seed(4)

    def scores(*who: int) -> Tensor:
        noise = 0.04 * torch.randn(*who, seeds, 32, generator=generator)
        return 0.5 + noise + apart * torch.randn(*who, seeds, 1, generator=generator)

    answers = [judge([paired(own - other) for other in scores(rivals)]) for own in scores(runs)]
    assert sum(one != "not at this size" for one in answers) <= 0.06 * runs


def test_seeds_that_disagree_ask_for_more() -> None:
    agree = noise(2, 50, size=0.1) + 1.0
    disagree = agree + torch.tensor([[-0.9], [0.9]])
    assert judge([paired(agree)]) == "reproduced"
    assert judge([paired(disagree)]) == "not at this size"
    assert judge([paired(disagree[:1] + 1)]) == "reproduced", "one seed alone has no error over seeds"
    assert paired(disagree[:1]).over == "windows"


def test_what_was_learned_is_asked_of_these_models_not_of_others() -> None:
    """Two seeds that learned order unequally well have both learned it."""
    reading = of_text("a", 2.0)
    order = torch.cat([torch.full((1, WINDOWS), 0.2), torch.full((1, WINDOWS), 0.6)]) + noise(2, WINDOWS)
    reading = replace(reading, order=nested(order))
    assert result_of(reading).has_learned(reading)
    by_window = order.numpy().mean(0)
    error = by_window.std(ddof=1) / math.sqrt(WINDOWS)
    assert result_of(reading).evidence(reading).standard_error == pytest.approx(error)


def test_a_difference_without_any_spread_is_certain() -> None:
    assert judge([PairedDifference(0.5, 0.0, 20, 10)]) == "reproduced"
    assert judge([paired(torch.zeros(2, 5))]) == "not at this size"
