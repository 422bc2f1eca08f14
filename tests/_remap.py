"""Position remapping written out pair by pair: what the pieces of a method say, and models that attend so."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask

from ctxext.core.subject import Subject
from ctxext.kernels.pieces import RotationForm
from ctxext.methods.remap import Band, Piece, RemapMethod, Sinks
from ctxext.methods.retrieval_heads import RetrievalHeads
from ctxext.spec import RopeSpec
from tests._formulas import dense_attention
from tests.walk.tiny import TRAINED_LENGTH

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


def spec_of(model: PreTrainedModel) -> RopeSpec:
    """What a model without an extension rotates by, in the layers that reach far."""
    rotary = next(module for _, module in Subject(model).rotaries)
    buffers = dict(rotary.named_buffers())
    inv_freq = buffers.get("full_attention_inv_freq", buffers.get("inv_freq"))
    return RopeSpec(2 * len(inv_freq), 1e4, TRAINED_LENGTH, tuple(inv_freq.double().tolist()))


class Dense:
    """Dense attention in float64, in the signature that transformers calls.

    Layers that rotate and have no window attend by the positions of a method, the others by their own.
    """

    def __init__(self, model: PreTrainedModel, method: RemapMethod, form: RotationForm, *, both_ways: bool) -> None:
        self.method, self.form, self.both_ways, self.remapped = method, form, both_ways, set[int]()
        self.rope = spec_of(model)
        self.inv_freq = torch.tensor(self.rope.inv_freq, dtype=torch.float64) * (-1 if form.backwards else 1)

    def __call__(
        self,
        module: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor,
        scaling: float | None = None,
        s_aux: Tensor | None = None,
        softcap: float | None = None,
        sliding_window: int | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        is_whole = sliding_window is None and getattr(module, "layer_type", "full_attention") == "full_attention"
        bases = getattr(module.config, "layer_rope_theta", None)
        reaches = is_whole and getattr(module, "use_rope", True) and (bases is None or bases[module.layer_idx] != 0)
        if reaches:
            self.remapped.add(getattr(module, "layer_idx", 0))
        seen = (mask[..., : k.shape[2]] == 0).expand(len(q), 1, q.shape[2], k.shape[2])[:, 0]
        rows, shared, first = [], q.shape[1] // k.shape[1], (getattr(module, "layer_idx", 0) or 0) * k.shape[1]
        inputs = [self.unrotated(x.double()) if reaches else x.double() for x in (q, k)]
        how: dict[str, Any] = {"scale": q.shape[3] ** -0.5 if scaling is None else scaling, "softcap": softcap}
        for row, visible in enumerate(seen):
            slots = visible.any(0).nonzero()[:, 0]  # of tokens; no query sees padding
            visible = visible[slots][:, slots, None]
            outs = []
            for group in range(k.shape[1]):
                heads = slice(group * shared, (group + 1) * shared)
                apart, weight, inv_freq = self.positions(first + group, len(slots), reaches)
                tensors = [x[row, at][:, slots] for x, at in zip(inputs, (heads, slice(group, group + 1)), strict=True)]
                tensors = [
                    tensors[0] * self.sharpness(len(slots)),
                    tensors[1],
                    v[row, group : group + 1, slots].double(),
                ]
                sinks = None if s_aux is None else s_aux.double()[heads]
                apart = apart.masked_fill(~visible, torch.nan)
                outs.append(dense_attention(*tensors, apart, inv_freq, weight=weight, sinks=sinks, **how))
            out = torch.cat(outs)
            rows.append(out.new_zeros(*q[row].shape[:2], v.shape[3]).index_copy(1, slots, out))
        return torch.stack(rows).to(q.dtype).transpose(1, 2).contiguous(), None

    def positions(self, group: int, length: int, reaches: bool) -> tuple[Tensor, Tensor | None, Tensor]:
        """Relative positions of a group of heads, how much each pair counts, and the frequencies of both."""
        if not reaches:
            places = torch.arange(length, dtype=torch.float64)
            return (places[:, None] - places)[..., None], None, self.inv_freq[:0]
        by = self.method
        if isinstance(by, RetrievalHeads) and group not in by.heads:
            by = by.near_method
        target = by.target_length(TRAINED_LENGTH)
        apart = relative_positions(by, self.rope, target, length, both_ways=self.both_ways)
        return apart, weights(by, self.rope, target, both_ways=self.both_ways)[:length, :length], self.inv_freq

    def sharpness(self, length: int) -> float:
        """Of tokens that all see the whole text: one temperature for all of them."""
        if self.method.temperature != "logn" or not self.both_ways:
            return 1.0
        return max(1.0, math.log(length) / math.log(TRAINED_LENGTH))

    def unrotated(self, x: Tensor) -> Tensor:
        """Queries or keys before the model rotated each by its slot, with what rotates in front, in halves."""
        pairs = len(self.inv_freq)
        start = x.shape[-1] - 2 * pairs if self.form.tail else 0
        part, rest = x[..., start : start + 2 * pairs], torch.cat([x[..., :start], x[..., start + 2 * pairs :]], -1)
        if self.form.interleaved:
            part = part.unflatten(-1, (pairs, 2)).transpose(-1, -2).flatten(-2)
        angles = torch.arange(x.shape[-2], dtype=torch.float64)[:, None] * self.inv_freq
        a, b = part.chunk(2, -1)
        return torch.cat([a * angles.cos() + b * angles.sin(), b * angles.cos() - a * angles.sin(), rest], -1)


@contextlib.contextmanager
def dense(
    model: PreTrainedModel, method: RemapMethod, form: RotationForm | None = None, *, both_ways: bool = False
) -> Iterator[Dense]:
    """A model without an extension, with dense attention by the positions of a method."""
    oracle = Dense(model, method, form or RotationForm(), both_ways=both_ways)
    AttentionInterface.register("oracle", oracle)
    AttentionMaskInterface.register("oracle", eager_mask)
    before, model.config._attn_implementation_internal = model.config._attn_implementation, "oracle"
    try:
        yield oracle
    finally:
        model.config._attn_implementation_internal = before
