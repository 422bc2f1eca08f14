"""Attention in pieces: pairs of tokens fall into regions, and in each region queries and keys stand at other positions.

Every method that lets a model read further by giving distant tokens positions that it knows is of this form. A piece
is computed by an ordinary kernel on rectangles without a mask (``ctxext.attention.regions``), which also returns the
logarithm of the sum of exponentials of each query's scores; with it, the parts of a query are merged exactly::

    lse = log(sum over parts of exp(lse_part))            out = sum over parts of exp(lse_part - lse) * out_part

A piece whose keys count for less than others adds the logarithm of that to ``lse_part``, and costs nothing more.

Regions do not overlap, so the kernels see as many scores as plain causal attention does. Queries and keys arrive
rotated by the model itself; rotations compose, so a piece turns them on by the *difference* of the two positions, and a
cache keeps what transformers puts there.

Gradients: a kernel's log-sum-exp carries none, so autograd would take the weights of the merge for constants and be
wrong without a word. Here the backward of each part is given the *merged* out and lse, with which the weights of the
part are those of the whole softmax; ring attention does the same (Liu et al., arXiv:2310.01889).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ctxext.attention.base import AttentionBackend, Call, Need, without_autocast
from ctxext.attention.layout import Layout, Span
from ctxext.attention.regions import CAUSAL, FADING, FULL, rectangles, tiles
from ctxext.spec import PositionMap, Region

TILE = 2048
"""Rows of queries, one for each head, that a thread of the CPU merges at once."""

ACCELERATOR_TILE = 1 << 17
"""The same for all of an accelerator, which is idle with less."""

SHORTEST = 256
"""Queries that a kernel of the CPU takes at once: a tile of fewer would only cost calls."""

SHARE = 8
"""Turned keys take at most one part in so many of what the output takes, if need be one key head after the other."""

KEPT = 256
"""Tokens up to which angles are kept, for all layers of a step; those of a long text are as large as its keys."""


class Turn:
    """A rotation of queries or keys that were rotated for their own position already: on to another one.

    The angles of few tokens are kept, so that all layers of a step share them; those of many are computed anew.

    Args:
        where: the other position of each token.
        positions: its own, ``[rows, seq]``; one row where all rows are alike.
        inv_freq: radians per token, float64, one for each pair of dimensions that rotates.
        interleaved: whether dimensions ``2 i, 2 i + 1`` are pair ``i``, as in GPT-J; else they are ``i, i + pairs``, as
            in Llama. Dimensions beyond ``2 * pairs`` do not rotate.
        dtype: what to rotate in.
    """

    def __init__(
        self,
        where: PositionMap,
        positions: Int[Tensor, "rows seq"],
        inv_freq: Float[Tensor, " pairs"],
        *,
        interleaved: bool,
        dtype: torch.dtype,
    ) -> None:
        self.where, self.positions, self.inv_freq = where, positions, inv_freq
        self.interleaved, self.dtype = interleaved, dtype
        self._parts: dict[tuple[int, int, int, int], tuple[Tensor, Tensor]] = {}

    def __call__(
        self,
        x: Float[Tensor, "batch heads seq head_dim"],
        rows: tuple[int, int],
        tokens: tuple[int, int],
        *,
        back: bool = False,
    ) -> Float[Tensor, "batch heads seq head_dim"]:
        """Rotate ``x``, which holds some rows and tokens, each as (start, stop); ``back`` undoes that."""
        turned = torch.empty_like(x)
        self.into(turned, x, rows, tokens, back=back)
        return turned

    def into(
        self, turned: Tensor, x: Tensor, rows: tuple[int, int], tokens: tuple[int, int], *, back: bool = False
    ) -> None:
        """Write into ``turned`` what a call returns."""
        # Rotation is computed in more bits than tokens have: not of all at once.
        step = max(1, _rows(x.device.type) // x.shape[1])
        for at in range(tokens[0], tokens[1], step):
            stop = min(at + step, tokens[1])
            here = slice(at - tokens[0], stop - tokens[0])
            self._into(turned[:, :, here], x[:, :, here], rows, (at, stop), back)

    def _into(self, turned: Tensor, x: Tensor, rows: tuple[int, int], tokens: tuple[int, int], back: bool) -> None:
        """Write ``x``, rotated, into ``turned``."""
        cos, sin = self._angles(rows if self.positions.shape[0] > 1 else (0, 1), tokens)
        sin = -sin if back else sin
        wide = 2 * cos.shape[-1]
        one, other = slice(0, wide // 2), slice(wide // 2, wide)
        if self.interleaved:
            one, other = slice(0, wide, 2), slice(1, wide, 2)
        a, b = x[..., one].to(self.dtype), x[..., other].to(self.dtype)
        turned[..., one] = (a * cos).addcmul_(b, sin, value=-1)
        turned[..., other] = (b * cos).addcmul_(a, sin)
        if wide < x.shape[-1]:
            turned[..., wide:] = x[..., wide:]

    def _angles(self, rows: tuple[int, int], tokens: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Cosine and sine, ``[rows, 1, tokens, pairs]``."""
        key = (*rows, *tokens)
        found = self._parts.get(key)
        if found is None:
            places = self.positions[slice(*rows), slice(*tokens)]
            moved = self.where(places.flatten())
            moved = moved.view(*places.shape, *moved.shape[1:])
            apart = (moved if moved.ndim == 3 else moved[..., None]) - places[..., None]
            angles = apart * self.inv_freq
            found = (angles.cos().to(self.dtype)[:, None], angles.sin().to(self.dtype)[:, None])
            if places.numel() <= KEPT:
                self._parts[key] = found
        return found


