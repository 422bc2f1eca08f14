"""A score that falls with the logarithm of the distance, at learned rates."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ctxext.laboratory.scores import ByDistance, PairScore
from ctxext.methods.encoding import Encoding, EncodingMethod, EncodingSpec, Pairs
from ctxext.spec import PerHead

LEAST = 0.01


@dataclass(frozen=True, kw_only=True)
class KERPLE(EncodingMethod):
    """Lower each score by ``p ln(1 + a distance)``, with a learned p and a of each head, instead of rotation.

    Pick it to train a model on short texts and read long ones: like ALiBi it holds its loss beyond the trained length,
    but its scores fall ever more slowly, so that far tokens are not lost, and each head learns how fast. The cost:
    scores of pairs are written out for some queries at a time, which ALiBi's need not be. The model needs training.

    Args:
        factor: target_length / trained_length. Dimensionless, at least 1. Says how far the model is meant to read;
            the scores do not depend on it.

    Source: Chi et al., arXiv:2205.09921, section 4 (the logarithmic kernel). Authors' code: chijames/KERPLE@25be3d7,
        megatron/mpu/layers.py, ParallelKerpleLog: p drawn from 0 to 2 and a from 0 to 1, both at least 0.01.
    """

    name = "kerple"
    summary = "score minus a learned multiple of the logarithm of distance"
    source = "arXiv:2205.09921"
    form = "scores"

    def build(self, spec: EncodingSpec) -> Encoding:
        return _Logarithms(spec.num_heads)


class _Logarithms(Encoding):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.p = nn.Parameter(2 * torch.rand(heads))
        self.a = nn.Parameter(torch.rand(heads))

    def score(self, pairs: Pairs) -> PairScore:
        p, a = (_at_least(pairs.like_scores(rate)) for rate in (self.p, self.a))
        return ByDistance(pairs, partial(_fallen, p, a), (self.p, self.a), 3 * len(p))


def _at_least(weight: PerHead) -> PerHead:
    """Return the weight, at least ``LEAST``. The gradient ignores the bound, so that a lower weight can rise again."""
    return weight + (weight.clamp(min=LEAST) - weight).detach()


def _fallen(p: PerHead, a: PerHead, distances: Int[Tensor, "*shape"]) -> Float[Tensor, " heads *shape"]:
    p, a = (rate.view(-1, *[1] * distances.ndim) for rate in (p, a))
    return -p * torch.log1p(a * distances.to(p.dtype))
