"""The slopes that ALiBi checkpoints were trained with, for any number of heads."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from ctxext.errors import InvalidParameterError
from ctxext.spec import AlibiSpec

__all__ = ["alibi_slopes", "trained_slopes"]


def alibi_slopes(num_heads: int) -> Float[Tensor, " heads"]:
    """Return how much score each head loses per token of distance, float64.

    For a power of two, head ``h`` of ``n`` (counted from 1) has slope ``2^(-8 h / n)``. Any other number takes that
    series for the largest power of two below it, and fills up with every second term, from the first, of the series
    twice as long: two geometric series, not one, because that is what BLOOM, MPT and the authors trained.

    Args:
        num_heads: query heads, at least 1.

    Raises:
        InvalidParameterError: if ``num_heads`` is below 1.

    Source: Press et al., arXiv:2108.12409, section 3; the authors' code, ``get_slopes`` in
    fairseq/models/transformer.py of ofirpress/attention_with_linear_biases, for other numbers.
    """
    if num_heads < 1:
        raise InvalidParameterError(f"num_heads must be at least 1, found {num_heads}.")
    power = 1 << (num_heads.bit_length() - 1)
    series = torch.arange(1, power + 1, dtype=torch.float64, device="cpu") / power
    between = (torch.arange(num_heads - power, dtype=torch.float64, device="cpu") + 0.5) / power
    return torch.exp2(-8.0 * torch.cat([series, between]))


def trained_slopes(alibi: AlibiSpec) -> Float[Tensor, " heads"]:
    """Return the slopes of the unextended checkpoint, float64."""
    if alibi.slopes is None:
        return alibi_slopes(alibi.num_heads)
    return torch.tensor(alibi.slopes, dtype=torch.float64, device="cpu")