class TurnedPiece(NamedTuple):
    """A region, how queries and keys are turned in it (None where they stay as they are), and what each key counts."""

    region: Region
    query: Turn | None
    key: Turn | None
    weight: float = 1.0

    @property
    def bias(self) -> float:
        """What is added to each score."""
        return math.log(self.weight)


class Part(NamedTuple):
    """One call of a kernel: queries and keys by their slots, as (start, stop).

    Args:
        piece: index of the piece whose rotations hold.
        query: slots of queries, inside those of the tile.
        key: slots of keys.
        kind: ``FULL``, ``CAUSAL`` or ``FADING``, see ``ctxext.attention.regions``; ``FULL`` with a mask.
        mask: bool ``[rows, 1, query, key]``, who sees whom; None for what ``kind`` says.
    """

    piece: int
    query: tuple[int, int]
    key: tuple[int, int]
    kind: str
    mask: Tensor | None = None


class Tile(NamedTuple):
    """Queries that are merged together: rows and slots, as (start, stop), and the calls they take."""

    rows: tuple[int, int]
    query: tuple[int, int]
    parts: tuple[Part, ...]


def tiled(layout: Layout, regions: Sequence[Region], size: int) -> tuple[Tile, ...]:
    """The calls that compute ``regions`` on a layout.

    Blocks of consecutive positions are cut into rectangles without masks. Anything else (positions with gaps, as in
    skip-wise training) takes one masked call for each tile and region: right for any layout, at the price of a
    mask of one byte per pair, and of as many scores as there are pieces.
    """
    found: list[Tile] = []
    runs = _runs(layout)
    if runs is None:
        return tuple(_masked(layout, regions, size))
    for (rows, query, _), held in runs:
        stop = held[-1].stop
        first = stop - (query[1] - query[0])  # the position of the first query
        moved = query[0] - first  # from a position to the slot of its query
        for start, end in tiles(list(regions), first, stop, size):
            parts = []
            for index, region in enumerate(regions):
                for q, k, kind in rectangles(region, start, end):
                    slots = _slots(held, k)
                    if slots is None:  # keys between others are missing that its queries see
                        return tuple(_masked(layout, regions, size))
                    parts.append(Part(index, (q[0] + moved, q[1] + moved), slots, kind))
            found.append(Tile(rows, (start + moved, end + moved), tuple(parts)))
    return tuple(found)


class _Held(NamedTuple):
    """Keys at consecutive positions ``start .. stop``, of which the first lies in ``slot``."""

    start: int
    stop: int
    slot: int


def _slots(held: Sequence[_Held], positions: tuple[int, int]) -> tuple[int, int] | None:
    """The slots of keys at these positions, (start, stop); None where they do not lie side by side."""
    for start, stop, slot in held:
        if start <= positions[0] and positions[1] <= stop:
            return positions[0] - start + slot, positions[1] - start + slot
    return None


