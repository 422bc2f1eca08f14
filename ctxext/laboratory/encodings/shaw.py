"""One learned vector per distance, which queries are multiplied with: the first relative encoding."""

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
class Shaw(EncodingMethod):
    """Add to each key a learned vector for its distance, instead of rotation.

    Pick it to see where relative encodings began: what a distance means depends on the query, and all tokens farther
    than ``clip`` are alike, so that nothing is out of range in longer texts. The cost: those far tokens cannot be
    told apart, and scores of near pairs are written out (of all pairs where texts are padded or packed). Of the
    paper's two parts this is the one for keys. The part for values is left out: the paper found that it changes little
    (table 3 there). The model needs training.

    Args:
        factor: target_length / trained_length. Dimensionless, at least 1. Says how far the model is meant to read;
            the vectors do not depend on it.
        clip: tokens from which all distances share one vector, at least 1.

    Source: Shaw et al., arXiv:1803.02155, section 3: vectors shared by heads, others in each layer. Authors' code:
        tensorflow/tensor2tensor@75b75f2, tensor2tensor/layers/common_attention.py, dot_product_attention_relative.
    """

    name = "shaw"
    summary = "queries times a learned vector per distance"
    source = "arXiv:1803.02155"
    shared = False
    form = "scores"

    clip: Annotated[int, Range(least=1, most=65536, of="tokens")] = 16

    def build(self, spec: EncodingSpec) -> Encoding:
        return _DistanceVectors(self.clip, spec.head_dim)


class _DistanceVectors(Encoding):
    def __init__(self, clip: int, head_dim: int) -> None:
        super().__init__()
        # Keys behind the query, for which the paper has vectors too, are not seen.
        self.weight = nn.Parameter(torch.empty(clip + 1, head_dim))
        nn.init.xavier_uniform_(self.weight)

    def score(self, pairs: Pairs) -> PairScore:
        return _ByQuery(pairs, self.weight)


class _ByQuery(PairScore):
    def __init__(self, pairs: Pairs, weight: Tensor) -> None:
        self.pairs, self.weights, self.floats = pairs, (weight,), 2 * pairs.q.shape[1] + 2
        self.far_from = len(weight) - 1

    def rows(self, queries: slice) -> Float[Tensor, "batch heads queries key"]:
        by_distance = self._by_distance(queries)
        distances = self.pairs.distances(queries).clamp(max=by_distance.shape[-1] - 1)
        return by_distance.gather(-1, distances[:, None].expand(*by_distance.shape[:3], -1))

    def above_far(self) -> Float[Tensor, "batch heads query distances"]:
        by_distance = self._by_distance(slice(None))
        return by_distance[..., :-1] - by_distance[..., -1:]

    def _by_distance(self, queries: slice) -> Float[Tensor, "batch heads queries distances"]:
        vectors = self.pairs.like_scores(self.weights[0])
        return self.pairs.q[:, :, queries].to(vectors.dtype) @ vectors.T * self.pairs.scale
