"""The budget of a choice, in time or passes, and the largest sizes that it lasts for."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ctxext.choosing.halving import Sizes
from ctxext.errors import InvalidParameterError
from ctxext.measuring.forward import pass_cost
from ctxext.measuring.truncation import tails_cost
from ctxext.quantities import duration

# Tokens beyond the window that tell two candidates apart which differ by 0.02 nats.
ENOUGH = 4096
# Tokens at which attention costs as much as the rest where it seems to cost nothing.
ALL_LINEAR = 10**12
# From the largest sizes to the smallest: candidates that read whole texts, finalists, texts to choose on and to judge
# on (in multiples of what gives enough tokens), hidden keys. Texts of the verdict are given up last: one alone says
# nothing of others like it.
LADDER = (
    (10, 3, 3, 5, 3),
    (8, 3, 3, 5, 3),
    (8, 3, 2, 5, 2),
    (6, 3, 2, 5, 2),
    (5, 2, 2, 5, 1),
    (4, 2, 1, 5, 1),
    (3, 2, 1, 5, 1),
    (3, 2, 1, 3, 1),
    (3, 2, 1, 2, 1),
    (3, 2, 1, 1, 1),
    (2, 1, 1, 1, 0),
)

# Of a search: what one step costs in passes over its texts (measured: 2.9 on SmolLM2-135M); how many steps each start
# takes, at the most and at the least (20 steps from the trained frequencies still leave a model broken at the end of
# four windows); and how many times the texts of a first look are kept for accepting its result.
STEP_COST = 2.9
STEPS, FEWEST, STARTS, ACCEPTING = 60, 12, 2, 3


@dataclass(frozen=True, kw_only=True)
class SearchSizes:
    """Amounts that a search reads.

    Args:
        steps: from each start.
        accepting: texts on which its result must beat the choice of the rounds.
    """

    steps: int
    rows: int
    starts: int
    accepting: int


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs of a choice, in passes over the whole target, and the sizes that a budget lasts for.

    Args:
        choosing: texts to choose on that there are; ``held_out`` are those to judge on.
        accepting: texts kept for accepting the result of a search that there are; None for no search.
    """

    trained: int
    length: int
    judged: int
    others: int
    windows: tuple[int, ...]
    turning_point: int
    choosing: int
    held_out: int
    keys: bool
    accepting: int | None = None

    def of(self, tokens: int) -> float:
        """Return the cost of a pass over so many tokens."""
        return pass_cost(tokens, self.turning_point) / pass_cost(self.length, self.turning_point)

    @property
    def prefix(self) -> int:
        """Tokens of a text that the first round reads: a quarter of the target, inside the window."""
        return min(self.trained, self.length // 4)

    @property
    def stretches(self) -> int:
        """Number of texts that hold enough tokens beyond the window."""
        return math.ceil(ENOUGH / (self.length - self.trained))

    @property
    def end(self) -> int:
        """Start of the end of a text, at which truncation is measured: a quarter of the window, beyond it."""
        return max(self.trained, self.length - max(1, self.trained // 4))

    def timed(self, inside: float, whole: float) -> Costs:
        """Return the costs by the clock: attention may be slower beside the rest than its operations say.

        Args:
            inside: seconds of a pass over what the first round reads of a text.
        """
        # inside / whole = short (1 + short / t) / (length (1 + length / t)), solved for the turning point t.
        short, length, ratio = self.prefix, self.length, inside / whole
        linear, quadratic = short - ratio * length, ratio * length**2 - short**2
        if linear <= 0:  # dearer than a share of the tokens: all linear, and calls cost something
            return replace(self, turning_point=ALL_LINEAR)
        return replace(self, turning_point=max(1, round(quadratic / linear)))

    def most(self, sizes: Sizes, search: SearchSizes | None = None) -> float:
        """Return the cost of all rounds, a search and the verdict, at most."""
        inside = self.judged * sizes.first * self.of(self.prefix)
        whole = (min(sizes.whole, self.judged + self.others - 1) + 1) * sizes.first
        more = (sizes.finalists + 1) * (sizes.texts - sizes.first + sizes.keys)
        tails = tails_cost(self.windows, start=self.end, positions=self.length, turning_point=self.turning_point)
        truncations = tails / pass_cost(self.length, self.turning_point)
        total = inside + whole + more + sizes.held_out * (3 + self.of(self.trained) + truncations)
        if search is not None:
            key = self.of(self.trained) if sizes.keys else 0.0
            total += search.starts * (search.steps * search.rows * STEP_COST + sizes.first)
            total += key + 3 * search.accepting + sizes.keys
        return total

    def sizes(self, allowed: float | None, seconds: float | None = None) -> tuple[Sizes, SearchSizes | None]:
        """Return the largest sizes that a budget lasts for; a search gets half of it, or as much as it can use.

        Args:
            allowed: passes; None for no limit.
            seconds: that as many passes take here, for the message; None where nothing was timed.

        Raises:
            InvalidParameterError: not even the smallest sizes, with the shortest search, fit.
        """
        ladder, least = self._ladder(), self._search(FEWEST)
        longest = self._search(STEPS)
        if allowed is None:
            return ladder[0], longest
        # The rounds get as much as the longest search leaves, or half; but no less than the smallest sizes need.
        for_search = self.most(ladder[0], longest) - self.most(ladder[0])
        for_rounds = max(allowed - for_search, allowed / 2, self.most(ladder[-1]))
        for sizes in ladder:
            search = self._search(self._steps(allowed, sizes))
            fits = self.most(sizes) <= allowed if search is None else search.steps >= FEWEST
            if fits and (self.most(sizes) <= for_rounds or sizes == ladder[-1]):
                return sizes, search
        steps = "" if least is None else f" and {FEWEST} steps of a search from each of {STARTS} starts"
        way = "for a smaller target" if least is None else "without --search"
        least_passes = self.most(ladder[-1], least)
        time = "" if seconds is None else f", some {duration(seconds * least_passes / allowed)} here"
        raise InvalidParameterError(
            f"The budget is too small: it comes to {allowed:.1f} passes over {self.length:,} tokens. Choosing among "
            f"{self.judged + self.others} candidates{steps} takes {least_passes:.1f} at least{time}. Allow more "
            f"(--budget), or choose {way}."
        )

    def _ladder(self) -> list[Sizes]:
        """Return all sizes, from the largest to the smallest."""
        first = self.stretches
        start = min(first, self.choosing)
        return [
            Sizes(
                whole=whole,
                finalists=finalists,
                texts=min(max(start, texts * first), self.choosing),
                first=start,
                held_out=min(judged * first, self.held_out),
                keys=keys if self.keys else 0,
            )
            for whole, finalists, texts, judged, keys in LADDER
        ]

    def _search(self, steps: int) -> SearchSizes | None:
        if self.accepting is None:
            return None
        rows = self.stretches
        return SearchSizes(steps=steps, rows=rows, starts=STARTS, accepting=min(ACCEPTING * rows, self.accepting))

    def _steps(self, allowed: float, sizes: Sizes) -> int:
        """Return the steps of a search that the rounds leave of a budget."""
        without, with_one = (self.most(sizes, self._search(steps)) for steps in (0, 1))
        return min(STEPS, int((allowed - without) / (with_one - without))) if with_one > without else 0
