"""The product of two sinusoidal vectors as a score: a bias without weights that falls slower than ALiBi's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ctxext.laboratory.scores import PairScore
from ctxext.methods.encoding import Encoding, EncodingMethod, EncodingSpec, Pairs
from ctxext.methods.parameters import Range

BASE = 10000.0


@dataclass(frozen=True, kw_only=True)
class Sandwich(EncodingMethod):
    """Add the product of the sinusoids of two positions to their score, each head at a different scale.

    Pick it where ALiBi would do and far tokens should count for more: nothing is learned, scores fall fast at first and
    slowly then, and in float32 they ride on fused attention kernels, as a few more dimensions of queries and keys. The
    cost: those dimensions take time (they are as many as a head has, or more), and in 16 bits scores of pairs are
    written out for some queries at a time instead. The model needs training.

    Args:
        factor: target_length / trained_length. Dimensionless, at least 1. Says how far the model is meant to read;
            the scores do not depend on it.
        dimensions: size of the sinusoidal vectors, even, at least 2; the paper's choice is 128 at every model width.

    Source: Chi et al., arXiv:2212.10356, section 5 and appendix A.1 (head h of H divides by 8 h / H). Code in use:
        meta-pytorch/attention-gym@7fdb85d, attn_gym/mods/sandwich.py.
    """

    name = "sandwich"
    summary = "score plus the product of two positions' sinusoids"
    source = "arXiv:2212.10356"
    form = "scores"

    dimensions: Annotated[int, Range(least=2, most=4096, step=2)] = 128

    def build(self, spec: EncodingSpec) -> Encoding:
        return _Products(spec.num_heads, self.dimensions)


class _Products(Encoding):
    def __init__(self, heads: int, dimensions: int) -> None:
        super().__init__()
        self.heads, self.dimensions = heads, dimensions

    def score(self, pairs: Pairs) -> PairScore:
        return _Cosines(pairs, self.heads, self.dimensions)


class _Cosines(PairScore):
    """The sum of the cosines of a distance at many frequencies.

    Rows are that without its value at distance 0, to which it is the largest: small numbers keep their digits.
    """

    def __init__(self, pairs: Pairs, heads: int, dimensions: int) -> None:
        self.pairs, self.weights, self.floats = pairs, (), heads + 6
        exact: dict[str, Any] = {"dtype": torch.float64, "device": pairs.q.device}
        self.frequencies: Tensor = BASE ** (-2 * torch.arange(dimensions // 2, **exact) / dimensions)
        self.ratios: Tensor = 8 * torch.arange(1, heads + 1, **exact)[:, None, None] / heads

    def rows(self, queries: slice) -> Float[Tensor, "rows heads queries key"]:
        apart = self.pairs.distances(queries).double()
        fallen = torch.zeros_like(apart)
        for frequency in self.frequencies:
            fallen += torch.cos(apart * frequency) - 1
        return (fallen[:, None] / self.ratios).to(self.pairs.dtype)

    def columns(self) -> tuple[Tensor, Tensor]:
        queries, keys = map(self._waves, (self.pairs.query_positions, self.pairs.key_positions))
        return (queries / self.ratios).to(self.pairs.dtype), keys.to(self.pairs.dtype)

    def _waves(self, positions: Int[Tensor, "rows seq"]) -> Float[Tensor, "rows 1 seq dimensions"]:
        angles = positions.double()[:, None, :, None] * self.frequencies
        return torch.cat([angles.cos(), angles.sin()], -1)
