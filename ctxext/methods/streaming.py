"""StreamingLLM: the first tokens and the nearest ones, and nothing between."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ctxext.methods.parameters import WholeTokens, require
from ctxext.methods.remap import Piece, PositionMap, RemapMethod, Sinks, Tokens, near_and_far, tokens_of
from ctxext.spec import RopeSpec


@dataclass(frozen=True, kw_only=True)
class Streaming(RemapMethod):
    """See the nearest tokens and the first few of the text, and nothing between them.

    Pick it to let a model generate without end at a constant cost for each token, where the distant past does not
    matter: the model sees no further than before, so this is the baseline that every extension has to beat. The first
    tokens stay because models rest surplus attention on them. Texts of up to ``window`` tokens are computed exactly as
    by the unextended model. A dynamic cache holds only the tokens in sight.

    Args:
        factor: target_length / trained_length. Dimensionless, at least 1. Only says how far the model is meant to read.
        temperature: "none"; "logn" or "growing" (sharpen the attention of queries beyond the trained length); "yarn"
            (of all).
        sinks: tokens at the beginning of the text that stay in sight, from 1 to trained_length - 1.
        window: the nearest tokens, up to trained_length - ``sinks``, which None means. Tokens, or below 1 a share of
            the trained length.
        exact: True if queries inside the trained window see all tokens, so that texts of up to the trained length are
            read as by the unextended model; else only texts of ``window`` tokens are. The authors' code has no such
            option.

    Source: Xiao et al., arXiv:2309.17453, section 3.2. Authors' code: mit-han-lab/streaming-llm@2e50426,
        streaming_llm/kv_cache.py. As there, positions are counted among the tokens in sight.
    """

    name = "streaming"
    summary = "see the first tokens and the nearest ones only"
    source = "arXiv:2309.17453"

    sinks: Annotated[int, WholeTokens] = 4
    window: Annotated[float | None, Tokens] = None
    exact: bool = False

    def pieces(self, rope: RopeSpec, length: int) -> tuple[Piece, ...]:
        most = rope.trained_length - self.sinks
        require(most >= 1, "sinks", self.sinks, f"below the trained length of {rope.trained_length} tokens")
        window = most if self.window is None else tokens_of("window", self.window, rope, most=most)
        at = PositionMap(scale=0.0, offset=float(self.sinks + window - 1))
        near, _ = near_and_far(window, rope, exact=self.exact)
        first = Sinks(self.sinks, window, near.plain_before)
        return (Piece(region=near), Piece(region=first, query=at))
