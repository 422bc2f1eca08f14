"""Pieces of mathematics that several methods use unchanged."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ctxext.spec import Frequencies, RopeSpec


def plain_inv_freq(rope: RopeSpec, base: float | None = None) -> Float[Tensor, " half"]:
    """Unextended frequencies ``base^(-2i/d)`` in float64, radians per token.

    Source: Su et al., arXiv:2104.09864, section 3.4.2.
    """
    exponent = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float64) / rope.rotary_dim
    return (rope.base if base is None else base) ** -exponent


def as_longrope(rope: RopeSpec, frequencies: Frequencies, factor: float) -> dict[str, Any]:
    """Any static set of frequencies in stock form: ``longrope`` whose short and long factors are the same.

    The two sets being equal, stock code has no switch to get wrong. A frequency of zero has no finite factor
    and cannot be stored this way.
    """
    factors = (plain_inv_freq(rope) / frequencies.inv_freq).tolist()
    return {
        "rope_type": "longrope",
        "rope_theta": rope.base,
        "factor": float(factor),
        "original_max_position_embeddings": rope.trained_length,
        "attention_factor": float(frequencies.attention_scale),
        "short_factor": factors,
        "long_factor": list(factors),
    }
