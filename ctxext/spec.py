"""The nouns that methods, architectures and evaluation share. All frozen, none knows a model."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from ctxext.errors import InvalidParameterError

__all__ = ["AlibiSpec", "Frequencies", "RopeSpec"]


@dataclass(frozen=True)
class RopeSpec:
    """What a RoPE method may know about a model.

    Args:
        rotary_dim: number of head dimensions that rotate (not ``head_dim`` when rotary is partial). Even, at least 2.
        base: ``rope_theta``, dimensionless, above 1.
        trained_length: tokens that the unextended checkpoint was trained for, at least 1.
    """

    rotary_dim: int
    base: float
    trained_length: int

    def __post_init__(self) -> None:
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            raise InvalidParameterError(f"rotary_dim must be even and at least 2, found {self.rotary_dim}.")
        if not self.base > 1.0:
            raise InvalidParameterError(f"base (rope_theta) must be above 1, found {self.base}.")
        if self.trained_length < 1:
            raise InvalidParameterError(f"trained_length must be at least 1 token, found {self.trained_length}.")


@dataclass(frozen=True)
class AlibiSpec:
    """What an ALiBi method may know about a model.

    Args:
        num_heads: query heads, at least 1.
        trained_length: tokens that the checkpoint was trained for, at least 1.
    """

    num_heads: int
    trained_length: int


@dataclass(frozen=True, eq=False)
class Frequencies:
    """What a RoPE method turns a model's positions into.

    Args:
        inv_freq: radians per token, float64, one entry per rotated pair of dimensions.
        attention_scale: multiplies cos *and* sin, so attention scores grow by its square. Dimensionless.
    """

    inv_freq: Float[Tensor, " half"]
    attention_scale: float = 1.0
