"""Differences of two models' losses on the same tokens, with standard errors that mean something."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ctxext.errors import InvalidParameterError

__all__ = [
    "BLOCK",
    "CHANCE",
    "CURVE",
    "ENOUGH_DOCUMENTS",
    "Bucket",
    "PairedDifference",
    "block_for",
    "bucketed",
    "difference_columns",
    "document_difference",
    "edges_for",
    "grouped_difference",
    "paired_difference",
    "students_quantile",
    "wilson_interval",
]

# Fewer documents than this say too little about how documents differ; blocks of their tokens stand in for them.
ENOUGH_DOCUMENTS = 5
BLOCK = 64


@dataclass(frozen=True)
class PairedDifference:
    """The mean of ``loss - baseline`` over the same tokens; below zero, the baseline is beaten.

    Args:
        mean: nats per token.
        standard_error: of the mean, nats per token.
        tokens: how many differences were averaged.
        units: how many groups of tokens counted as independent.
        over: what those groups are: ``documents``, ``blocks`` of consecutive tokens, or ``runs`` of windows. Only
            documents say something about other documents; see ``scope``.
        baselines: how many baselines were measured, where the one here is the best of them on these very tokens. The
            best of many is partly the luckiest, which makes whatever is held against it look worse and never better.
    """

    mean: float
    standard_error: float
    tokens: int
    units: int
    over: str = "blocks"
    baselines: int = 1

    def errors_needed(self, candidates: int = 1) -> float:
        """Standard errors that a difference must exceed to be a finding at 5 percent, two-sided: Student's quantile.

        With few units the standard error itself is uncertain, so that more are needed.

        Args:
            candidates: differences looked at; the chance is divided among them (Bonferroni).
        """
        return students_quantile(CHANCE / candidates, self.units - 1)

    @property
    def margin(self) -> float:
        """Half of the 95 percent interval, nats per token."""
        return self.errors_needed() * self.standard_error

    @property
    def verdict(self) -> str:
        """``better``, ``worse`` or ``no difference``, each wrong in 5 percent at most; see ``verdict_of_best``."""
        return self.verdict_of_best(1)

    def verdict_of_best(self, candidates: int) -> str:
        """The verdict where this difference is the lowest of several candidates'.

        The best of many is partly the luckiest: for ``better`` the 5 percent are divided among the candidates, and for
        ``worse`` among the baselines.

        Args:
            candidates: how many were held against the baseline.
        """
        if self.mean < -self.errors_needed(candidates) * self.standard_error:
            return "better"
        return "worse" if self.mean > self.errors_needed(self.baselines) * self.standard_error else "no difference"

    def scope(self, texts: int) -> str:
        """What a verdict is about: nothing is added for documents; else ``on this text`` or ``on these texts``.

        Args:
            texts: that the tokens are of.
        """
        return "" if self.over == "documents" else " on this text" if texts == 1 else " on these texts"

    def __str__(self) -> str:
        mean = f"{self.mean:+.3f}"
        return f"{mean[1:] if float(mean) == 0 else mean} ± {self.standard_error:.3f}"


def difference_columns(name: str, difference: PairedDifference | None) -> dict[str, float | None]:
    """The mean of a difference and its standard error for a row of a table, under ``name`` and ``name_se``."""
    if difference is None:
        return {name: None, f"{name}_se": None}
    return {name: difference.mean, f"{name}_se": difference.standard_error}


def paired_difference(
    losses: Float[Tensor, "batch positions"],
    baseline: Tensor,
    *,
    block: int | None = 64,
    baselines: int = 1,
) -> PairedDifference:
    """How much ``losses`` differ from ``baseline`` on the same tokens, with a standard error.

    Pairing removes what dominates a perplexity, the difficulty of the text. Neighbouring differences are correlated,
    so tokens are grouped and only the groups count as independent: blocks of consecutive tokens within a text, or,
    with enough of them, whole texts. The mean weighs every token the same; the standard error is the
    sandwich (cluster) estimate for that mean.

    Args:
        losses: nats per token.
        baseline: nats per token, of the same tokens: the same shape.
        block: tokens per group; a last, shorter group counts by its tokens. None: each row is one group.
        baselines: see ``PairedDifference``.

    Raises:
        InvalidParameterError: different shapes, or fewer than two groups.
    """
    if losses.shape != baseline.shape:
        raise InvalidParameterError(
            f"A paired difference needs the same tokens: found losses {list(losses.shape)} and baseline "
            f"{list(baseline.shape)}."
        )
    if block is not None and block < 1:
        raise InvalidParameterError(f"block must be at least 1 token, found {block}.")
    groups = [
        [row for part in torch.split(side, block or max(1, side.shape[1]), dim=1) for row in part]
        for side in (losses, baseline)
    ]
    return grouped_difference(*groups, over="documents" if block is None else "blocks", baselines=baselines)


def document_difference(
    losses: Sequence[Tensor], baseline: Sequence[Tensor], *, block: int = BLOCK, baselines: int = 1
) -> PairedDifference:
    """``paired_difference`` of documents of any lengths: over documents, or over blocks where they are fewer than 5.

    Args:
        losses: nats per token, [tokens], one tensor per document.
        baseline: of the same tokens.
        block: tokens per group, where blocks are the groups; halved until there are at least 8 of them.
        baselines: see ``PairedDifference``.

    Raises:
        InvalidParameterError: different tokens, or fewer than two.
    """
    if len(losses) >= ENOUGH_DOCUMENTS:
        return grouped_difference(losses, baseline, over="documents", baselines=baselines)
    while block > 1 and sum(-(-len(part) // block) for part in losses) < 8:
        block //= 2
    sides = [[group for part in side for group in torch.split(part, block)] for side in (losses, baseline)]
    return grouped_difference(*sides, over="blocks", baselines=baselines)


def grouped_difference(
    losses: Sequence[Tensor], baseline: Sequence[Tensor], *, over: str, baselines: int = 1
) -> PairedDifference:
    """``paired_difference`` where each tensor, [tokens], is a group that counts as independent.

    Args:
        losses: nats per token, by group.
        baseline: of the same tokens.
        over: what the groups are, to show.
        baselines: see ``PairedDifference``.

    Raises:
        InvalidParameterError: different tokens, or fewer than two groups.
    """
    shapes = [[len(part) for part in side] for side in (losses, baseline)]
    if shapes[0] != shapes[1]:
        raise InvalidParameterError(f"A paired difference needs the same tokens: found {shapes[0]} and {shapes[1]}.")
    sizes = [len(part) for part in losses if len(part)]
    units, tokens = len(sizes), sum(sizes)
    if units < 2:
        raise InvalidParameterError(
            f"A standard error needs at least two groups of tokens; these {tokens} losses are {units} of the {over}. "
            f"Give smaller blocks or more text."
        )
    difference = torch.cat(list(losses)).double() - torch.cat(list(baseline)).double()
    # The mean of all tokens; its standard error takes groups as clusters, of which only sums and counts are needed.
    total = torch.stack([group.sum() for group in torch.split(difference, sizes)])
    size = torch.tensor(sizes, dtype=torch.float64)
    mean = total.sum() / size.sum()
    scatter = (total - size * mean).square().sum() * units / (units - 1)
    return PairedDifference(mean.item(), (scatter.sqrt() / size.sum()).item(), tokens, units, over, baselines)


# How often a difference may be called a finding where there is none.
CHANCE = 0.05


@functools.lru_cache(maxsize=1024)
def students_quantile(chance: float, degrees: int) -> float:
    """The t that Student's distribution exceeds, to either side, with probability ``chance``.

    Args:
        chance: two-sided, above 0 and below 1.
        degrees: of freedom, at least 1: the number of independent units minus one.

    Raises:
        InvalidParameterError: an argument out of range.

    Source: the finite sums for whole degrees of freedom, Abramowitz & Stegun, 26.7.3 and 26.7.4, inverted by bisection
        over the angle, to machine precision.
    """
    if not 0 < chance < 1 or degrees < 1:
        raise InvalidParameterError(
            f"chance must be between 0 and 1 and degrees at least 1, found {chance}, {degrees}."
        )
    low, high = 0.0, math.pi / 2
    while True:
        middle = (low + high) / 2
        if middle in (low, high):
            return math.tan(middle) * math.sqrt(degrees)
        if _within(middle, degrees) < 1 - chance:
            low = middle
        else:
            high = middle


def _within(angle: float, degrees: int) -> float:
    """The probability that |t| is below ``tan(angle) * sqrt(degrees)``."""
    sine, square = math.sin(angle), math.cos(angle) ** 2
    odd = degrees % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for k in range(1 + odd, degrees, 2):
        total += term
        term *= square * k / (k + 1)
        if term < 1e-18 * total:
            break
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def wilson_interval(mean: float, trials: int, *, z: float = 1.96) -> tuple[float, float]:
    """Bounds of the true mean of outcomes from 0 to 1, after ``trials`` of them with this mean.

    For yes-or-no outcomes it is Wilson's score interval, which keeps its promise for few trials and at 0 and 1, where
    the textbook interval has no width. Outcomes in between vary less, so that for them it is wider than needed.

    Args:
        mean: of the outcomes seen, from 0 to 1.
        trials: at least 1.
        z: standard deviations of the normal distribution; 1.96 covers 95 percent.

    Raises:
        InvalidParameterError: an argument out of range.

    Source: Wilson, Journal of the American Statistical Association 22 (1927), 209-212.
    """
    if trials < 1 or not 0 <= mean <= 1:
        raise InvalidParameterError(
            f"An interval needs at least 1 trial and a mean from 0 to 1, found {trials} and {mean}."
        )
    weight = z**2 / trials
    centre = (mean + weight / 2) / (1 + weight)
    reach = z / (1 + weight) * math.sqrt(mean * (1 - mean) / trials + weight / (4 * trials))
    return max(0.0, centre - reach), min(1.0, centre + reach)


@dataclass(frozen=True)
class Bucket:
    """The mean loss over the positions ``start <= i < stop``.

    Args:
        start: first position, in tokens.
        stop: one past the last position.
        tokens: how many losses were averaged, over all documents.
        loss: nats per token, every token weighing the same.
    """

    start: int
    stop: int
    tokens: int
    loss: float

    @property
    def perplexity(self) -> float:
        """``exp(loss)``, dimensionless."""
        return math.exp(self.loss)


def bucketed(losses: Float[Tensor, "batch positions"], edges: Sequence[int]) -> tuple[Bucket, ...]:
    """Mean losses between consecutive ``edges``, over all rows.

    Args:
        losses: nats per token, column ``i`` being position ``i``.
        edges: positions, increasing, from 0 or more up to at most the number of columns; at least 2.

    Raises:
        InvalidParameterError: edges that do not increase or do not fit the losses.
    """
    if len(edges) < 2 or edges[0] < 0 or edges[-1] > losses.shape[1] or sorted(set(edges)) != list(edges):
        raise InvalidParameterError(
            f"edges must increase within 0..{losses.shape[1]}, the positions measured; found {list(edges)}."
        )
    spans = [(start, stop, losses[:, start:stop].double()) for start, stop in itertools.pairwise(edges)]
    return tuple(Bucket(start, stop, span.numel(), span.mean().item()) for start, stop, span in spans)


IN_WINDOW, BEYOND, CURVE = 1, 4, 16


# Fewer texts than this say too little about the spread between texts; blocks within them then count.
MANY_DOCUMENTS = 8


def edges_for(trained_length: int, length: int, *, inside: int = IN_WINDOW, beyond: int = BEYOND) -> tuple[int, ...]:
    """Bucket edges: ``inside`` equal buckets up to the trained length, ``beyond`` equal ones from there to ``length``.

    Raises:
        InvalidParameterError: if there are not enough positions for the buckets.
    """
    if trained_length < inside or length - trained_length < beyond:
        raise InvalidParameterError(
            f"length={length} leaves too little beyond the trained length of {trained_length} tokens for {beyond} "
            f"buckets; ask for more."
        )
    window = [trained_length * i // inside for i in range(inside)]
    return (*window, *(trained_length + (length - trained_length) * i // beyond for i in range(beyond + 1)))


def block_for(documents: int, positions: int) -> int | None:
    """What counts as independent in a paired difference: with many texts each text (None), else blocks of tokens.

    Args:
        documents: how many texts.
        positions: losses of each; blocks are no longer than a quarter of them, so that a short text has an error too.
    """
    return None if documents >= MANY_DOCUMENTS else max(1, min(BLOCK, positions // 4))
