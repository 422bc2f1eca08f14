"""Pieces of mathematics that several methods use unchanged."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ctxext.errors import InvalidParameterError
from ctxext.methods.parameters import Range, require
from ctxext.spec import AlibiSpec, Frequencies, PerHead, PerPair, RopeSpec

# Divisor of a frequency that must not turn. JSON has no infinity. In a text of any practical length cos is then exactly
# 1 and sin below 1e-18, which float32 and narrower types round away next to 1. The number fits a float32; its product
# with a power of the base may overflow to infinity there, and the reciprocal of infinity is 0, as wanted.
NEVER = 1e30
# Arguments of tensors that formulas compute with, whatever the defaults of torch are.
EXACT: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}

Clip = Annotated[int | Literal["auto"] | None, Range(least=2, of="pairs")]
"""Number of frequencies that ``clipped`` slows."""


def plain_inv_freq(rope: RopeSpec, base: float | None = None) -> PerPair:
    """Return the frequencies that the weights were trained with, in float64, radians per token.

    These are ``base^(-2i/d)``, or scaled ones in ``rope.inv_freq``, which another ``base`` changes by the same ratio.

    Source: Su et al., arXiv:2104.09864, section 3.4.2.
    """
    if rope.inv_freq is None:
        return geometric_inv_freq(rope, base)
    trained = torch.tensor(rope.inv_freq, **EXACT)
    return trained if base is None else trained * (geometric_inv_freq(rope, base) / geometric_inv_freq(rope))


def geometric_inv_freq(rope: RopeSpec, base: float | None = None) -> PerPair:
    """Compute ``base^(-2i/d)`` in float64, which transformers divides by the factors of a config."""
    exponent = torch.arange(0, rope.rotary_dim, 2, **EXACT) / rope.rotary_dim
    return (rope.base if base is None else base) ** -exponent


def ntk_base(rope: RopeSpec, stretch: float) -> float:
    """Return the base that divides the lowest frequency by ``stretch`` and keeps the highest.

    Raises:
        InvalidParameterError: if only one pair of dimensions rotates: it is the highest and the lowest at once.
    """
    require(rope.rotary_dim > 2, "rotary_dim", rope.rotary_dim, "above 2 for a method that changes the base")
    return float(rope.base * stretch ** (rope.rotary_dim / (rope.rotary_dim - 2)))


def index_that_turns(rope: RopeSpec, turns: float) -> float:
    """Compute the (fractional) index of the frequency that turns ``turns`` times in the trained window.

    Between two scaled frequencies the index is interpolated linearly in their logarithms, which is exact for powers of
    one base; beyond the slowest and the fastest it is extrapolated from the nearest two.

    Raises:
        InvalidParameterError: if only one pair of dimensions rotates, at a scaled frequency; or if none rotates.
    """
    if rope.inv_freq is None:
        return rope.rotary_dim * math.log(rope.trained_length / (2 * math.pi * turns)) / (2 * math.log(rope.base))
    require(rope.rotary_dim > 2, "rotary_dim", rope.rotary_dim, "above 2 where the trained frequencies are scaled")
    # Searched factors (LongRoPE) may make a frequency faster than its predecessor: the first slow frequency counts.
    logarithms = plain_inv_freq(rope).log().cummin(0).values
    if logarithms[0] == -math.inf:
        raise InvalidParameterError(
            "All trained frequencies are zero: no pair of dimensions turns, so none turns often enough to be kept. "
            "Take scaling='replace' (--scaling replace), or a method that does not count turns (ntk, pi)."
        )
    wanted = math.log(2 * math.pi * turns / rope.trained_length)
    after = min(max(int((logarithms > wanted).sum()), 1), len(logarithms) - 1)
    step = float(logarithms[after] - logarithms[after - 1])
    return float(after) if step == 0 else after - 1 + (wanted - float(logarithms[after - 1])) / step


def turns_ramp(rope: RopeSpec, slow: float, fast: float) -> PerPair:
    """Return 1 for frequencies with ``fast`` turns or more in the trained window, 0 up to ``slow``, a ramp between.

    Source: Peng et al., arXiv:2309.00071, section 3.2, gamma(r).
    """
    turns = rope.trained_length * plain_inv_freq(rope) / (2 * math.pi)
    return ((turns - slow) / (fast - slow)).clamp(0, 1)


def blend(rope: RopeSpec, factor: float, keep: PerPair, *, wavelengths: bool = False) -> PerPair:
    """Blend the plain frequencies (``keep`` 1) with the plain frequencies divided by ``factor`` (``keep`` 0).

    Args:
        rope: the model's rotation.
        factor: divisor of a frequency that is not kept.
        keep: the share of each plain frequency that stays, 0 to 1.
        wavelengths: take the weighted mean of the two wavelengths instead of the two frequencies.
    """
    plain = plain_inv_freq(rope)
    if wavelengths:
        return plain / (keep + (1 - keep) * factor)
    return plain * (keep + (1 - keep) / factor)


def clipped(rope: RopeSpec, inv_freq: PerPair, clip: Clip) -> PerPair:
    """Slow the last frequencies by half a wave of a cosine: the first of them stays, the last becomes 0.

    Args:
        rope: the model's rotation.
        inv_freq: frequencies to clip, radians per token.
        clip: number of frequencies, from 2 to all; "auto" for the frequencies that make less than one turn in the
            trained window; None for none.

    Raises:
        InvalidParameterError: if there are fewer frequencies, or fewer than two for "auto".

    Source: Li et al., arXiv:2602.05258; the authors' code, modeling_cope.py of hrlics/CoPE@ed52ba5, which clips 20 of
        64. "auto": ml-explore/mlx-lm, pull request 1387.
    """
    if clip is None:
        return inv_freq
    count = clip
    if count == "auto":
        count = int((plain_inv_freq(rope) * rope.trained_length < 2 * math.pi).sum())
        expected = "a number of pairs, since fewer than two turn less than once in the trained window"
        require(count >= 2, "clip", clip, expected)
    require(count <= len(inv_freq), "clip", clip, f"at most {len(inv_freq)} pairs (rotary_dim / 2)")
    share = (1 + torch.linspace(0, math.pi, count, **EXACT).cos()) / 2
    return torch.cat([inv_freq[:-count], inv_freq[-count:] * share])


def as_longrope(rope: RopeSpec, frequencies: Frequencies, factor: float) -> dict[str, Any]:
    """Express static frequencies as ``longrope`` with equal short and long factors; a 0 gets the factor ``NEVER``."""
    turning = frequencies.inv_freq > 0
    divisors = geometric_inv_freq(rope) / torch.where(turning, frequencies.inv_freq, 1.0)
    factors = torch.where(turning, divisors, NEVER).tolist()
    return {
        "rope_type": "longrope",
        "rope_theta": rope.base,
        "factor": float(factor),
        "original_max_position_embeddings": rope.trained_length,
        "attention_factor": float(frequencies.attention_scale),
        "short_factor": factors,
        "long_factor": list(factors),
    }


def alibi_slopes(num_heads: int) -> PerHead:
    """Compute the ALiBi slope of each head, by which its scores fall per token of distance, in float64.

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
    require(num_heads >= 1, "num_heads", num_heads, "at least 1")
    power = 1 << (num_heads.bit_length() - 1)
    series = torch.arange(1, power + 1, **EXACT) / power
    between = (torch.arange(num_heads - power, **EXACT) + 0.5) / power
    return torch.exp2(-8.0 * torch.cat([series, between]))


def trained_slopes(alibi: AlibiSpec) -> PerHead:
    """Return the slopes of the unextended checkpoint, float64."""
    if alibi.slopes is None:
        return alibi_slopes(alibi.num_heads)
    return torch.tensor(alibi.slopes, **EXACT)


def rows_between(
    lower: Int[Tensor, " target"], rest: Float[Tensor, " target"], trained: int
) -> tuple[Int[Tensor, "target 2"], Float[Tensor, "target 2"]]:
    """Return the ``Rows`` of places on the line through two neighbouring rows.

    Args:
        lower: the row before each place.
        rest: distance of the place from that row, in rows; above 1 the place lies beyond the next row.
        trained: number of trained rows.
    """
    indices = torch.stack([lower, (lower + 1).clamp(max=trained - 1)], dim=1)
    return indices, torch.stack([1.0 - rest, rest], dim=1)
