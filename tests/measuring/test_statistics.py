"""Differences, their standard errors and verdicts: by hand, against printed tables, and in simulations among equals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from ctxext.choosing.verdict import by_document, judge_held_out
from ctxext.errors import IncompatibleError, InvalidParameterError
from ctxext.measuring.statistics import (
    PairedDifference,
    block_difference,
    bucketed,
    document_difference,
    grouped_difference,
    mean_loss,
    students_quantile,
)


def test_documents_weigh_the_same_whatever_their_length() -> None:
    losses = [torch.full((size,), 1.0 + number) for number, size in enumerate((2, 3, 4, 1, 200))]
    found = document_difference(losses, [torch.ones(len(one)) for one in losses])
    # Means 0, 1, 2, 3, 4: the textbook standard error of five numbers.
    assert (found.mean, found.standard_error) == (pytest.approx(2.0), pytest.approx(math.sqrt(2.5 / 5)))
    assert (found.units, found.over, found.tokens) == (5, "documents", 210)
    assert found.scope(5) == ", if effects are not strongly skewed"
    assert mean_loss(losses) == pytest.approx(found.mean + 1.0)
    empty = torch.ones(0)
    assert document_difference([*losses, empty], [*map(torch.ones_like, losses), empty]) == found


def test_of_few_documents_blocks_are_compared() -> None:
    generator = torch.Generator().manual_seed(1)
    losses = [torch.randn(size, generator=generator) for size in (1900, 2149, 100, 0)]
    found = document_difference(losses, [torch.zeros_like(one) for one in losses])
    joined = torch.cat(losses).double()
    assert (found.units, found.over, found.tokens) == (16, "blocks", 4149)
    assert found.mean == pytest.approx(joined.mean().item()) == pytest.approx(mean_loss(losses))
    assert [found.scope(1), found.scope(3)] == [" on this text", " on these texts"]
    means = torch.stack([part.mean() for part in torch.tensor_split(joined, 16)])
    assert found.standard_error == pytest.approx((means.std() / 4).item())
    # At most sixteen, of 256 tokens or more; never fewer than eight; never more than there are tokens.
    sizes = {100_000: 16, 4096: 16, 3072: 12, 2048: 8, 100: 8, 8: 8, 5: 5, 2: 2}
    found_units = {n: document_difference([torch.arange(float(n))], [torch.zeros(n)]).units for n in sizes}
    assert found_units == sizes
    assert block_difference([torch.arange(100_000.0)], [torch.zeros(100_000)], most=64).units == 64


def test_what_cannot_be_compared_is_refused() -> None:
    losses = [torch.tensor([1.0, 3.0]), torch.tensor([2.0, 4.0, 5.0])]
    for bad in (losses[:1], losses[::-1]):
        with pytest.raises(InvalidParameterError, match="same tokens"):
            document_difference(bad, losses)
    with pytest.raises(InvalidParameterError, match="at least two groups"):
        grouped_difference(losses[:1], losses[:1], over="documents")
    for none in ([], [torch.ones(0)], [torch.ones(1)]):
        with pytest.raises(InvalidParameterError, match="at least two tokens"):
            document_difference(none, none)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("documents", [1, 5])
def test_a_loss_that_is_no_number_has_no_verdict(value: float, documents: int) -> None:
    good = [torch.ones(20) for _ in range(documents)]
    bad = [*good[1:], torch.cat([torch.ones(19), torch.tensor([value])])]
    for sides in ((bad, good), (good, bad), (bad, bad)):
        with pytest.raises(IncompatibleError, match="infinite losses"):
            document_difference(*sides)


RUNS = 800


def share(verdicts: Sequence[bool]) -> float:
    return sum(verdicts) / len(verdicts)


UNEQUAL = {
    "nine equal": [200] * 9,
    "nine novels": [30, 45, 60, 80, 100, 130, 180, 300, 500],
    "a novel and four stories": [160, 10, 10, 10, 10],
    "key tokens of six texts": [120, 31, 14, 9, 6, 2],
    "sixteen stretches and four": [1024, 64, 64, 64, 64],
    "nearly one": [200, 10, 10, 5, 5],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "tails"),
    [*((name, False) for name in UNEQUAL), ("nine novels", True), ("a novel and four stories", True)],
)
def test_a_verdict_over_documents_is_wrong_in_six_percent_at_most(sizes: str, tails: bool) -> None:
    """Documents differ, by chance alone: by a normal amount or one with heavy tails, and so do tokens."""
    generator = torch.Generator().manual_seed(8)
    lengths = UNEQUAL[sizes]
    shape = (RUNS, len(lengths))
    own = torch.randn(shape, generator=generator)
    if tails:  # Student's with three degrees of freedom
        own /= (torch.randn((*shape, 3), generator=generator).square().mean(-1)).sqrt()
    zeros, wrong = [torch.zeros(size) for size in lengths], []
    for shifts in own:
        noise = torch.randn(sum(lengths), generator=generator).split(lengths)
        texts = [shift + part for shift, part in zip(shifts, noise, strict=True)]
        wrong.append(document_difference(texts, zeros).verdict != "no difference")
    assert share(wrong) <= 0.06


@pytest.mark.slow
@pytest.mark.parametrize(
    ("draw", "better", "worse"),
    # In percent: 2.5 of each for normal effects; of skewed ones as scripts/studies/skewed_verdicts.py found.
    [("normal", 2.5, 2.5), ("heavy", 1.7, 1.6), ("exponential", 11.3, 0.4), ("mirrored", 0.4, 11.3)],
)
def test_for_which_effects_a_verdict_over_documents_holds(draw: str, better: float, worse: float) -> None:
    generator = np.random.default_rng(7)
    shape, zeros = (2000, 5), [torch.zeros(1)] * 5
    effects = {
        "normal": lambda: generator.standard_normal(shape),
        "heavy": lambda: generator.standard_t(2, shape),
        "exponential": lambda: generator.exponential(1, shape) - 1,
        "mirrored": lambda: 1 - generator.exponential(1, shape),
    }[draw]()
    verdicts = [document_difference(list(torch.tensor(run)[:, None]), zeros).verdict for run in effects]
    for verdict, percent in (("better", better), ("worse", worse)):
        noise = 4 * math.sqrt(percent / 100 / shape[0])
        assert share([found == verdict for found in verdicts]) == pytest.approx(percent / 100, abs=noise)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [[2048], [1500, 500], [2000, 100, 50, 30]], ids=str)
def test_a_verdict_on_few_texts_is_wrong_in_six_percent_at_most(sizes: list[int]) -> None:
    """A token shares nine tenths with the one before it; the verdict is about these texts."""
    generator, keep = torch.Generator().manual_seed(5), 0.9
    noise = torch.randn(500, sum(sizes) + 200, generator=generator)
    for place in range(1, noise.shape[1]):
        noise[:, place] += keep * noise[:, place - 1]
    zeros = [torch.zeros(size) for size in sizes]
    found = [document_difference(row[200:].split(sizes), zeros) for row in noise]
    assert all(one.scope(len(sizes)) for one in found)
    assert share([one.verdict != "no difference" for one in found]) <= 0.06


def test_what_is_there_is_found() -> None:
    """A verdict that is careful to no end would pass the tests above."""
    generator = torch.Generator().manual_seed(3)
    sizes = UNEQUAL["nine novels"]
    zeros, found = [torch.zeros(size) for size in sizes], []
    for _ in range(200):
        texts = [-1.5 + torch.randn(1, generator=generator) + torch.randn(n, generator=generator) for n in sizes]
        found.append(document_difference(texts, zeros).verdict == "better")
    assert share(found) > 0.9


@pytest.mark.slow
def test_held_out_texts_declare_no_winner_among_equals() -> None:
    """Sixteen stretches of one text and one of each of four others, between which readings differ by chance."""
    generator = torch.Generator().manual_seed(11)
    documents = ["long"] * 16 + list("abcd")
    trained, length, runs = 32, 96, 120
    counts = {"winner": 0, "overruled": 0, "truncation beaten": 0}

    def reading(tokens: int) -> list[Tensor]:
        shifts = {name: torch.randn(1, generator=generator) for name in dict.fromkeys(documents)}
        return [3 + shifts[name] + torch.randn(tokens, generator=generator) for name in documents]

    for _ in range(runs):
        readings = {name: reading(length) for name in ("choice", "usual", "second")}
        plain = {"unpatched": reading(trained), "truncations": {"truncated 8": reading(16)}}
        how = {"documents": documents, "trained": trained, "same_documents": False}
        held = judge_held_out(readings, choice="choice", usual="usual", runner_up="second", **plain, **how)
        counts["winner"] += "better" in (held.verdict(held.versus_usual), held.verdict(held.versus_runner_up))
        counts["overruled"] += held.verdict(held.versus_usual) == "worse"
        counts["truncation beaten"] += held.versus_truncation.verdict == "better"
    assert max(counts.values()) <= 0.06 * runs, counts
    assert len(by_document(reading(length), documents)) == 5


def test_buckets_weigh_tokens() -> None:
    losses = torch.tensor([[1.0, 2.0, 3.0, 4.0], [3.0, 4.0, 5.0, 6.0]])
    first, second = bucketed(losses, [0, 1, 4])
    assert (first.start, first.stop, first.tokens, first.loss) == (0, 1, 2, 2.0)
    assert (second.start, second.stop, second.tokens, second.loss) == (1, 4, 6, 4.0)
    assert second.perplexity == pytest.approx(math.e**4)


@pytest.mark.parametrize(
    ("units", "expected"),
    # Two-sided 5 percent points of Student's distribution, from printed tables.
    [(2, 12.706), (3, 4.303), (5, 2.776), (6, 2.571), (9, 2.306), (31, 2.042), (121, 1.980)],
)
def test_a_verdict_uses_students_quantile(units: int, expected: float) -> None:
    for factor, verdict in ((0.999, "no difference"), (1.001, "worse"), (-0.999, "no difference"), (-1.001, "better")):
        found = PairedDifference(factor * expected * 0.01, 0.01, 640, units, "documents")
        assert found.verdict == verdict
        assert found.margin == pytest.approx(expected * 0.01, rel=3e-4)


def test_the_best_of_several_baselines_must_be_missed_by_more() -> None:
    """Being the best is partly luck, which makes what is held against it look worse, never better."""
    worse = PairedDifference(0.0027, 0.001, 640, 31, "blocks", baselines=4)  # 2.657 standard errors are needed
    assert worse.verdict == "worse"
    near = replace(worse, mean=0.0026)
    assert (near.verdict, replace(near, baselines=1).verdict) == ("no difference", "worse")
    gain = replace(near, mean=-0.0021)
    assert gain.verdict == "better"
    # The best of several candidates is partly the luckiest too: three need 2.54 standard errors.
    assert [replace(gain, mean=mean).verdict_of_best(3) for mean in (-0.0025, -0.0026)] == ["no difference", "better"]
    assert near.verdict_of_best(3) == "no difference"


# By inverting the incomplete beta function in arithmetic of 30 digits (mpmath).
QUANTILES = {1: 12.7062047361747, 2: 4.30265272974946, 3: 3.18244630528371, 4: 2.77644510519779}
QUANTILES |= {8: 2.30600413520417, 30: 2.04227245630124, 1000: 1.96233908082641}
AT_ONE_PERCENT = (0.01, 4, 4.60409487134999)


@pytest.mark.parametrize(
    ("chance", "degrees", "expected"), [*((0.05, *row) for row in QUANTILES.items()), AT_ONE_PERCENT]
)
def test_students_quantile(chance: float, degrees: int, expected: float) -> None:
    assert students_quantile(chance, degrees) == pytest.approx(expected, rel=1e-12)


def test_students_quantile_refuses() -> None:
    for chance, degrees in ((0.0, 3), (1.0, 3), (0.05, 0)):
        with pytest.raises(InvalidParameterError, match="degrees at least 1"):
            students_quantile(chance, degrees)