def _runs(layout: Layout) -> list[tuple[Span, list[_Held]]] | None:
    """The blocks of a layout, each with its keys where positions are consecutive, from position 0 on.

    None where it has none such, or where queries stand at other than consecutive positions.
    """
    if layout.spans is None:
        return None
    if layout.consecutive:
        if not _starts_at_zero(layout):
            return None
        return [(span, [_Held(0, span.key[1] - span.key[0], span.key[0])]) for span in layout.spans]
    found = []
    for rows, query, key in layout.spans:
        places = layout.key_positions[rows[0] : rows[1], key[0] : key[1]].cpu()
        alike, counts = torch.unique_consecutive(places, dim=0, return_counts=True)
        row = rows[0]
        for places_of_some, count in zip(alike, counts.tolist(), strict=True):
            cuts = [0, *(places_of_some.diff() != 1).nonzero()[:, 0].add(1).tolist(), key[1] - key[0]]
            starts = places_of_some[cuts[:-1]].tolist()
            held = [
                _Held(start, start + stop - at, at + key[0])
                for start, at, stop in zip(starts, cuts, cuts[1:], strict=False)
            ]
            if held[0].start or held[-1].stop - held[-1].start < query[1] - query[0]:
                return None
            found.append((Span((row, row + count), query, key), held))
            row += count
    return found


def _starts_at_zero(layout: Layout) -> bool:
    """Whether in every span the first key stands at position 0, so that positions can be counted by slots."""
    if layout.from_zero:
        return True
    firsts = [layout.key_positions[rows[0] : rows[1], key[0]] for rows, _, key in layout.spans or ()]
    return not firsts or not bool(torch.cat(firsts).any())


def _masked(layout: Layout, regions: Sequence[Region], size: int) -> list[Tile]:
    found = []
    keys = layout.key_positions[:, None, None]
    for start in range(0, layout.query_length, size):
        stop = min(layout.query_length, start + size)
        queries = layout.query_positions[:, None, start:stop, None]
        visible = layout.visible(queries=slice(start, stop))[:, None]
        parts = []
        for index, region in enumerate(regions):
            mask = visible & region.holds(queries, keys)
            if bool(mask.any()):
                parts.append(Part(index, (start, stop), (0, layout.key_length), FULL, mask))
        if parts:  # what sees nothing, such as a stretch of padding, is 0 already
            found.append(Tile((0, layout.batch), (start, stop), tuple(parts)))
    return found


def attend_pieces(
    backend: AttentionBackend, call: Call, pieces: Sequence[TurnedPiece], *, settled: int = 0, tile: int | None = None
) -> Float[Tensor, "batch heads query head_dim"]:
    """Attention whose pairs of tokens are told apart by ``pieces``. Differentiable in q, k and v.

    Args:
        backend: computes the parts; it serves ``call.need`` with ``lse``.
        call: as for plain attention: q and k as the model rotated them, and where they stand.
        pieces: disjoint regions. Pairs in none of them are not seen.
        settled: how many slots of keys, from the first on, are turned already as the last piece has them. No other
            piece reads them, unless it turns keys likewise. Without a gradient only.
        tile: queries that are merged at once, at least 1; None for what suits the device.
    """
    plan, some = _plan(call, pieces, tile), _key_heads_at_once(call.need)
    run = _Run(backend, tuple(pieces), plan, call.scale, settled, some)
    with without_autocast(call.q.device):
        if call.need.training:
            found: Tensor = _Differentiable.apply(run, call.q, call.k, call.v)  # type: ignore[no-untyped-call]
            return found
        return run.forward(call.q, call.k, call.v)[0]


def need_in_pieces(call: Call, pieces: Sequence[TurnedPiece]) -> Need:
    """What a call needs of the backend that computes its parts.

    Blocks of plain attention need no mask, but their pieces do where positions leave some out.
    """
    if call.need.order == "external":
        return call.need
    plan = _plan(call, pieces, None)
    is_masked = bool(plan) and any(part.mask is not None for part in plan[0].parts)  # all are, or none is
    return replace(call.need, order="free") if is_masked else call.need


def _plan(call: Call, pieces: Sequence[TurnedPiece], tile: int | None) -> tuple[Tile, ...]:
    """The calls of a kernel, the same for all layers of a forward."""
    regions = [piece.region for piece in pieces]
    size = tile or _queries_at_once(call.need, _key_heads_at_once(call.need))
    return call.layout.memo(("tiles", tuple(regions), size), lambda: tiled(call.layout, regions, size))


