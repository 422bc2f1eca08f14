"""Differences of two models' losses on the same tokens, with standard errors that mean something."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from ctxext.errors import IncompatibleError, InvalidParameterError

# Fewer documents than this say too little about how documents differ; then blocks of their tokens are compared.
ENOUGH_DOCUMENTS = 5
# Blocks of consecutive tokens: at most MOST_BLOCKS, of BLOCK tokens or more where there are enough of them for
# LEAST_BLOCKS. Few long blocks are hardly correlated, and more than some fifteen would hardly narrow the interval.
BLOCK, LEAST_BLOCKS, MOST_BLOCKS = 256, 8, 16


@dataclass(frozen=True)
class PairedDifference:
    """The mean of ``loss - baseline`` over the same tokens; below zero, the baseline is beaten.

    Args:
        mean: Nats per token. Over documents each of them weighs the same, so that a long one does not decide alone;
            over blocks every token does.
        standard_error: Standard error of the mean, nats per token.
        units: Number of groups of tokens that counted as independent.
        over: Kind of those groups: ``documents``, or ``blocks`` of consecutive tokens. Only documents say something
            about other documents; see ``scope``.
        baselines: Number of baselines that the best on these very tokens was chosen from. The best of many is partly
            the luckiest, so that readings compared with it look worse, and never better, than they are.
    """

    mean: float
    standard_error: float
    tokens: int
    units: int
    over: str = "blocks"
    baselines: int = 1

    def errors_needed(self, candidates: int = 1) -> float:
        """Return how many standard errors a finding at 5 percent (two-sided, Student's quantile) must exceed.

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
        """``better``, ``worse`` or ``no difference``, each wrong in 5 percent at most if ``scope`` holds."""
        return self.verdict_of_best(1)

    def verdict_of_best(self, candidates: int) -> str:
        """Return the verdict if this difference is the lowest of several candidates'.

        The best of many is partly the luckiest: for ``better`` the 5 percent are divided among the candidates, and for
        ``worse`` among the baselines.
        """
        if self.mean < -self.errors_needed(candidates) * self.standard_error:
            return "better"
        return "worse" if self.mean > self.errors_needed(self.baselines) * self.standard_error else "no difference"

    def scope(self, texts: int) -> str:
        """Say what a verdict is about: ``on this text``, ``on these texts``, or of documents the effects it holds for.

        Where exponential effects cancel, 11 percent of verdicts over five documents are ``better``, and 8 over twenty.
        No correction for skewness holds with so few (docs/evidence/verdicts.md).
        """
        skewed = ", if effects are not strongly skewed"
        return skewed if self.over == "documents" else " on this text" if texts == 1 else " on these texts"

    def answer(self, texts: int, *, candidates: int = 1, per: str = "token") -> str:
        """Say in words whether the baseline is beaten, such as ``yes on this text: -0.100 ± 0.010 nats per token``.

        Args:
            texts: Number of texts that were read.
            candidates: Number of candidates that this one is the best of.
            per: Name of the tokens that were counted.
        """
        verdict = self.verdict_of_best(candidates)
        answer = {"better": "yes", "worse": "no", "no difference": "not measurably"}[verdict]
        return f"{answer}{self.scope(texts)}: {self} nats per {per} (over {self.units} {self.over})."

    def __str__(self) -> str:
        mean = f"{self.mean:+.3f}"
        return f"{mean[1:] if float(mean) == 0 else mean} ± {self.standard_error:.3f}"


def mean_loss(losses: Sequence[Tensor]) -> float:
    """Average losses as ``document_difference`` does: each document weighs the same if there are enough.

    Args:
        losses: nats per token, [tokens], one tensor per document. Documents without tokens do not count.
    """
    counted = [part.double() for part in losses if part.numel()]
    if len(counted) >= ENOUGH_DOCUMENTS:
        return torch.stack([part.mean() for part in counted]).mean().item()
    return torch.cat([part.flatten() for part in counted]).mean().item()


def document_difference(
    losses: Sequence[Tensor], baseline: Sequence[Tensor], *, baselines: int = 1
) -> PairedDifference:
    """Compare ``losses`` with ``baseline`` on the same tokens of several documents, with a standard error.

    Pairing removes what dominates a perplexity, the difficulty of the text. With five documents or more, each of them
    weighs the same, whatever its length, and only documents count as independent: see ``grouped_difference``. Fewer
    say too little about others, so the difference is then about these texts, over blocks of them: see
    ``block_difference``.

    Args:
        losses: nats per token, [tokens], one tensor per document; the rows of a matrix will do. Documents without
            tokens do not count.

    Raises:
        InvalidParameterError: different tokens, or fewer than two.
        IncompatibleError: a loss is NaN or infinite.
    """
    _check_same_tokens(losses, baseline)
    kept = [(document, other) for document, other in zip(losses, baseline, strict=True) if len(document)]
    sides = [document for document, _ in kept], [other for _, other in kept]
    if len(kept) >= ENOUGH_DOCUMENTS:
        return grouped_difference(*sides, over="documents", baselines=baselines)
    return block_difference(*sides, baselines=baselines)


def block_difference(
    losses: Sequence[Tensor], baseline: Sequence[Tensor], *, most: int = MOST_BLOCKS, baselines: int = 1
) -> PairedDifference:
    """Compare ``losses`` with ``baseline`` on these very texts, every token weighing the same.

    Neighbouring tokens are correlated, so the texts are joined and cut into a few long blocks of equal length, and only
    blocks count as independent ("batch means"): at most ``most``, of 256 tokens or more where eight such can be made.
    A correlation over much more than a tenth of a block makes the standard error too small.

    Args:
        losses: nats per token, [tokens], one tensor per document.

    Raises:
        InvalidParameterError: different tokens, or fewer than two.
        IncompatibleError: a loss is NaN or infinite.

    Source: Schmeiser, Operations Research 30 (1982), 556-568: with ten to thirty batches, more hardly help.
    """
    _check_same_tokens(losses, baseline)
    joined = [torch.cat([part.flatten().double() for part in side]) for side in (losses, baseline) if side]
    tokens = len(joined[0]) if joined else 0
    if tokens < 2:
        raise InvalidParameterError(
            f"A standard error needs at least two tokens, found {tokens}. Give more or longer texts."
        )
    blocks = min(tokens, max(LEAST_BLOCKS, min(most, tokens // BLOCK)))
    sides = [torch.tensor_split(side, blocks) for side in joined]
    difference = grouped_difference(*sides, over="blocks", baselines=baselines)
    # Blocks differ by a token where their number does not divide the tokens; so the mean is taken over all tokens.
    return replace(difference, mean=(joined[0] - joined[1]).mean().item())


def grouped_difference(
    losses: Sequence[Tensor], baseline: Sequence[Tensor], *, over: str, baselines: int = 1
) -> PairedDifference:
    """Compare ``losses`` with ``baseline`` where each tensor, [tokens], is a nonempty group that counts as independent.

    Each group gives one number, its mean difference, and these are held to Student's distribution: the mean of them,
    and their standard deviation over the square root of how many there are. Every group weighs the same, because that
    keeps the 5 percent of a verdict whatever the groups' sizes are, unless effects are strongly skewed: for normal
    means of *any* variances Student's test is exact or conservative at 5 percent. Weighing groups by their tokens, with
    a sandwich (cluster) estimate, is wrong in up to 70 percent where one group holds most tokens; corrected for that
    (CR2 with Satterthwaite's degrees of freedom) it keeps 6 percent and finds half as much.

    Raises:
        InvalidParameterError: different tokens, or fewer than two groups.
        IncompatibleError: a loss is NaN or infinite.

    Source: Bakirov & Szekely, Journal of Mathematical Sciences 139 (2006), 6497-6505; Ibragimov & Mueller, Journal of
        Business & Economic Statistics 28 (2010), 453-468. Compared with Bell & McCaffrey, Survey Methodology 28 (2002),
        169-181, and Pustejovsky & Tipton, Journal of Business & Economic Statistics 36 (2018), 672-683.
    """
    _check_same_tokens(losses, baseline)
    pairs, units = zip(losses, baseline, strict=True), len(losses)
    if units < 2:
        raise InvalidParameterError(
            f"A standard error needs at least two groups of tokens; found {units} of the {over}. Give more texts."
        )
    means = torch.stack([group.mean(dtype=torch.float64) - other.mean(dtype=torch.float64) for group, other in pairs])
    check_finite(means, f"among {units} {over} that are compared")
    error = means.std().item() / math.sqrt(units)
    return PairedDifference(means.mean().item(), error, sum(map(len, losses)), units, over, baselines)


def check_finite(losses: Tensor, where: str) -> None:
    """Raise ``IncompatibleError`` where a loss is NaN or infinite."""
    if not losses.isfinite().all():
        raise IncompatibleError(
            f"The model returned NaN or infinite losses: {where}. Measure in another --dtype (fp32 has the range), "
            f"or leave this method out."
        )


def _check_same_tokens(losses: Sequence[Tensor], baseline: Sequence[Tensor]) -> None:
    shapes = [[len(part) for part in side] for side in (losses, baseline)]
    if shapes[0] != shapes[1]:
        raise InvalidParameterError(f"A paired difference needs the same tokens: found {shapes[0]} and {shapes[1]}.")


# How often a difference may be called a finding where there is none.
CHANCE = 0.05


@functools.lru_cache(maxsize=1024)
def students_quantile(chance: float, degrees: int) -> float:
    """Return Student's two-sided critical value of t for probability ``chance``.

    Args:
        chance: two-sided, above 0 and below 1.
        degrees: Degrees of freedom, at least 1: the number of independent units minus one.

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
    """Return the probability that |t| is below ``tan(angle) * sqrt(degrees)``."""
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


def wilson_interval(mean: float, trials: int) -> tuple[float, float]:
    """Return 95 percent bounds of the true mean of outcomes from 0 to 1, after ``trials`` of them with this mean.

    For yes-or-no outcomes it is Wilson's score interval, which keeps its promise for few trials and at 0 and 1, where
    the textbook interval has no width. Outcomes in between vary less, so that for them it is wider than needed.

    Args:
        mean: Mean of the outcomes, from 0 to 1.

    Raises:
        InvalidParameterError: an argument out of range.

    Source: Wilson, Journal of the American Statistical Association 22 (1927), 209-212.
    """
    if trials < 1 or not 0 <= mean <= 1:
        raise InvalidParameterError(
            f"An interval needs at least 1 trial and a mean from 0 to 1, found {trials} and {mean}."
        )
    z = 1.96  # standard deviations that hold 95 percent of a normal distribution
    weight = z**2 / trials
    centre = (mean + weight / 2) / (1 + weight)
    reach = z / (1 + weight) * math.sqrt(mean * (1 - mean) / trials + weight / (4 * trials))
    return max(0.0, centre - reach), min(1.0, centre + reach)


def perplexity(loss: float) -> float:
    """Return ``exp(loss)`` of nats per token, dimensionless; infinity where no float holds it."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


@dataclass(frozen=True)
class Bucket:
    """The mean loss over the positions ``start <= i < stop``.

    Args:
        tokens: Number of losses that were averaged, over all documents.
        loss: Nats per token, every token weighing the same.
    """

    start: int
    stop: int
    tokens: int
    loss: float

    @property
    def perplexity(self) -> float:
        """``exp(loss)``, dimensionless."""
        return perplexity(self.loss)


def bucketed(losses: Float[Tensor, "batch positions"], edges: Sequence[int]) -> tuple[Bucket, ...]:
    """Mean losses between consecutive ``edges``, over all rows.

    Args:
        losses: nats per token, column ``i`` being position ``i``.
        edges: positions, increasing, from 0 or more up to at most the number of columns; at least 2.
    """
    spans = [(start, stop, losses[:, start:stop].double()) for start, stop in itertools.pairwise(edges)]
    return tuple(Bucket(start, stop, span.numel(), span.mean().item()) for start, stop, span in spans)


IN_WINDOW, BEYOND, CURVE = 1, 4, 16


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
