"""One learned score per head and bucket of distances, as T5 has."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ctxext.laboratory.scores import ByDistance, PairScore
from ctxext.methods.encoding import Encoding, EncodingMethod, EncodingSpec, Pairs
from ctxext.methods.parameters import MOST_TOKENS, Range, require


@dataclass(frozen=True, kw_only=True)
class T5Bias(EncodingMethod):
    """Add a learned number to each score, one per head and bucket of distances, instead of rotation.

    Pick it for a relative encoding that learns for itself how scores fall with distance, and reads a little beyond its
    training: in the ALiBi paper it lies between ALiBi and rotation there. Near tokens have a bucket each, far ones
    share buckets that grow with the logarithm of the distance, and all beyond ``max_distance`` share the last. The
    cost: far tokens of one bucket cannot be told apart; and scores of near pairs are written out, which fused kernels
    need not (of all pairs where texts are padded or packed). The model needs training.

    Args:
        factor: target_length / trained_length. Dimensionless, at least 1. Says how far the model is meant to read;
            the buckets do not depend on it.
        buckets: number of buckets, at least 2; each of the first half holds one distance.
        max_distance: tokens from which all distances share the last bucket, above ``buckets / 2``.

    Source: Raffel et al., arXiv:1910.10683, section 2.1. Authors' code: tensorflow/mesh@28bb9c6,
        mesh_tensorflow/transformer/transformer_layers.py, _relative_position_bucket; the buckets of its causal form.
    """

    name = "t5_bias"
    summary = "a learned score per bucket of distances, as T5 has"
    source = "arXiv:1910.10683"
    form = "scores"

    buckets: Annotated[int, Range(least=2, most=65536)] = 32
    max_distance: Annotated[int, Range(least=2, most=MOST_TOKENS, of="tokens")] = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        expected = f"above buckets / 2 = {self.buckets / 2:g}"
        require(self.max_distance > self.buckets // 2, "max_distance", self.max_distance, expected)

    def build(self, spec: EncodingSpec) -> Encoding:
        return _Buckets(self, spec)


class _Buckets(Encoding):
    def __init__(self, method: T5Bias, spec: EncodingSpec) -> None:
        super().__init__()
        self.starts = starts_of(method.buckets, method.max_distance)
        self.weight = nn.Parameter(torch.randn(spec.num_heads, method.buckets) * spec.hidden_size**-0.5)

    def score(self, pairs: Pairs) -> PairScore:
        table = pairs.like_scores(self.weight)
        starts = torch.tensor(self.starts, device=table.device)
        of = partial(_looked_up, table, starts)
        return ByDistance(pairs, of, (self.weight,), 2 * table.shape[0], far_from=self.starts[-1])


def starts_of(buckets: int, max_distance: int) -> list[int]:
    """Return the distance at which each bucket but the first begins."""
    near = buckets // 2
    # The bucket of n >= near is near + floor(ln(n / near) / ln(max_distance / near) * (buckets - near)).
    far = [near * (max_distance / near) ** (step / (buckets - near)) for step in range(1, buckets - near)]
    return [*range(1, near + 1), *(math.ceil(start - 1e-9) for start in far)]


def _looked_up(
    table: Float[Tensor, "heads buckets"], starts: Int[Tensor, " later"], distances: Int[Tensor, "*shape"]
) -> Float[Tensor, " heads *shape"]:
    return table[:, torch.bucketize(distances, starts, right=True)]
