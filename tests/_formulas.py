"""The published formulas of scaled rotations a second time, and attention: in float64, without code of ctxext.

Peng et al. 2023 (YaRN, with the ramp and temperature of its authors' code), Ding et al. 2024 (LongRoPE), the code of
Llama 3.1, Chen et al. 2023 (linear), Hunyuan's base by alpha, Gemma 4's proportional frequencies.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Spectrum(NamedTuple):
    """Frequencies in radians per token, and what cos and sin are multiplied by."""

    inv_freq: Tensor
    scale: float


def plain(width: int, base: float = 10000.0) -> Tensor:
    """Return the frequencies of unscaled positions over ``width`` dimensions."""
    return base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)


def spectrum(rope: dict[str, Any], width: int, length: int = 1) -> Spectrum:
    """Return what a rope dict means in a text of ``length`` tokens, the fields that stand beside it included."""
    kind, base = rope.get("rope_type", rope.get("type", "default")), rope.get("rope_theta", 10000.0)
    if kind == "dynamic" and "alpha" in rope:  # Hunyuan: another base at every length
        return Spectrum(plain(width, base * rope["alpha"] ** (width / (width - 2))), 1.0)
    inv_freq = plain(width, base)
    if kind == "linear":
        return Spectrum(inv_freq / rope["factor"], 1.0)
    if kind == "proportional":  # Gemma 4: the fastest quarter of the pairs turns, the others stand still
        return Spectrum(inv_freq * (torch.arange(width // 2) < rope["partial_rotary_factor"] * width / 2), 1.0)
    if kind in ("default", "none", "dynamic"):  # the last stretches no text of the trained length
        return Spectrum(inv_freq, 1.0)
    return {"yarn": _yarn, "llama3": _llama3, "longrope": _longrope}[kind](rope, inv_freq, length)


def _yarn(rope: dict[str, Any], inv_freq: Tensor, _: int) -> Spectrum:
    factor, original, width = rope["factor"], rope["original_max_position_embeddings"], 2 * len(inv_freq)

    def dimension(turns: float) -> float:
        return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.get("rope_theta", 10000.0)))

    low, high = dimension(rope.get("beta_fast") or 32), dimension(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    divided = ((torch.arange(width // 2, dtype=torch.float64) - low) / max(high - low, 0.001)).clamp(0, 1)

    def temperature(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1

    scale, over, under = (rope.get(name) for name in ("attention_factor", "mscale", "mscale_all_dim"))
    if scale is None:
        scale = temperature(over) / temperature(under) if over and under else temperature(1)
    return Spectrum(inv_freq * (1 - divided) + inv_freq / factor * divided, scale)


def _llama3(rope: dict[str, Any], inv_freq: Tensor, _: int) -> Spectrum:
    turns = rope["original_max_position_embeddings"] * inv_freq / (2 * math.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    kept = ((turns - low) / (high - low) if high > low else (turns > low).double()).clamp(0, 1)
    return Spectrum(inv_freq * kept + inv_freq / rope["factor"] * (1 - kept), 1.0)


def _longrope(rope: dict[str, Any], inv_freq: Tensor, length: int) -> Spectrum:
    original = rope["original_max_position_embeddings"]
    which = "long" if length > original else "short"
    scale = rope.get(f"{which}_mscale", rope.get("attention_factor"))
    if scale is None:
        stretch = rope["max_position_embeddings"] / original
        scale = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
    return Spectrum(inv_freq / torch.tensor(rope[f"{which}_factor"], dtype=torch.float64), scale)


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    relative: Tensor,
    inv_freq: Tensor,
    *,
    scale: float,
    weight: Tensor | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention of one row without rotation in q and k, ``[heads, seq, head_dim]``, by ``relative`` positions.

    A pair of dimensions in halves is a complex number; the score of a pair of tokens is the real part of
    ``q * conj(k) * exp(i * relative * frequency)``, summed over the frequencies, plus what does not rotate. The
    exponential of it is multiplied by ``weight``, ``[query, key]`` or ``[heads, query, key]``. ``sinks``, ``[heads]``,
    are scores of keys whose value is 0; ``softcap`` bounds the scores.
    """
    scores = dense_scores(q, k, relative[-q.shape[1] :], inv_freq, scale=scale, softcap=softcap)
    largest = scores.amax(-1, keepdim=True)
    counted = (scores - largest).exp() * (1 if weight is None else weight[..., -q.shape[1] :, :])
    total = counted.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + (sinks[:, None, None] - largest).exp()
    return (counted / total) @ v.repeat_interleave(q.shape[0] // v.shape[0], 0)


def dense_scores(
    q: Tensor, k: Tensor, apart: Tensor, inv_freq: Tensor, *, scale: float, softcap: float | None = None
) -> Tensor:
    """The scores of ``dense_attention``, ``[heads, query, key]``, minus infinity where nothing is seen."""
    half = len(inv_freq)
    k = k.repeat_interleave(q.shape[0] // k.shape[0], 0)
    turned = torch.polar(torch.ones_like(apart), apart.nan_to_num() * inv_freq)
    rotating = (
        torch.complex(q[..., :half], q[..., half : 2 * half]),
        torch.complex(k[..., :half], k[..., half : 2 * half]),
    )
    scores = torch.einsum("hif,hjf,ijf->hij", rotating[0], rotating[1].conj(), turned).real
    scores = scores + torch.einsum("hid,hjd->hij", q[..., 2 * half :], k[..., 2 * half :])
    scores = scores * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return scores.masked_fill(apart[..., 0].isnan(), -torch.inf)
