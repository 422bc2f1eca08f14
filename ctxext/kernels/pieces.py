"""Attention in pieces: each region of pairs of tokens has other positions of queries and keys.

Every method that gives distant tokens positions known from training has this form. An ordinary kernel computes a piece
on rectangles without a mask (``ctxext.kernels.regions``), and also returns the logarithm of the sum of exponentials
of each query's scores. With it, the parts of a query are merged exactly::

    lse = log(sum over parts of exp(lse_part))            out = sum over parts of exp(lse_part - lse) * out_part

A piece whose keys have a weight other than 1 adds its logarithm to ``lse_part``, at no further cost. A sink (a learned
score of each head, which takes a share of the softmax and gives nothing) is a part with an output of 0, merged last.

A *region* of pairs and its rotations make a *piece*. Each *tile* of queries is merged at once. The share of a
piece in a tile is cut into *parts*, and each part is one call of a kernel. Here for near keys (n) up to 2 tokens back,
and far keys (f)::

    keys      0 1 2 3 4 5
    tile 1    n . . . . .    one part: the near piece, causal
              n n . . . .
              n n n . . .
    tile 2    f n n n . .    three parts: the far piece, causal; the near piece, fading (keys 1, 2) and causal (3 to 5)
              f f n n n .
              f f f n n n

A *span* is a block of rows and slots at consecutive positions. Where a layout has none, the parts of a tile get masks.

Regions do not overlap, so the kernels compute as many scores as plain causal attention. Queries and keys arrive rotated
by the model itself. Rotations compose, so a piece rotates them further, by the *difference* of the two positions, and a
cache holds the same keys as in transformers.

Gradients: a kernel's log-sum-exp carries none, so autograd would take the weights of the merge for constants and be
silently wrong. Here the backward of each part gets the *merged* out and lse, from which it computes the weights of the
whole softmax; ring attention does the same (Liu et al., arXiv:2310.01889).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ctxext.kernels.base import AttentionBackend, Call, Need, runs_triton, without_autocast
from ctxext.kernels.blocks import QKV, Output, PartRule
from ctxext.kernels.layout import Layout, Span
from ctxext.kernels.regions import FADING, FULL, rectangles, tiles
from ctxext.kernels.spans import Extent
from ctxext.methods.remap import PositionMap, Region

TILE = 1 << 15
"""Rows of queries (one per head) that a CPU merges at once. The fewer tiles, the fewer operations, each of which waits
for a thread beside busy processes; the more rows, the more memory."""

ACCELERATOR_TILE = 1 << 17
"""Rows of queries that an accelerator merges at once; fewer would leave it idle."""

BAND_ROWS = 1 << 20
"""Rows of queries that a backend with bands computes at once: 32 heads of 32,768 tokens. Longer texts take the heads in
turn, so that rotated queries and the output of a part have at most that many rows."""

SHORTEST = 256
"""Least number of queries in a tile: shorter tiles would only cost kernel calls."""

SHARE = 2
"""Rotated keys take at most this fraction (1 / SHARE) of the output's memory, or one key head at a time."""


class RotationForm(NamedTuple):
    """The dimensions of a head that rotate, and how.

    Args:
        interleaved: True if dimensions ``2 i, 2 i + 1`` are pair ``i``, as in GPT-J; else they are ``i, i + pairs``, as
            in Llama.
        tail: True if the last dimensions rotate, as in latent attention; else the first ones. The others stay.
        backwards: True if a later position turns the other way round, as in nanochat.
    """

    interleaved: bool = False
    tail: bool = False
    backwards: bool = False


