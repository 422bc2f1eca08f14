"""Self-Extend: distant tokens share positions in groups."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated

from ctxext.methods.parameters import MOST_TOKENS, Range, WholeTokens, require
from ctxext.methods.remap import Piece, PositionMap, RemapMethod, Sinks, Tokens, near_and_far, require_reach, tokens_of
from ctxext.spec import RopeSpec

# Default share of the trained window that is used. A model hardly knows the positions beyond: in training they were
# the rarest.
REACH = 7 / 8


@dataclass(frozen=True, kw_only=True)
class SelfExtend(RemapMethod):
    """Keep the positions of the nearest tokens; beyond a window, let groups of neighbouring tokens share one.

    Pick it first where you will not train: near distances, which matter most for prediction, stay as they are, far
    tokens keep their order from group to group, and texts of up to the trained length are computed as by the
    unextended model (bit for bit, with a cache too). The order inside a group is lost. Of other runtimes,
    vLLM with ctxext's plugin loads the result.

    Args:
        factor: target_length / trained_length. Dimensionless, at least 1.
        temperature: "none"; "logn" or "growing" (sharpen the attention of queries beyond the trained length); "yarn"
            (of all).
        window: distances below it are kept. Tokens, or below 1 a share of the trained length. A wide window helps to
            predict ordinary text.
        group: tokens that share a position, at least 1; None for the smallest that stays within ``reach``.
        reach: the largest relative position that is used, at most trained_length - 1. Tokens, or below 1 a share of
            the trained length; None for seven eighths of the trained length, or halfway from ``window`` to its end
            where that is more. The last positions of the trained window are the least trained, and retrieval fails
            there: a smaller reach takes a larger group. Only where ``group`` is left out.
        thinning: exponent by which a far token weighs less than a near one, group^-thinning, since a whole group of
            tokens shares a position at which the model has seen one token. From 0 (each token weighs 1, as in the
            authors' code) to 1 (a whole group weighs 1). More thinning helps to predict ordinary text, the more the
            longer a text is; less helps to find single facts far back. None for a compromise that was measured: 0 up
            to factor 2, 0.5 from factor 4 on, and in between in proportion to the factor's logarithm.
        sinks: number of first tokens of a text that are not thinned, at least 0: a model rests surplus attention on
            those (Xiao et al., arXiv:2309.17453).
        exact: True if queries inside the trained window keep all distances, so that texts of up to the trained length
            are computed as by the unextended model, bit for bit; else only texts of ``window`` tokens are. The
            authors' code has no such option.

    Source: Jin et al., arXiv:2401.01325, section 3. Authors' code: datamllab/LongLM@cdbbb06,
        self_extend_patch/Llama_4_40.py. There the rule (L - W) G + W >= N reaches relative position L, one more than
        was trained; and its flash form divides W by G without rounding where its decoding rounds. Here positions stay
        below L and W / G is rounded down.
    """

    name = "self_extend"
    summary = "keep near positions, far tokens share positions in groups"
    source = "arXiv:2401.01325"

    window: Annotated[float, Tokens] = 0.5
    group: Annotated[int | None, WholeTokens] = None
    reach: Annotated[float | None, Tokens] = None
    thinning: Annotated[float | None, Range(least=0, most=1)] = None
    sinks: Annotated[int, Range(least=0, most=MOST_TOKENS, of="tokens")] = 4
    exact: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.group is None or self.reach is None, "reach", self.reach, "left out where group is given")

    def pieces(self, rope: RopeSpec, length: int) -> tuple[Piece, ...]:
        most = rope.trained_length - 1
        window = tokens_of("window", self.window, rope, most=most)
        usual = most if self.group else max(int(REACH * rope.trained_length), (window + rope.trained_length) // 2)
        reach = usual if self.reach is None else tokens_of("reach", self.reach, rope, most=most)
        require(reach >= window, "reach", self.reach, f"at least window={window}: near tokens keep their positions")
        group = self.group or smallest_group(length, window, reach)
        remedy = f"Take group={smallest_group(length, window, most)}."
        require_reach(self.name, length, longest_text(window, group, reach), remedy)
        offset = float(window - window // group)
        near, far = near_and_far(window, rope, exact=self.exact)
        query, key = PositionMap(group=group, offset=offset), PositionMap(group=group)
        thinning = usual_thinning(self.factor) if self.thinning is None else self.thinning
        if thinning == 0 or group == 1:
            return (Piece(region=near), Piece(region=far, query=query, key=key))
        first = Sinks(self.sinks, window, far.plain_before)
        whole = (Piece(region=first, query=query, key=key),) if self.sinks else ()
        rest = replace(far, skip=self.sinks)
        return (Piece(region=near), *whole, Piece(region=rest, query=query, key=key, weight=group**-thinning))


def usual_thinning(factor: float) -> float:
    """Return the default ``thinning``, measured on prediction and on retrieval: 0 at factor 2, 0.5 at factor 4."""
    return 0.5 * min(max(math.log2(factor) - 1, 0.0), 1.0)


def largest_relative_position(length: int, window: int, group: int) -> int:
    """Return the relative position of the first token of a text, seen from the last token."""
    return (length - 1) // group + window - window // group


def smallest_group(length: int, window: int, reach: int) -> int:
    """Return the smallest group that keeps relative positions of ``length`` tokens within ``reach``.

    The largest relative position falls as groups grow, except for rounding; so every size is tried, from the one at
    which it would fit without any rounding. One group of all tokens is at ``window``, within ``reach``.
    """
    least = max(1, -(-(length - 1 - window) // (reach - window + 1)))
    groups = range(least, length + 1)
    return next(group for group in groups if largest_relative_position(length, window, group) <= reach)


def longest_text(window: int, group: int, reach: int) -> int:
    """Return the length of the longest text whose relative positions all stay within ``reach``."""
    return (reach - window + window // group + 1) * group
