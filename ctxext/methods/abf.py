"""Adjusted base frequency."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

from ctxext.methods.base import RopeMethod
from ctxext.methods.formulas import Clip, clipped, index_that_turns, plain_inv_freq
from ctxext.methods.parameters import MOST_BASE, Range, require
from ctxext.spec import Frequencies, RopeSpec


@dataclass(frozen=True, kw_only=True)
class ABF(RopeMethod):
    """Raise the base, to a given value or to the one that suits the target length.

    Pick it when you will train on plenty of long text, as Code Llama (base 1e6) and Llama 3 (5e5) did: any runtime can
    load the result. The base chosen here turns the frequency that just completed one turn in the trained window into
    one that completes one turn in the target window.

    Args:
        factor: target_length / trained_length. Dimensionless, at least 1.
        base: the new ``rope_theta``, at least the model's own; None chooses it from ``factor``.
        clip: number of the slowest pairs that are slowed along half a wave of a cosine, the last to a stop, at least 2
            (arXiv:2602.05258); "auto" takes the pairs that turn less than once in the trained window, None takes none.

    Source: Xiong et al., arXiv:2309.16039, section 2.1 (no code published). The choice: Liu et al., arXiv:2310.05209,
        "critical base"; authors' statement: OpenLMLab/scaling-rope@eee27a0, README.md, theorem 3.
    """

    name = "abf"
    summary = "raise the base, then train on long text"
    source = "arXiv:2309.16039"
    later = ("clip",)

    base: Annotated[float | None, Range(above=1, most=MOST_BASE)] = None
    clip: Clip = None

    def frequencies(self, rope: RopeSpec, length: int) -> Frequencies:
        return Frequencies(clipped(rope, plain_inv_freq(rope, self._base_for(rope)), self.clip))

    def rope_parameters(self, rope: RopeSpec) -> dict[str, Any]:
        if self.clip is not None:
            return self.as_longrope(rope)
        return {"rope_type": "default", "rope_theta": self._base_for(rope)}

    def _base_for(self, rope: RopeSpec) -> float:
        if self.base is not None:
            require(self.base >= rope.base, "base", self.base, f"at least the model's own ({rope.base})")
            return self.base
        turns = rope.trained_length / (2 * math.pi)
        require(turns > 1, "trained_length", rope.trained_length, "above 2 pi, or base be given")
        if rope.inv_freq is not None:
            index = index_that_turns(rope, 1.0)
            require(
                index > 0, "trained_length", rope.trained_length, "more than a turn of the first pair, or base given"
            )
            first, grown, power = rope.base, self.factor, rope.rotary_dim / (2 * index)
        else:
            first, grown, power = 1.0, rope.base, math.log(turns * self.factor) / math.log(turns)
        is_base = math.log(first) + power * math.log(grown) <= math.log(MOST_BASE)
        require(is_base, "factor", self.factor, f"smaller, or base be given: one of at most {MOST_BASE:g}")
        return float(first * grown**power)
