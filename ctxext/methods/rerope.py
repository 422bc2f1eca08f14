"""ReRoPE: beyond a window, all tokens have the same relative position, or nearly so."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from ctxext.methods.parameters import Range
from ctxext.methods.remap import Piece, PositionMap, RemapMethod, Tokens, near_and_far, require_reach, tokens_of
from ctxext.spec import RopeSpec


@dataclass(frozen=True, kw_only=True)
class ReRoPE(RemapMethod):
    """Keep the positions of the nearest tokens, and put all other tokens at one relative position, or nearly so.

    Pick it where a text may grow without limit, or where nothing at all may change inside the trained window: by
    default it is the model itself for texts up to the trained length. The order of all tokens beyond the window is
    lost; a ``leak`` keeps that order.

    Args:
        factor: target_length / trained_length. Dimensionless, at least 1. Without a leak it only says how far the
            model is meant to read.
        temperature: "none"; "logn" or "growing" (sharpen the attention of queries beyond the trained length); "yarn"
            (of all). The authors use "logn".
        window: distances below it are kept. Tokens, below 1 a share of the trained length, or None for
            trained_length - 1.
        leak: relative positions that each token beyond the window adds: 0 is ReRoPE, a number above 0 and below 1 Leaky
            ReRoPE (1 / k there).
        exact: True if queries inside the trained window keep all distances, so that texts of up to the trained length
            are computed as by the unextended model, bit for bit; else only texts of ``window`` tokens are. The
            authors' code has no such option.

    Source: Su, kexue.fm/9708. Author's code: bojone/rerope@acfe788, rerope_patch.py and leaky_rerope_patch.py.
    """

    name = "rerope"
    summary = "keep near positions, put all far tokens at one distance"
    source = "kexue.fm/9708"

    window: Annotated[float | None, Tokens] = None
    leak: Annotated[float, Range(least=0, below=1)] = 0.0
    exact: bool = True

    def pieces(self, rope: RopeSpec, length: int) -> tuple[Piece, ...]:
        most = rope.trained_length - 1
        window = most if self.window is None else tokens_of("window", self.window, rope, most=most)
        if self.leak:
            longest = window + math.floor((most - window) / self.leak + 1e-9) + 1
            largest = max(most - window, 0) / max(length - 1 - window, 1)
            require_reach(self.name, length, longest, f"Take a smaller window, or a leak of at most {largest:.6g}.")
        query = PositionMap(scale=self.leak, offset=window * (1 - self.leak))
        near, far = near_and_far(window, rope, exact=self.exact)
        return (Piece(region=near), Piece(region=far, query=query, key=PositionMap(scale=self.leak)))
