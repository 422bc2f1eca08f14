"""Sines and cosines of the position, added to the token embeddings: the first transformer's encoding."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ctxext.methods.encoding import Encoding, EncodingMethod, EncodingSpec
from ctxext.methods.parameters import MOST_BASE, Positive, Range


@dataclass(frozen=True, kw_only=True)
class Sinusoidal(EncodingMethod):
    """Add a wave for each position to what the first layer reads, instead of rotation.

    Pick it as the baseline that all later encodings are held against: no weights, any position, any attention kernel.
    The cost: positions that were not seen in training break the model at once (in the ALiBi paper 20 to 50 tokens
    beyond the trained length), and it takes many more steps than relative encodings until the order of tokens is used
    at all. The model needs training. (Models that were made with sinusoids are extended by pi, ntk or yarn instead.)

    Args:
        factor: target_length / trained_length. Dimensionless, at least 1. Says how far the model is meant to read;
            the waves do not depend on it.
        base: base of the frequencies, above 1; the longest wave has about ``2 pi base`` tokens.
        amplitude: height of the waves, above 0. None makes them as large as token embeddings are when they are new, as
            in the paper. A model whose embeddings grew in training needs more.

    Source: Vaswani et al., arXiv:1706.03762, section 3.5. Authors' code: tensorflow/tensor2tensor@75b75f2,
        tensor2tensor/layers/common_attention.py, get_timing_signal_1d, which puts all sines before all cosines.
    """

    name = "sinusoidal"
    summary = "sines and cosines of the position, added to the embeddings"
    source = "arXiv:1706.03762"
    form = "input"

    base: Annotated[float, Range(above=1, most=MOST_BASE)] = 10000.0
    amplitude: Annotated[float | None, Positive] = None

    def build(self, spec: EncodingSpec) -> Encoding:
        # A wave of amplitude 1 has a standard deviation of 1 / sqrt(2).
        amplitude = math.sqrt(2) * spec.embedding_std if self.amplitude is None else self.amplitude
        return _Waves(spec.hidden_size, self.base, amplitude)


class _Waves(Encoding):
    def __init__(self, size: int, base: float, amplitude: float) -> None:
        super().__init__()
        self.size, self.base, self.amplitude = size, base, amplitude

    def added(self, positions: Int[Tensor, "batch seq"]) -> Float[Tensor, "batch seq hidden"]:
        pairs = torch.arange(-(-self.size // 2), device=positions.device, dtype=torch.float64)
        angles = positions.double()[..., None] * self.base ** (-2 * pairs / self.size)
        waves = torch.stack([angles.sin(), angles.cos()], -1).flatten(-2)[..., : self.size]
        return (self.amplitude * waves).float()
