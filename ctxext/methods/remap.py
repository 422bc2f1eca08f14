"""The contract of position remapping: distant pairs of tokens get relative positions that the model knows."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ctxext.errors import InvalidParameterError
from ctxext.methods.base import RopeMethod
from ctxext.methods.formulas import plain_inv_freq
from ctxext.methods.parameters import MOST_TOKENS, Range, require
from ctxext.spec import Band, Frequencies, Piece, RopeSpec

Tokens = Range(above=0, most=MOST_TOKENS)
"""A number of tokens, or below 1 a share of the trained length, which ``tokens_of`` converts to tokens."""


@dataclass(frozen=True, kw_only=True)
class RemapMethod(RopeMethod):
    """A method that leaves the frequencies as they are and gives distant pairs of tokens other relative positions.

    Near pairs keep theirs, so that a text inside the trained window is computed as before or nearly so, without
    training. Attention is computed by ctxext, in pieces. The positions of a token depend on its place alone, not on the
    length of the text: a cache stays right, and later tokens change nothing before them.

    Args:
        factor: target_length / trained_length. Dimensionless, at least 1.
        temperature: sharpening of attention. "none"; "logn" multiplies the scores of the query at position i by
            max(1, ln(i + 1) / ln(trained_length)) (Su, kexue.fm/8823), where i is the last position of the text if
            tokens see both ways; "yarn" multiplies all scores by (0.1 ln(factor) + 1)^2 (arXiv:2309.00071, section
            3.4), inside the trained window too; "growing" does so with (i + 1) / trained_length for the factor, beyond
            the trained window only.
    """

    temperature: Literal["none", "logn", "yarn", "growing"] = "none"

    @property
    def is_table(self) -> bool:
        return False

    @abstractmethod
    def pieces(self, rope: RopeSpec, length: int) -> tuple[Piece, ...]:
        """Return the pieces of attention for texts of up to ``length`` tokens, nearest keys first.

        The regions of the pieces do not overlap. A pair of tokens outside all regions is masked. Pieces are of keys at
        or before their query; ``Piece.ahead`` has those after it, where tokens see both ways.

        Raises:
            InvalidParameterError: if the parameters do not fit the trained length, or cannot reach ``length`` with
                relative positions that the model knows; the message names the largest length that works.
        """

    def sharpness(self, rope: RopeSpec, positions: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape"] | None:
        """Compute the factor on the scores of the queries at these positions, in float64; None without temperature."""
        if self.temperature == "none":
            return None
        if self.temperature == "yarn":
            return torch.full_like(positions, (0.1 * math.log(self.factor) + 1) ** 2, dtype=torch.float64)
        if self.temperature == "growing":
            stretch = ((positions + 1).double() / rope.trained_length).clamp(min=1.0)
            return (0.1 * stretch.log() + 1).square()
        return ((positions + 1).double().log() / math.log(rope.trained_length)).clamp(min=1.0)

    def exact_length(self, rope: RopeSpec) -> int:
        """Return the length in tokens up to which every pair keeps its relative position.

        A call whose tokens all lie before that length gives the unextended model's bits, temperature apart, with a
        cache too. In a cache that was longer and was cropped, keys were rotated back: values are equal up to rounding.
        """
        nearest = self.pieces(rope, self.target_length(rope.trained_length))[0].region
        return max(nearest.stop or 0, nearest.plain_before) if isinstance(nearest, Band) else 0

    def frequencies(self, rope: RopeSpec, length: int) -> Frequencies:
        return Frequencies(plain_inv_freq(rope))

    def rope_parameters(self, rope: RopeSpec) -> dict[str, Any] | None:
        return None


def near_and_far(window: int, rope: RopeSpec, *, exact: bool) -> tuple[Band, Band]:
    """Return two regions: keys less than ``window`` tokens back, and all other keys.

    Args:
        window: tokens.
        rope: the model's rotation.
        exact: True if all keys of a query inside the trained window are near: no key there is farther back than any
            was in training.
    """
    plain_before = rope.trained_length if exact else 0
    return Band(0, window, plain_before), Band(window, None, plain_before)


def tokens_of(parameter: str, value: float, rope: RopeSpec, *, most: int) -> int:
    """Convert a parameter to tokens: a value below 1 is a share of the trained length.

    Raises:
        InvalidParameterError: unless the result is from 1 to ``most`` tokens.
    """
    tokens = math.floor(value * rope.trained_length) if 0 < value < 1 else value
    expected = (
        f"from 1 to {most:,} tokens (the checkpoint was trained for {rope.trained_length:,}), or a share of the "
        f"trained length below 1"
    )
    require(tokens == int(tokens) and 1 <= tokens <= most, parameter, value, expected)
    return int(tokens)


def require_reach(name: str, length: int, longest: int, remedy: str) -> None:
    """Raise ``InvalidParameterError`` if ``length`` is above the ``longest`` that a method's parameters reach."""
    if length > longest:
        raise InvalidParameterError(
            f"Method {name!r} with these parameters reaches {longest:,} tokens, found a target of {length:,}. Beyond "
            f"its reach, keys would be farther away than any were in training. {remedy}"
        )
