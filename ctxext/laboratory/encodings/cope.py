"""Positions that count what the query is looking for, not tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ctxext.laboratory.scores import PairScore
from ctxext.methods.encoding import Encoding, EncodingMethod, EncodingSpec, Pairs
from ctxext.methods.parameters import Range


@dataclass(frozen=True, kw_only=True)
class CoPE(EncodingMethod):
    """Let each query count the tokens that its gate opens for, from itself back to the key, as the key's position.

    Pick it for tasks in which distance is counted in words, sentences or items rather than tokens: the paper's models
    count, copy and find the last of something where rotation cannot. The cost: the score of a pair depends on all
    keys between the two, so scores are computed once more before attention, for some queries at a time, and no fused
    kernel can do it. Counts above ``places - 1`` are one. The model needs training.

    Args:
        factor: target_length / trained_length. Dimensionless, at least 1. Says how far the model is meant to read;
            the places do not depend on it.
        places: counts with a learned vector, from 0 on, at least 2; between two counts their vectors are mixed.

    Source: Golovneva et al., arXiv:2405.18719, section 4. Authors' code: facebookresearch/RAM@e6f051f,
        projects/cope/src/cope/context_position.py. Vectors begin at zero, shared by heads, others in each layer.
    """

    name = "cope"
    summary = "positions count the tokens that a query's gate opens for"
    source = "arXiv:2405.18719"
    shared = False
    form = "scores"

    places: Annotated[int, Range(least=2, most=65536)] = 64

    def build(self, spec: EncodingSpec) -> Encoding:
        return _Counts(self.places, spec.head_dim)


class _Counts(Encoding):
    def __init__(self, places: int, head_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(places, head_dim))

    def score(self, pairs: Pairs) -> PairScore:
        return _ByCount(pairs, self.weight)

    def seen(self, pairs: Pairs) -> tuple[str, Float[Tensor, "batch heads query key"]]:
        """Return the counts themselves, which are there before any place has learned its vector."""
        return "counted from the query back to the key", _ByCount(pairs, self.weight).counts(slice(None))


class _ByCount(PairScore):
    def __init__(self, pairs: Pairs, weight: Tensor) -> None:
        self.pairs, self.weights, self.floats = pairs, (weight,), 8 * pairs.q.shape[1]

    def counts(self, queries: slice) -> Float[Tensor, "batch heads queries key"]:
        """Count how far each query's gates were open from itself back to each key, the key's own included."""
        keys = self.pairs.k.to(self.pairs.dtype).repeat_interleave(self.pairs.q.shape[1] // self.pairs.k.shape[1], 1)
        asking = self.pairs.q[:, :, queries].to(keys.dtype)
        gates = torch.sigmoid(asking @ keys.transpose(-1, -2) * self.pairs.scale)
        gates = gates * self.pairs.visible(queries)[:, None]
        return gates.flip(-1).cumsum(-1).flip(-1).clamp(max=len(self.weights[0]) - 1)

    def rows(self, queries: slice) -> Float[Tensor, "batch heads queries key"]:
        vectors, counts = self.pairs.like_scores(self.weights[0]), self.counts(queries)
        by_place = self.pairs.q[:, :, queries].to(vectors.dtype) @ vectors.T * self.pairs.scale
        below = counts.detach().floor()
        share = counts - below
        low, high = (by_place.gather(-1, place.long()) for place in (below, counts.detach().ceil()))
        return low + share * (high - low)