def _key_heads_at_once(need: Need) -> int:
    """Key heads whose turned keys are held at once: all for a few queries, few for long texts."""
    if need.query_length <= SHORTEST:
        return need.kv_heads
    return min(need.kv_heads, max(1, need.heads * need.query_length // (SHARE * need.key_length)))


def _queries_at_once(need: Need, key_heads: int) -> int:
    """Queries of a tile, when so many key heads are computed at once."""
    return max(SHORTEST, _rows(need.device) // (need.heads // need.kv_heads * key_heads))


def _rows(device: str) -> int:
    """Rows of queries or keys, one for each head, that are worked on at once."""
    return TILE * torch.get_num_threads() if device == "cpu" else ACCELERATOR_TILE


class _Keys:
    """Keys as each piece turns them; turned once for all pieces that turn them alike, when they are first asked for."""

    def __init__(self, k: Tensor, pieces: Sequence[TurnedPiece], plan: Sequence[Tile], settled: int) -> None:
        self.k, self.pieces, self.settled = k, pieces, settled
        self.used: dict[Turn | None, int] = {}
        for tile in plan:
            for part in tile.parts:
                turn = pieces[part.piece].key
                self.used[turn] = max(self.used.get(turn, 0), part.key[1])
        self._turned: dict[Turn, Tensor] = {}

    def __call__(self, piece: int, rows: tuple[int, int], start: int, stop: int) -> Tensor:
        """Keys ``start .. stop`` of some rows."""
        turn = self.pieces[piece].key
        if turn is None or (stop <= self.settled and turn is self.pieces[-1].key):
            return self.k[slice(*rows), :, start:stop]
        if turn not in self._turned:
            self._turned[turn] = self._turn(turn)
        return self._turned[turn][slice(*rows), :, start:stop]

    def _turn(self, turn: Turn) -> Tensor:
        stop = self.used[turn]
        start = min(self.settled, stop) if turn is self.pieces[-1].key else 0
        turned = torch.empty_like(self.k[:, :, :stop])
        turned[:, :, :start] = self.k[:, :, :start]
        turn.into(turned[:, :, start:], self.k[:, :, start:stop], (0, self.k.shape[0]), (start, stop))
        return turned


@dataclass(frozen=True, eq=False)
class _Run:
    """What stays the same between the forward and the backward of one call."""

    backend: AttentionBackend
    pieces: tuple[TurnedPiece, ...]
    plan: tuple[Tile, ...]
    scale: float
    settled: int
    key_heads: int

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, lse: bool = False) -> tuple[Tensor, Tensor | None]:
        """The merged output, ``[batch, heads, query, head_dim]``, and, where asked for, its log-sum-exp."""
        batch, heads, query, head_dim = q.shape
        # Laid out as the layers want it, so that they need not copy it.
        out = torch.zeros(batch, query, heads, head_dim, dtype=q.dtype, device=q.device).transpose(1, 2)
        precise = torch.promote_types(q.dtype, torch.float32)
        found = torch.full((batch, heads, query), -math.inf, dtype=precise, device=q.device) if lse else None
        for ours, keys in _heads(heads, k.shape[1], self.key_heads * (heads // k.shape[1])):
            part = None if found is None else found[:, ours]
            self._forward_heads(q[:, ours], k[:, keys], v[:, keys], out[:, ours], part)
        return out, found

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v."""
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        for ours, keys in _heads(q.shape[1], k.shape[1], self.key_heads * (q.shape[1] // k.shape[1])):
            dq[:, ours], dk[:, keys], dv[:, keys] = self._backward_heads(
                q[:, ours], k[:, keys], v[:, keys], out[:, ours], lse[:, ours], grad[:, ours]
            )
        return dq, dk, dv

    def _forward_heads(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None) -> None:
        """``forward`` of some heads, written into ``out`` and ``lse``."""
        keys = _Keys(k, self.pieces, self.plan, self.settled)
        for tile in self.plan:
            most = _rows(q.device.type) // (tile.query[1] - tile.query[0])  # the plain beginning may be a long tile
            for ours, theirs in _heads(q.shape[1], k.shape[1], most):
                here = (slice(*tile.rows), ours, slice(*tile.query))
                part = None if lse is None else lse[here]
                self._forward_tile(q[:, ours], keys, v, tile, theirs, out[here], part)

    def _forward_tile(
        self, q: Tensor, keys: _Keys, v: Tensor, tile: Tile, key_heads: slice, out: Tensor, lse: Tensor | None
    ) -> None:
        """``forward`` of one tile for the queries of some heads, and the heads of keys that they read."""
        rows, start = slice(*tile.rows), tile.query[0]
        queries = self._queries(q, tile)
        merged = _Merge(q[rows, :, slice(*tile.query)].shape, torch.promote_types(q.dtype, torch.float32), q.device)
        for part in tile.parts:
            k_part = keys(part.piece, tile.rows, *part.key)[:, key_heads]
            found = self._forward(part, queries(part), k_part, v[rows, key_heads, slice(*part.key)])
            merged.add(part.query[0] - start, part.query[1] - start, *found)
        out.copy_(merged.out)
        if lse is not None:
            lse.copy_(merged.lse)

    def _backward_heads(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``backward`` of some heads, in the precision of ``lse``."""
        dq, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (q, v))
        dk = {piece.key: torch.zeros_like(k, dtype=lse.dtype) for piece in self.pieces}
        keys = _Keys(k, self.pieces, self.plan, self.settled)
        for tile in self.plan:
            rows, start = slice(*tile.rows), tile.query[0]
            queries = self._queries(q, tile)
            turned = {part.piece: torch.zeros_like(dq[rows, :, slice(*tile.query)]) for part in tile.parts}
            for part in tile.parts:
                here = (rows, slice(None), slice(*part.query))
                there = (rows, slice(None), slice(*part.key))
                k_part = keys(part.piece, tile.rows, *part.key)
                grads = self._backward(part, queries(part), k_part, v[there], out[here], lse[here], grad[here])
                turned[part.piece][:, :, part.query[0] - start : part.query[1] - start] += grads[0]
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
        """Queries of a tile as each piece turns them, turned once."""
        here = q[slice(*tile.rows), :, slice(*tile.query)]
        turned: dict[int, Tensor] = {}

        def queries(part: Part) -> Tensor:
            if part.piece not in turned:
                turn = self.pieces[part.piece].query
                turned[part.piece] = here if turn is None else turn(here, tile.rows, tile.query)
            start = tile.query[0]
            return turned[part.piece][:, :, part.query[0] - start : part.query[1] - start]

        return queries

    def _forward(self, part: Part, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        bias = self.pieces[part.piece].bias
        if part.kind == FADING:
            out, lse = _flipped(*self.backend.with_lse(*_flipped(q, k, v), scale=self.scale, causal=True))
        else:
            out, lse = self.backend.with_lse(q, k, v, scale=self.scale, causal=part.kind == CAUSAL, mask=part.mask)
        return out, lse + bias if bias else lse

    def _backward(
        self, part: Part, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad: Tensor
    ) -> tuple[Tensor, ...]:
        """A kernel knows the scores without their bias: what it makes weights of them with lacks it too."""
        bias = self.pieces[part.piece].bias
        tensors = (q, k, v, out, lse - bias if bias else lse, grad)
        if part.kind == FADING:
            grads = self.backend.gradients(*_flipped(*tensors), scale=self.scale, causal=True)
            return _flipped(*grads)
        return self.backend.gradients(*tensors, scale=self.scale, causal=part.kind == CAUSAL, mask=part.mask)


def _heads(heads: int, kv_heads: int, most: int) -> Iterator[tuple[slice, slice]]:
    """Query heads, ``most`` of them or one at once, and the key heads that they read."""
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


def _flipped(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors with their tokens in reverse order, which makes a fading square a causal one."""
    return tuple(x.flip(2) for x in tensors)


class _Merge:
    """The running merge of the parts of one tile.

    What a kernel returned is only read: selective checkpointing keeps it, to give it back in the backward pass.
    """

    def __init__(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        self.is_empty, self.is_own = True, False
        self.out = self.lse = torch.empty(0)

    def add(self, start: int, stop: int, out: Tensor, lse: Tensor) -> None:
        """Merge a part that covers queries ``start .. stop`` of the tile."""
        if self.is_empty and stop - start == self.shape[2]:
            self.out, self.lse, self.is_empty = out, lse, False
            return
        if self.is_empty:
            self.out = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
            self.lse = torch.full(self.shape[:3], -math.inf, dtype=self.dtype, device=self.device)
            self.is_empty, self.is_own = False, True
        if not self.is_own:
            self.out, self.lse = (kept.to(self.dtype, copy=True) for kept in (self.out, self.lse))
            self.is_own = True
        old, lse = self.lse[:, :, start:stop], lse.to(self.dtype)
        new = torch.logaddexp(old, lse)
        # A query that has seen nothing so far has minus infinity minus minus infinity here, which is not a number.
        kept = torch.where(old == -math.inf, 0.0, (old - new).exp())[..., None]
        added = torch.where(lse == -math.inf, 0.0, (lse - new).exp())[..., None]
        self.out[:, :, start:stop].mul_(kept).addcmul_(out.to(self.dtype), added)
        self.lse[:, :, start:stop] = new


class _Differentiable(torch.autograd.Function):
    """The whole call as one step of autograd: it keeps q, k, v, out and lse, and turns anew in the backward."""

    @staticmethod
    def forward(ctx: Any, run: _Run, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = run.forward(q, k, v, lse=True)
        ctx.run = run
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, Tensor, Tensor]:
        with without_autocast(grad.device):
            return (None, *ctx.run.backward(*ctx.saved_tensors, grad))