class Turn:
    """A rotation of queries or keys from the position that the model rotated them for to another position.

    Angles are computed once, so that all layers of a forward pass share them.

    Args:
        where: the map from own positions to other ones.
        positions: own positions, ``[rows, seq]``; one row if all rows are equal.
        inv_freq: radians per token, float64, one for each pair of dimensions that rotates.
    """

    def __init__(
        self,
        where: PositionMap,
        positions: Int[Tensor, "rows seq"],
        inv_freq: Float[Tensor, " pairs"],
        *,
        form: RotationForm,
        dtype: torch.dtype,
    ) -> None:
        self.where, self.positions, self.inv_freq = where, positions, -inv_freq if form.backwards else inv_freq
        self.form, self.dtype = form, dtype
        self._parts: dict[tuple[int, int, int, int], tuple[Tensor, Tensor]] = {}

    def __call__(
        self,
        x: Float[Tensor, "batch heads seq head_dim"],
        rows: Extent,
        tokens: Extent,
        *,
        back: bool = False,
    ) -> Float[Tensor, "batch heads seq head_dim"]:
        """Rotate ``x``, which holds some rows and tokens, each as (start, stop); ``back`` reverses the rotation."""
        if runs_triton(x.device):
            from ctxext.kernels._turn_kernel import turn

            turned: Tensor = turn(x, *self._angles(rows, tokens), self.form.interleaved, self.form.tail, back)
            return turned
        # Rotation is computed in a wider dtype, so only for some tokens at a time.
        step = max(1, _rows(x.device.type) // x.shape[1])
        if x.shape[2] <= step:
            return self._turned(x, rows, tokens, back)
        turned = torch.empty_like(x)
        for start in range(0, x.shape[2], step):
            stop = min(start + step, x.shape[2])
            there = tokens[0] + start, tokens[0] + stop
            turned[:, :, start:stop] = self._turned(x[:, :, start:stop], rows, there, back)
        return turned

    def _turned(self, x: Tensor, rows: Extent, tokens: Extent, back: bool) -> Tensor:
        """Return ``x``, rotated."""
        cos, sin = self._angles(rows, tokens)
        wide = 2 * sin.shape[-1]
        start = x.shape[-1] - wide if self.form.tail else 0
        # The dimension of the two numbers of a pair, a complex number, and the shape of all pairs.
        dim, shape = (-1, (wide // 2, 2)) if self.form.interleaved else (-2, (2, wide // 2))
        pairs = x[..., start : start + wide].to(self.dtype).reshape(*x.shape[:-1], *shape)
        turned = pairs * cos.unsqueeze(dim)
        turned.select(dim, 0).addcmul_(pairs.select(dim, 1), sin, value=1 if back else -1)
        turned.select(dim, 1).addcmul_(pairs.select(dim, 0), sin, value=-1 if back else 1)
        result = turned.flatten(-2).to(x.dtype)
        return torch.cat([x[..., :start], result, x[..., start + wide :]], -1) if wide < x.shape[-1] else result

    def angles(self, length: int) -> tuple[Tensor, Tensor]:
        """Return cosine and sine of the first tokens of all rows, ``[rows, 1, length, pairs]``."""
        return self._angles((0, self.positions.shape[0]), (0, length))

    def _angles(self, rows: Extent, tokens: Extent) -> tuple[Tensor, Tensor]:
        """Return cosine and sine, ``[rows, 1, tokens, pairs]``, of one row if all rows are equal."""
        rows = rows if self.positions.shape[0] > 1 else (0, 1)
        key = (*rows, *tokens)
        if key not in self._parts:
            places = self.positions[slice(*rows), slice(*tokens)]
            target = self.where(places.flatten())
            target = target.view(*places.shape, *target.shape[1:])
            shift = (target if target.ndim == 3 else target[..., None]) - places[..., None]
            angles = shift * self.inv_freq
            self._parts[key] = (angles.cos().to(self.dtype)[:, None], angles.sin().to(self.dtype)[:, None])
        return self._parts[key]


class TurnedPiece(NamedTuple):
    """A region, the rotations of its queries and keys (None for none), and the weight of each key."""

    region: Region
    query: Turn | None
    key: Turn | None
    weight: float = 1.0

    @property
    def bias(self) -> float:
        """Bias of each score, the logarithm of the weight."""
        return math.log(self.weight)


class Part(NamedTuple):
    """One call of a kernel: queries and keys by their slots, as (start, stop).

    Args:
        query: slots of queries, inside the slots of the tile.
        kind: ``FULL``, ``CAUSAL`` or ``FADING``, see ``ctxext.kernels.regions``; ``FULL`` with a mask.
        mask: visible pairs, bool ``[rows, 1, query, key]``; None if ``kind`` decides.
        window: keys that a query of a causal part sees, up to the key of the query itself; None for all.
    """

    piece: int
    query: Extent
    key: Extent
    kind: str
    mask: Tensor | None = None
    window: int | None = None


class Tile(NamedTuple):
    """Queries that are merged together: their rows and slots, as (start, stop), and their kernel calls."""

    rows: Extent
    query: Extent
    parts: tuple[Part, ...]

    def place_of(self, part: Part) -> slice:
        """Return the place of a part's queries in the tile."""
        return slice(part.query[0] - self.query[0], part.query[1] - self.query[0])


def tiled(layout: Layout, regions: Sequence[Region], size: int, *, bands: bool = False) -> tuple[Tile, ...]:
    """Return the kernel calls that compute ``regions`` on a layout; with ``bands``, a call for each whole band.

    Blocks of consecutive positions are cut into rectangles without masks. Other layouts (positions with gaps, as in
    skip-wise training) take a masked call for each tile and region. That is right for any layout, but costs a mask of
    one byte per pair, and computes each score once per piece.
    """
    plan: list[Tile] = []
    runs = _runs(layout)
    if runs is None:
        return tuple(_masked(layout, regions, size))
    for (rows, query, _), held in runs:
        stop = held[-1].stop
        first = stop - (query[1] - query[0])  # the position of the first query
        moved = query[0] - first  # from a position to the slot of its query
        for start, end in tiles(regions, first, stop, size, bands=bands):
            parts = []
            for index, region in enumerate(regions):
                for q, k, kind, window in rectangles(region, start, end, stop, bands=bands):
                    slots = _slots(held, k)
                    if slots is None:  # some keys that these queries see are missing
                        return tiled(layout, regions, size) if bands else tuple(_masked(layout, regions, size))
                    parts.append(Part(index, (q[0] + moved, q[1] + moved), slots, kind, window=window))
            plan.append(Tile(rows, (start + moved, end + moved), tuple(parts)))
    return tuple(plan)


class _Held(NamedTuple):
    """A run of keys at consecutive positions ``start .. stop``, the first of them in ``slot``."""

    start: int
    stop: int
    slot: int


def _slots(held: Sequence[_Held], positions: Extent) -> Extent | None:
    """Return the slots of keys at these positions, (start, stop); None if they are not contiguous."""
    for start, stop, slot in held:
        if start <= positions[0] and positions[1] <= stop:
            return positions[0] - start + slot, positions[1] - start + slot
    return None


def _runs(layout: Layout) -> list[tuple[Span, list[_Held]]] | None:
    """Return the blocks of a layout, each with its runs of keys at consecutive positions, from position 0 on.

    Return None if the layout has no blocks, or queries outside the last run of their block.
    """
    if layout.spans is None:
        return None
    if layout.consecutive:
        if not _starts_at_zero(layout):
            return None
        return [(span, [_Held(0, span.key[1] - span.key[0], span.key[0])]) for span in layout.spans]
    blocks = []
    for rows, query, key in layout.spans:
        places = layout.key_positions[rows[0] : rows[1], key[0] : key[1]].cpu()
        distinct, counts = torch.unique_consecutive(places, dim=0, return_counts=True)
        row = rows[0]
        for places_of_some, count in zip(distinct, counts.tolist(), strict=True):
            cuts = [0, *(places_of_some.diff() != 1).nonzero()[:, 0].add(1).tolist(), key[1] - key[0]]
            starts = places_of_some[cuts[:-1]].tolist()
            held = [
                _Held(start, start + stop - index, index + key[0])
                for start, index, stop in zip(starts, cuts, cuts[1:], strict=False)
            ]
            if held[0].start or held[-1].stop - held[-1].start < query[1] - query[0]:
                return None
            blocks.append((Span((row, row + count), query, key), held))
            row += count
    return blocks


def _starts_at_zero(layout: Layout) -> bool:
    """Return whether the first key of every span is at position 0, so that positions can be counted by slots."""
    if layout.from_zero:
        return True
    firsts = [layout.key_positions[rows[0] : rows[1], key[0]] for rows, _, key in layout.spans or ()]
    return not firsts or not bool(torch.cat(firsts).any())


def _masked(layout: Layout, regions: Sequence[Region], size: int) -> list[Tile]:
    plan = []
    keys = layout.key_positions[:, None, None]
    for start in range(0, layout.query_length, size):
        stop = min(layout.query_length, start + size)
        queries = layout.query_positions[:, None, start:stop, None]
        visible = layout.visible(queries=slice(start, stop))[:, None]
        parts = []
        for index, region in enumerate(regions):
            mask = visible & region.holds(queries, keys)
            seen = mask.flatten(0, 2).any(0).nonzero()
            if len(seen):
                slots = int(seen[0]), int(seen[-1]) + 1
                mask = mask[..., slice(*slots)]
                parts.append(Part(index, (start, stop), slots, FULL, None if bool(mask.all()) else mask))
        if parts:  # queries that see nothing, such as padding, are 0 already
            plan.append(Tile((0, layout.batch), (start, stop), tuple(parts)))
    return plan


def attend_pieces(
    backend: AttentionBackend,
    call: Call,
    pieces: Sequence[TurnedPiece],
    *,
    settled: int = 0,
    sinks: Float[Tensor, " heads"] | None = None,
    tile: int | None = None,
) -> Output:
    """Compute attention in ``pieces``, differentiable in q, k, v and sinks.

    Args:
        backend: the backend of the parts, which serves ``call.need`` with ``lse``.
        call: the call of plain attention, with q and k as the model rotated them.
        pieces: disjoint regions. Pairs outside of them are not visible.
        settled: the number of leading key slots with the rotation of the last piece already. Only pieces with the same
            rotation of keys may read them. Without a gradient only.
        sinks: the score of each query head's sink, as in gpt-oss; None for no sinks.
        tile: queries that are merged at once, at least 1; None chooses by backend and device.
    """
    whole = tile is None and backend.bands(call.need) and call.need.sees == "past"
    plan = _plan(call, pieces, tile, bands=whole)
    key_heads = _key_heads_at_once(call.need, pieces, BAND_ROWS if whole else None)
    rule = PartRule(call.scale, softcap=call.softcap)
    run = _Run(backend, tuple(pieces), plan, rule, settled, key_heads, whole)
    with without_autocast(call.q.device):
        if call.need.training or (sinks is not None and sinks.requires_grad and torch.is_grad_enabled()):
            out: Tensor = _Differentiable.apply(run, call.q, call.k, call.v, sinks)  # type: ignore[no-untyped-call]
            return out
        return run.forward(call.q, call.k, call.v, sinks)[0]


def need_in_pieces(call: Call, pieces: Sequence[TurnedPiece]) -> Need:
    """Return the requirements of a call for the backend that computes its parts.

    Blocks of plain attention need no mask, but their pieces do if positions have gaps. A part of a piece is causal or
    full by itself, whatever the tokens of the call see.
    """
    if call.need.order == "external":
        return call.need
    plan = _plan(call, pieces, None)
    is_masked = any(part.mask is not None for tile in plan for part in tile.parts)
    return replace(call.need, sees="past", order="free" if is_masked else call.need.order)


def _plan(call: Call, pieces: Sequence[TurnedPiece], tile: int | None, *, bands: bool = False) -> tuple[Tile, ...]:
    """Return the kernel calls, shared by all layers of a forward pass."""
    regions = [piece.region for piece in pieces]
    heads = call.need.heads // call.need.kv_heads * _key_heads_at_once(call.need, pieces)
    size = tile or max(SHORTEST, _rows(call.need.device) // heads)
    key = ("tiles", tuple(regions), size, bands)
    return call.layout.memo(key, lambda: tiled(call.layout, regions, size, bands=bands))


def _key_heads_at_once(need: Need, pieces: Sequence[TurnedPiece], rows: int | None = None) -> int:
    """Return the number of key heads to compute at once: all, unless their rotated keys would take much memory.

    If ``rows`` is given, that many queries, or keys, of their heads are computed at once.
    """
    if rows is not None:
        longest = max(need.heads // need.kv_heads * need.query_length, need.key_length)
        return min(need.kv_heads, max(1, rows // longest))
    rotated = len({piece.key for piece in pieces if piece.key is not None})
    if need.query_length <= SHORTEST or not rotated:
        return need.kv_heads
    return min(need.kv_heads, max(1, need.heads * need.query_length // (SHARE * rotated * need.key_length)))


def _rows(device: str) -> int:
    """Return the number of rows of queries or keys (one per head) to process at once."""
    return TILE if device == "cpu" else ACCELERATOR_TILE


def _cut(x: Tensor, rows: Extent, heads: Extent, tokens: Extent) -> Tensor:
    """Return some rows, heads and tokens of a tensor, each as (start, stop)."""
    for dim, (start, stop) in enumerate((rows, heads, tokens)):
        if stop - start < x.shape[dim]:
            x = x.narrow(dim, start, stop - start)
    return x


class _Keys:
    """Keys rotated for each piece, on first use, and once for all pieces with the same rotation.

    Keys that are settled need no rotation. While a text is generated, every key ends up so far behind the newest query
    that only the last piece (the far one) reads it, from now on and for good. So the cache holds the oldest keys as the
    last piece rotates them, and a step rotates only the keys that lie near::

        slots       0 ........ settled ............ stop
        the cache   as the last piece | as the model rotated them
    """

    def __init__(self, k: Tensor, pieces: Sequence[TurnedPiece], plan: Sequence[Tile], settled: int) -> None:
        self.k, self.pieces, self.settled = k, pieces, settled
        self.used: dict[Turn | None, int] = {}
        for tile in plan:
            for part in tile.parts:
                turn = pieces[part.piece].key
                # Keys behind the last one that any part reads with this rotation need not be rotated.
                self.used[turn] = max(self.used.get(turn, 0), part.key[1])
        self._turned: dict[Turn, Tensor] = {}

    def __call__(self, part: Part, rows: Extent, heads: Extent) -> Tensor:
        """Return the keys of a part, of some rows and key heads, rotated for its piece."""
        turn = self.pieces[part.piece].key
        if turn is None or (part.key[1] <= self.settled and turn is self.pieces[-1].key):
            return _cut(self.k, rows, heads, part.key)
        if turn not in self._turned:
            self._turned[turn] = self._turn(turn)
        return _cut(self._turned[turn], rows, heads, part.key)

    def _turn(self, turn: Turn) -> Tensor:
        stop = self.used[turn]
        start = min(self.settled, stop) if turn is self.pieces[-1].key else 0
        turned = turn(self.k[:, :, start:stop], (0, self.k.shape[0]), (start, stop))
        return torch.cat([self.k[:, :, :start], turned], 2) if start else turned


@dataclass(frozen=True, eq=False)
class _Run:
    """The settings that forward and backward of one call share."""

    backend: AttentionBackend
    pieces: tuple[TurnedPiece, ...]
    plan: tuple[Tile, ...]
    rule: PartRule
    settled: int
    key_heads: int
    whole: bool

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the merged output, ``[batch, heads, query, value_dim]``, and its log-sum-exp."""
        batch, heads, query = q.shape[:3]
        tile, parts = self.plan[0] if self.plan else None, [part for tile in self.plan for part in tile.parts]
        if tile and len(parts) == 1 and sinks is None and query <= SHORTEST:  # a short cut: there is nothing to merge
            part, rows, all_heads = parts[0], tile.rows, (0, k.shape[1])
            if rows == (0, batch) and part.query == (0, query):
                k_part, v_part = self._keys(k)(part, rows, all_heads), _cut(v, rows, all_heads, part.key)
                out, lse = self._forward(part, self._queries(q, tile)(part), k_part, v_part)
                bias = self.pieces[part.piece].bias
                return out, lse + bias if bias else lse
        # Memory in the order that the layers expect, so that they need no copy.
        out = torch.zeros(batch, query, heads, v.shape[3], dtype=q.dtype, device=q.device).transpose(1, 2)
        precise = torch.promote_types(q.dtype, torch.float32)
        lse = torch.full((batch, query, heads), -math.inf, dtype=precise, device=q.device).transpose(1, 2)
        if sinks is not None:
            lse.copy_(sinks.detach()[:, None])
        for query_heads, key_heads in _heads(heads, k.shape[1], self.key_heads * (heads // k.shape[1])):
            self._forward_heads(
                q[:, query_heads],
                k[:, key_heads],
                v[:, key_heads],
                out[:, query_heads],
                lse[:, query_heads],
            )
        return out, lse

    def backward(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad: Tensor) -> QKV:
        """Return gradients of q, k and v."""
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        for query_heads, key_heads in _heads(q.shape[1], k.shape[1], self.key_heads * (q.shape[1] // k.shape[1])):
            dq[:, query_heads], dk[:, key_heads], dv[:, key_heads] = self._backward_heads(
                q[:, query_heads],
                k[:, key_heads],
                v[:, key_heads],
                out[:, query_heads],
                lse[:, query_heads],
                grad[:, query_heads],
            )
        return dq, dk, dv

    def _keys(self, k: Tensor) -> _Keys:
        return _Keys(k, self.pieces, self.plan, self.settled)

    def _forward_heads(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> None:
        """Compute ``forward`` of some heads: merge them into ``out`` and ``lse``."""
        keys = self._keys(k)
        for tile in self.plan:
            # The plain beginning of a text may be one long tile.
            most = (BAND_ROWS if self.whole else _rows(q.device.type)) // (tile.query[1] - tile.query[0])
            for query_heads, key_heads in _heads(q.shape[1], k.shape[1], most):
                here = (slice(*tile.rows), query_heads, slice(*tile.query))
                # Many parts are merged in the precision of the log-sum-exp, a few in the precision of the output.
                total = out[here] if self.whole else out[here].to(lse.dtype)
                self._forward_tile(q[here], keys, v, tile, (key_heads.start, key_heads.stop), total, lse[here])
                if total.dtype != out.dtype:
                    out[here] = total

    def _forward_tile(
        self, q: Tensor, keys: _Keys, v: Tensor, tile: Tile, key_heads: Extent, out: Tensor, lse: Tensor
    ) -> None:
        """Compute ``forward`` of one tile, for some query heads and the key heads that they read."""
        queries = self._queries(q, tile)
        for part in tile.parts:
            k_part, v_part = keys(part, tile.rows, key_heads), _cut(v, tile.rows, key_heads, part.key)
            here = (slice(None), slice(None), tile.place_of(part))
            result = self._forward(part, queries(part), k_part, v_part)
            _merge_into(out[here], lse[here], *result, self.pieces[part.piece].bias)
            del result  # so that two results are not held at once

    def _backward_heads(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad: Tensor) -> QKV:
        """Compute ``backward`` of some heads, in the precision of ``lse``."""
        dq, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (q, v))
        dk = {piece.key: torch.zeros_like(k, dtype=lse.dtype) for piece in self.pieces}
        keys = self._keys(k)
        for tile in self.plan:
            rows = slice(*tile.rows)
            queries = self._queries(q[rows, :, slice(*tile.query)], tile)
            turned = {part.piece: torch.zeros_like(dq[rows, :, slice(*tile.query)]) for part in tile.parts}
            for part in tile.parts:
                here = (rows, slice(None), slice(*part.query))
                there = (rows, slice(None), slice(*part.key))
                k_part = keys(part, tile.rows, (0, k.shape[1]))
                grads = self._backward(part, queries(part), k_part, v[there], out[here], lse[here], grad[here])
                turned[part.piece][:, :, tile.place_of(part)] += grads[0]
                dk[self.pieces[part.piece].key][there] += grads[1]
                dv[there] += grads[2]
            for piece, d_query in turned.items():
                turn = self.pieces[piece].query
                back = d_query if turn is None else turn(d_query, tile.rows, tile.query, back=True)
                dq[rows, :, slice(*tile.query)] += back
        everything = (0, k.shape[0]), (0, k.shape[2])
        total = sum(part if turn is None else turn(part, *everything, back=True) for turn, part in dk.items())
        return dq, torch.as_tensor(total), dv

    def _queries(self, q: Tensor, tile: Tile) -> Callable[[Part], Tensor]:
        """Return the function from a part of a tile to its rotated queries; each rotation is computed once."""
        turned: dict[Turn | None, Tensor] = {None: q}

        def queries(part: Part) -> Tensor:
            turn = self.pieces[part.piece].query
            if turn is not None and turn not in turned:
                turned[turn] = turn(q, tile.rows, tile.query)
            return turned[turn][:, :, tile.place_of(part)]

        return queries

    def _forward(self, part: Part, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = _as_causal(part, q, k, v)
        out, lse = _as_causal(part, *self.backend.with_lse(q, k, v, self._rule(part)))
        return out, lse

    def _backward(
        self, part: Part, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad: Tensor
    ) -> tuple[Tensor, ...]:
        """Call the backward of a kernel, which computes scores without the bias, so ``lse`` must lack it too."""
        bias = self.pieces[part.piece].bias
        lse = lse - bias if bias else lse
        q, k, v, out, lse, grad = _as_causal(part, q, k, v, out, lse, grad)
        return _as_causal(part, *self.backend.gradients(q, k, v, out, lse, grad, self._rule(part)))

    def _rule(self, part: Part) -> PartRule:
        """Return the rule of a kernel's call; a fading part is causal when its tokens are in reverse order."""
        return self.rule._replace(causal=part.kind != FULL, mask=part.mask, window=part.window)


def _heads(heads: int, kv_heads: int, most: int) -> Iterator[tuple[slice, slice]]:
    """Yield slices of at most ``most`` query heads (at least one), and of the key heads that they read."""
    shared = heads // kv_heads
    if most >= shared:
        for start in range(0, kv_heads, most // shared):
            stop = min(start + most // shared, kv_heads)
            yield slice(start * shared, stop * shared), slice(start, stop)
        return
    for head in range(kv_heads):
        stop = (head + 1) * shared
        for start in range(head * shared, stop, max(1, most)):
            yield slice(start, min(start + max(1, most), stop)), slice(head, head + 1)


def _as_causal(part: Part, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return tensors of a part, of a fading one in reverse order, which turns its square into a causal one."""
    return tuple(x.flip(2) for x in tensors) if part.kind == FADING else tensors


def _merge_into(total: Tensor, total_lse: Tensor, out: Tensor, lse: Tensor, bias: float) -> None:
    """Merge a part into a total, in place; the first part replaces a total that has no weight yet."""
    if runs_triton(total.device):
        from ctxext.kernels._merge_kernel import merge

        merge(total, total_lse, out, lse, bias)
        return
    lse = lse + bias if bias else lse
    # exp(lse) / (exp(lse) + exp(total_lse)), without an overflow.
    share = torch.sigmoid(lse - total_lse).nan_to_num_(0.0)[..., None]  # NaN where neither of the two sees a key
    if total.dtype == lse.dtype:
        total.lerp_(out.to(lse.dtype), share)
    else:
        total.copy_(torch.lerp(total.to(lse.dtype), out.to(lse.dtype), share))
    total_lse.copy_(torch.logaddexp(total_lse, lse))


class _Differentiable(torch.autograd.Function):
    """The whole call as one autograd function: it saves its inputs, out and lse, and rotates again in the backward."""

    @staticmethod
    def forward(ctx: Any, run: _Run, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        out, lse = run.forward(q, k, v, sinks)
        ctx.run = run
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, Tensor, Tensor, Tensor | None]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        with without_autocast(grad.device):
            grads = ctx.run.backward(q, k, v, out, lse, grad)
        if sinks is None:
            return None, *grads, None
        # The weight of a sink lowers the output by its share of it.
        share = (sinks.to(lse.dtype)[:, None] - lse).exp()
        lowered = (out.to(lse.dtype) * grad.to(lse.dtype)).sum(-1)
        return None, *grads, -(share * lowered).sum((0, 2)).to(sinks.dtype)
