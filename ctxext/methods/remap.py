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
"""A number of tokens, or below 1 a share of the trained length, which ``tokens_of`` makes tokens of."""


@dataclass(frozen=True, kw_only=True)
class RemapMethod(RopeMethod):
    """A method that leaves the frequencies as they are and gives distant pairs of tokens other relative positions.

    Near pairs keep their own, so a text inside the trained window is read as before or nearly so, and nothing is
    trained. Attention is computed by ctxext, in pieces. A token's positions depend on its place alone, not on the
    length of the text: a cache stays right, and what a text goes on with changes nothing before it.

    Args:
        factor: target_length / trained_length. Dimensionless, at least 1.
        temperature: what sharpens attention. "none"; "logn" multiplies the scores of the query at position i by
            max(1, ln(i + 1) / ln(trained_length)) (Su, kexue.fm/8823); "yarn" multiplies all scores by
            (0.1 ln(factor) + 1)^2 (arXiv:2309.00071, section 3.4), inside the trained window too.
    """

    temperature: Literal["none", "logn", "yarn"] = "none"

    @property
    def is_table(self) -> bool:
        return False

    @abstractmethod
    def pieces(self, rope: RopeSpec, length: int) -> tuple[Piece, ...]:
        """The pieces of attention for texts of up to ``length`` tokens, nearest keys first.

        Their regions do not overlap. A pair of tokens in none of them is not seen.

        Raises:
            InvalidParameterError: if the parameters do not fit the trained length, or cannot reach ``length`` with
                relative positions that the model knows; it names the largest length that works.
        """

    def sharpness(self, rope: RopeSpec, positions: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape"] | None:
        """What multiplies the scores of the queries at these positions, float64; None where nothing does."""
        if self.temperature == "none":
            return None
        if self.temperature == "yarn":
            return torch.full_like(positions, (0.1 * math.log(self.factor) + 1) ** 2, dtype=torch.float64)
        return ((positions + 1).double().log() / math.log(rope.trained_length)).clamp(min=1.0)

    def exact_length(self, rope: RopeSpec) -> int:
        """Tokens up to which every pair keeps its position: a text is read as without the extension, temperature apart.

        One forward pass gives the same bits; decoding with a cache, whose keys are rotated, gives them up to rounding.
        """
        nearest = self.pieces(rope, self.target_length(rope.trained_length))[0].region
        return max(nearest.stop or 0, nearest.plain_before) if isinstance(nearest, Band) else 0

    def frequencies(self, rope: RopeSpec, length: int) -> Frequencies:
        return Frequencies(plain_inv_freq(rope))

    def rope_parameters(self, rope: RopeSpec) -> dict[str, Any] | None:
        return None


def near_and_far(window: int, rope: RopeSpec, *, exact: bool) -> tuple[Band, Band]:
    """The regions of keys less than ``window`` tokens back, and of all others.

    Args:
        window: tokens.
        rope: the model's rotation.
        exact: whether queries inside the trained window have no far keys: none of theirs is farther than it knows.
    """
    plain_before = rope.trained_length if exact else 0
    return Band(0, window, plain_before), Band(window, None, plain_before)


def tokens_of(parameter: str, value: float, rope: RopeSpec, *, most: int) -> int:
    """The number of tokens that a parameter gives: as such, or below 1 as a share of the trained length.

    Raises:
        InvalidParameterError: unless it is from 1 to ``most`` tokens.
    """
    found = math.floor(value * rope.trained_length) if 0 < value < 1 else value
    expected = (
        f"from 1 to {most:,} tokens (the checkpoint was trained for {rope.trained_length:,}), or a share of the "
        f"trained length below 1"
    )
    require(found == int(found) and 1 <= found <= most, parameter, value, expected)
    return int(found)


def require_reach(name: str, length: int, longest: int, remedy: str) -> None:
    """Raise ``InvalidParameterError`` if ``length`` is above the ``longest`` that a method's parameters reach."""
    if length > longest:
        raise InvalidParameterError(
            f"Method {name!r} with these parameters reaches {longest:,} tokens, found a target of {length:,}: beyond, "
            f"keys would stand farther away than any did in training. {remedy}"
        )
