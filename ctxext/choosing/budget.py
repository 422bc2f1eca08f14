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


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs of a choice, in passes over the whole target, and the sizes that a budget lasts for.

    Args:
        choosing: texts to choose on that there are; ``held_out`` are those to judge on.
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

    def most(self, sizes: Sizes) -> float:
        """Return the cost of all rounds and the verdict, at most."""
        inside = self.judged * sizes.first * self.of(self.prefix)
        whole = (min(sizes.whole, self.judged + self.others - 1) + 1) * sizes.first
        more = (sizes.finalists + 1) * (sizes.texts - sizes.first + sizes.keys)
        tails = tails_cost(self.windows, start=self.end, positions=self.length, turning_point=self.turning_point)
        truncations = tails / pass_cost(self.length, self.turning_point)
        return inside + whole + more + sizes.held_out * (3 + self.of(self.trained) + truncations)

    def sizes(self, allowed: float | None, seconds: float | None = None) -> Sizes:
        """Return the largest sizes that a budget lasts for.

        Args:
            allowed: passes; None for no limit.
            seconds: that as many passes take here, for the message; None where nothing was timed.

        Raises:
            InvalidParameterError: not even the smallest sizes fit.
        """
        ladder = self._ladder()
        for sizes in ladder:
            if allowed is None or self.most(sizes) <= allowed:
                return sizes
        least = self.most(ladder[-1])
        time = "" if seconds is None else f", some {duration(seconds * least / allowed)} here"
        raise InvalidParameterError(
            f"The budget is too small: it comes to {allowed:.1f} passes over {self.length:,} tokens. Choosing among "
            f"{self.judged + self.others} candidates takes {least:.1f} at least{time}. Allow more (--budget), or "
            f"choose for a smaller target."
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
