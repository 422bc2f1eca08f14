"""A small learned function of the distance, measured against how far the text has gone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ctxext.laboratory.scores import PairScore
from ctxext.methods.encoding import Encoding, EncodingMethod, EncodingSpec, Pairs
from ctxext.methods.parameters import MOST_TOKENS, Range


@dataclass(frozen=True, kw_only=True)
class FIRE(EncodingMethod):
    """Add a learned function of ``distance / position of the query``, both on a logarithmic scale, to each score.

    Pick it to train a model on short texts and read long ones where cost matters less than quality: whatever the length
    of a text, the function is asked between 0 and 1 only, so no distance is out of its range, and in the paper it reads
    beyond its training better than T5, KERPLE, ALiBi and rotation. The cost: a small network runs for every pair of
    tokens of every layer, some queries at a time, which makes it the slowest of the encodings by position. The model
    needs training.

    Args:
        factor: target_length / trained_length. Dimensionless, at least 1. Says how far the model is meant to read;
            the function does not depend on it.
        width: hidden units of the function's network, at least 1.
        threshold: tokens that a query's position counts for at least, so that short texts are told apart; multiplied by
            a learned number that begins at 1. At least 1; 0 for a quarter of the trained length.

    Source: Li et al., arXiv:2310.04418. The authors released no code; the function, its logarithms, its threshold and
        the first values of all weights are taken from code in use, mcleish7/arithmetic@86022a5,
        cramming/architectures/embeddings.py, which begins the threshold at 512 tokens. Here each layer has a separate
        network; the text of the paper, which may let them share one, was not at hand.
    """

    name = "fire"
    summary = "a learned function of distance relative to the query's position"
    source = "arXiv:2310.04418"
    shared = False
    form = "scores"

    width: Annotated[int, Range(least=1, most=4096)] = 32
    threshold: Annotated[int, Range(least=0, most=MOST_TOKENS, of="tokens")] = 0

    def build(self, spec: EncodingSpec) -> Encoding:
        return _Network(spec.num_heads, self.width, float(self.threshold or max(1, spec.trained_length // 4)))


class _Network(Encoding):
    def __init__(self, heads: int, width: int, threshold: float) -> None:
        super().__init__()
        self.threshold = threshold
        self.c = nn.Parameter(torch.tensor(0.1))
        self.multiplier = nn.Parameter(torch.tensor(1.0))
        # As torch draws the weights of linear layers with 1 and with ``width`` inputs.
        self.inner, self.inner_bias = (nn.Parameter(2 * torch.rand(width) - 1) for _ in range(2))
        outer, outer_bias = torch.rand(heads, width), torch.rand(heads)
        self.outer, self.outer_bias = (nn.Parameter((2 * x - 1) * width**-0.5) for x in (outer, outer_bias))

    def score(self, pairs: Pairs) -> PairScore:
        weights = (self.c, self.multiplier, self.inner, self.inner_bias, self.outer, self.outer_bias)
        return _Interpolated(pairs, weights, self.threshold)


class _Interpolated(PairScore):
    def __init__(self, pairs: Pairs, weights: tuple[Tensor, ...], threshold: float) -> None:
        self.pairs, self.weights, self.threshold = pairs, weights, threshold
        self.floats = 2 * len(weights[2]) + len(weights[4]) + 3

    def rows(self, queries: slice) -> Float[Tensor, "rows heads queries key"]:
        c, multiplier, inner, inner_bias, outer, outer_bias = map(self.pairs.like_scores, self.weights)
        position = self.pairs.query_positions[:, queries, None].to(c.dtype)
        longest = torch.log1p(c.abs() * torch.maximum(position, (multiplier * self.threshold).abs())) + 1e-6
        share = torch.log1p(c.abs() * self.pairs.distances(queries).to(c.dtype)) / longest
        hidden = torch.relu(share[..., None] * inner + inner_bias)
        return (hidden @ outer.T + outer_bias).permute(0, 3, 1, 2)
