"""Position remapping written out pair by pair: what the pieces of a method say, and attention by complex numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor

from ctxext.methods.remap import Band, Piece, RemapMethod, Sinks
from ctxext.spec import RopeSpec

ROPE = RopeSpec(rotary_dim=8, base=1e4, trained_length=64)


def relative_positions(
    method: RemapMethod, rope: RopeSpec, length: int, shown: int | None = None, *, both_ways: bool = False
) -> Tensor:
    """``[query, key, frequency]``, not a number where a query does not see a key; every pair is in one piece at most.

    The pieces are those for texts of ``length`` tokens, of which the first ``shown`` are looked at. Where tokens see
    ``both_ways``, a key ahead lies as far as the pair exchanged, with the other sign; none ahead is a first token.
    """
    pieces, places = method.pieces(rope, length), torch.arange(shown or length)
    found = _behind(pieces, places, rope)
    if not both_ways:
        return found
    ahead = -_behind(without_first_tokens(pieces), places, rope).transpose(0, 1)
    return torch.where((places[:, None] < places[None])[..., None], ahead, found)


def without_first_tokens(pieces: tuple[Piece, ...]) -> list[Piece]:
    """The pieces of a text whose first tokens are like any others."""
    kept = [piece for piece in pieces if not isinstance(piece.region, Sinks)]
    return [replace(p, region=replace(p.region, skip=0)) if isinstance(p.region, Band) else p for p in kept]


def _behind(pieces: Iterable[Piece], places: Tensor, rope: RopeSpec) -> Tensor:
    """The relative positions of keys at or before their query."""
    found = torch.full((len(places), len(places), rope.rotary_dim // 2), torch.nan, dtype=torch.float64)
    for piece in pieces:
        here = piece.region.holds(places[:, None], places[None])
        assert not bool((here & (places[:, None] < places[None])).any()), "a query sees what comes after it"
        assert not bool((here & ~found[..., 0].isnan()).any()), "a pair is in two pieces"
        query, key = (side(places).reshape(len(places), -1) for side in (piece.query, piece.key))
        found = torch.where(here[..., None], query[:, None] - key[None], found)
    return found


def weights(method: RemapMethod, rope: RopeSpec, length: int, *, both_ways: bool = False) -> Tensor:
    """``[query, key]``: how much a key counts for a query, 1 where it counts like any other."""
    places = torch.arange(length)
    found = torch.ones(length, length, dtype=torch.float64)
    pieces = method.pieces(rope, length)
    for piece in pieces:
        found[piece.region.holds(places[:, None], places[None])] = piece.weight
    for piece in without_first_tokens(pieces) if both_ways else ():
        found[piece.region.holds(places[:, None], places[None]).T & (places[:, None] < places[None])] = piece.weight
    return found


def by_formula(formula: Callable[[int, int], float | None], length: int) -> Tensor:
    """``formula(query, key)`` for every pair with the key not after the query, as ``[query, key]``; None: not seen."""
    rows = [[formula(i, j) if j <= i else None for j in range(length)] for i in range(length)]
    return torch.tensor([[torch.nan if x is None else x for x in row] for row in rows], dtype=torch.float64)


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
    exponential of it is multiplied by ``weight``, ``[query, key]``. ``sinks``, ``[heads]``, are scores of keys whose
    value is 0; ``softcap`` bounds the scores.
    """
    scores = dense_scores(q, k, relative[-q.shape[1] :], inv_freq, scale=scale, softcap=softcap)
    largest = scores.amax(-1, keepdim=True)
    counted = (scores - largest).exp() * (1 if weight is None else weight[-q.shape[1] :])
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
