"""Attention of a few queries over a long cache, as in decoding: all pieces of a query under one softmax.

Pieces differ in the rotation of the query and, at most in two ways, in that of the keys. So the query is rotated once
for each piece, and the rows of all its forms meet every key in one product. Of each key, the row of the piece that
serves the pair counts, and the others get a score of minus infinity::

    rows     [piece 0 | piece 1 | ...] of each query head            one product reads every key once
    scores   rows @ keys + bias       bias: log weight of the piece, minus infinity for pairs of other pieces
    out      softmax over all pieces and keys, times the values, summed over pieces

Nothing is merged by log-sum-exp, and no value is read on the host, so that a graph can hold a step: lengths and borders
are tensors, and shapes are those of the cache. On CUDA one Triton kernel does the same (``step_kernel``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, UInt8
from torch import Tensor
from torch.nn.functional import pad

from ctxext.attention.base import Call, without_autocast
from ctxext.attention.layout import Layout
from ctxext.attention.pieces import RotationForm, Turn, TurnedPiece
from ctxext.attention.step_kernel import HIDDEN, MOST_PIECES, attend_rows, available

FEW = 8
"""Queries of a call that is computed as a step: one token, or the tokens of speculative decoding."""


class _Source(NamedTuple):
    """Keys in one rotation, and what the pieces that read them need.

    Args:
        pieces: numbers of these pieces.
        queries: matrices that rotate a query for each piece, ``[rows, query, head_dim, pieces * head_dim]``; None where
            no piece rotates queries.
        bias: Number to add to each score, ``[rows, groups or 1, 1, query, pieces, key]``.
    """

    key: Turn | None
    pieces: tuple[int, ...]
    queries: Tensor | None
    bias: Tensor

    def wide_bias(self, shape: tuple[int, ...]) -> Tensor:
        """Return the bias of all heads, as one matrix for each row and group."""
        return self.bias.expand(shape).reshape(shape[0] * shape[1], -1, shape[-1])


class StepPlan(NamedTuple):
    """What the layers of a forward pass share in a step: see ``plan_step``.

    Args:
        pieces: Pieces of attention.
        numbers: Number of the piece that serves each pair, ``[rows, groups or 1, query, key]``.
        sources: Keys in each rotation; one where the cache holds rotated keys, or no piece rotates any.
        sees: Queries that see a key, ``[rows, 1, query, 1]``; None where all do.
        for_kernel: Arguments of the kernel that follow ``numbers``; None where there is no kernel.
    """

    pieces: tuple[TurnedPiece, ...]
    numbers: Tensor
    sources: tuple[_Source, ...] = ()
    sees: Tensor | None = None
    for_kernel: tuple[Any, ...] | None = None
    form: RotationForm = RotationForm()


def takes_step(q: Tensor, k: Tensor) -> bool:
    """Return whether a call has few queries, and as many slots in each call."""
    return isinstance(q.shape[2], int) and isinstance(k.shape[2], int) and q.shape[2] <= FEW


def served_by(
    layout: Layout, pieces: Sequence[TurnedPiece], few: Sequence[TurnedPiece] = (), many: Tensor | None = None
) -> UInt8[Tensor, "rows groups query key"]:
    """Return the number of the piece that serves each pair, ``HIDDEN`` for none; one row if all rows are equal.

    ``many`` is true for the groups that attend in ``pieces``; the others attend in ``few``, whose numbers follow.
    """
    if many is not None:
        numbers, others = served_by(layout, pieces), served_by(layout, few)
        others = torch.where(others == HIDDEN, HIDDEN, others + len(pieces))
        return torch.where(many[:, None, None], numbers, others)
    queries, keys = layout.query_positions[:, :, None], layout.key_positions[:, None, :]
    visible = layout.visible()
    if layout.query_documents is None and queries.stride(0) == keys.stride(0) == 0:
        queries, keys, visible = queries[:1], keys[:1], visible[:1]
    numbers = torch.full(visible.shape, HIDDEN, dtype=torch.uint8, device=visible.device)
    for number, piece in enumerate(pieces):
        numbers = torch.where(visible & piece.region.holds(queries, keys), number, numbers)
    return numbers[:, None]


def attend_step(
    call: Call, plan: StepPlan, *, settled: int = 0, sinks: Float[Tensor, " heads"] | None = None
) -> Float[Tensor, "batch heads query value_dim"]:
    """Compute attention of a few queries, without a gradient.

    Args:
        call: Call of plain attention, with q and k as the model rotated them.
        plan: Plan for the layout of the call.
        settled: Leading slots whose keys have the rotation of the last piece; for the kernel only.
        sinks: Score of each query head's sink, as in gpt-oss; None for no sinks.
    """
    q, v, wide = call.q, call.v, torch.promote_types(call.q.dtype, torch.float32)
    if plan.for_kernel is not None:
        how: dict[str, Any] = {"scale": call.scale, "softcap": call.softcap, "form": plan.form, "settled": settled}
        return attend_rows(q, call.k, v, plan.numbers, *plan.for_kernel, sinks=sinks, **how)
    batch, heads, length, groups = *q.shape[:3], call.k.shape[1]
    with without_autocast(q.device):
        parts = [_scores(call, source, wide) for source in plan.sources]
        scores = parts[0] if len(parts) == 1 else torch.cat(parts, 4)
        count = scores.shape[4]
        scores = scores.flatten(4)
        if sinks is not None:
            sink = sinks.to(wide).view(groups, -1, 1, 1).expand(batch, -1, -1, length, 1)
            scores = torch.cat([scores, sink], -1)
        weights = scores.softmax(-1)[..., : count * v.shape[2]].to(v.dtype).reshape(batch * groups, -1, v.shape[2])
        out = torch.bmm(weights, v.reshape(batch * groups, *v.shape[2:])).view(batch, heads, length, count, -1)
        out = out.sum(3) if count > 1 else out[:, :, :, 0]
        return out if plan.sees is None else torch.where(plan.sees, out, 0)


def _scores(call: Call, source: _Source, wide: torch.dtype) -> Tensor:
    """Return the scores of one source, ``[batch, groups, shared, query, pieces, key]``, in the precision ``wide``."""
    q, k = call.q, call.k
    (batch, heads, length, width), groups, count = q.shape, k.shape[1], len(source.pieces)
    if source.key is not None:
        k = source.key(k, (0, batch), (0, k.shape[2]))
    rows = q[:, :, :, None].expand(-1, -1, -1, count, -1)
    if source.queries is not None:
        turned = q.transpose(1, 2).to(wide) @ source.queries
        rows = turned.view(batch, length, heads, count, width).transpose(1, 2)
    rows, keys = rows.to(q.dtype).reshape(batch * groups, -1, width).to(wide), k.reshape(batch * groups, -1, width)
    keys = keys.transpose(1, 2).to(wide)
    shape = (batch, groups, heads // groups, length, count, k.shape[2])
    if call.softcap is not None:
        capped = call.softcap * torch.tanh(torch.bmm(rows, keys) * (call.scale / call.softcap))
        return capped.view(shape) + source.bias
    return torch.baddbmm(source.wide_bias(shape), rows, keys, alpha=call.scale).view(shape)


def plan_step(
    layout: Layout,
    pieces: Sequence[TurnedPiece],
    q: Tensor,
    *,
    few: Sequence[TurnedPiece] = (),
    many: Tensor | None = None,
    is_settled: bool = False,
) -> StepPlan:
    """Return the plan of a step on a layout.

    Args:
        pieces: Pieces of attention; all keys that some of them rotate are rotated alike.
        few: Pieces of the other groups, where ``many`` names those that attend in ``pieces``, bool ``[groups]``.
        q: Queries of one layer, ``[batch, heads, query, head_dim]``.
        is_settled: True where the cache holds keys as the last piece rotates them, in the slots that such pieces read.
    """
    numbers, wide = served_by(layout, pieces, few, many), torch.promote_types(q.dtype, torch.float32)
    pieces = (*pieces, *few)
    if takes_kernel(q) and len(pieces) <= MOST_PIECES:
        return _for_kernel(pieces, numbers, q)
    nothing = torch.full(numbers.shape, -math.inf, dtype=wide, device=numbers.device)
    keys: list[Turn | None] = [None]
    if not is_settled:
        keys = list({piece.key and piece.key.where: piece.key for piece in pieces}.values())
    sources = []
    for key in keys:
        where = key and key.where
        mine = tuple(
            index for index, piece in enumerate(pieces) if is_settled or (piece.key and piece.key.where) == where
        )
        bias = torch.stack([nothing.masked_fill(numbers == index, pieces[index].bias) for index in mine], 3)
        matrices = _matrices([pieces[index].query for index in mine], layout, q, wide)
        sources.append(_Source(key, mine, matrices, bias[:, :, None]))
    sees = None if layout.query_documents is None else (numbers != HIDDEN).any(-1, keepdim=True).any(1, keepdim=True)
    return StepPlan(pieces, numbers, tuple(sources), sees)


def plan_split(
    layout: Layout, pieces: Sequence[TurnedPiece], held: Layout, few: Sequence[TurnedPiece], q: Tensor
) -> StepPlan | None:
    """Return the kernel's plan of a step on two layouts of keys, whose heads attend in ``pieces`` and in ``few``.

    None where these are too many for the kernel. The slots of ``held`` follow those of ``layout``.
    """
    if len(pieces) + len(few) > MOST_PIECES:
        return None
    far, near = served_by(layout, pieces), served_by(held, few)
    near = torch.where(near == HIDDEN, HIDDEN, near + len(pieces))
    sides, rows = (pad(far, (0, near.shape[3]), value=HIDDEN), pad(near, (far.shape[3], 0), value=HIDDEN)), q.shape[0]
    numbers = torch.cat([x.expand(rows, -1, -1, -1) if far.shape[0] != near.shape[0] else x for x in sides], 1)
    return _for_kernel((*pieces, *few), numbers, q)


def attend_split(
    q: Tensor, far: tuple[Tensor, Tensor], near: tuple[Tensor, Tensor, Tensor], plan: StepPlan, **how: Any
) -> Float[Tensor, "batch heads query value_dim"]:
    """Compute a step of all heads by the kernel from two kinds of keys; ``near`` and ``how`` as in ``attend_rows``."""
    assert plan.for_kernel is not None
    return attend_rows(q, *far, plan.numbers, *plan.for_kernel, form=plan.form, near=near, **how)


def takes_kernel(q: Tensor) -> bool:
    """Return whether the Triton kernel computes a step of these queries, on whatever keys the cache has rotated."""
    return available(q.device) and q.dtype is not torch.float64


def _for_kernel(pieces: tuple[TurnedPiece, ...], numbers: Tensor, q: Tensor) -> StepPlan:
    """Return the plan with the angles of all rotations, ``[rows, pieces, query, pairs]`` and ``[rows, key, pairs]``."""
    turns = [turn for piece in pieces for turn in (piece.query, piece.key) if turn is not None]
    pairs, length = (turns[0].inv_freq.shape[0] if turns else q.shape[3] // 2), q.shape[2]
    still = torch.ones(1, 1, length, pairs, device=q.device), torch.zeros(1, 1, length, pairs, device=q.device)
    each = [still if piece.query is None else piece.query.angles(length) for piece in pieces]
    rows = max(cos.shape[0] for cos, _ in each)
    queries = tuple(
        torch.cat([side.expand(rows, -1, -1, -1) for side in sides], 1) for sides in zip(*each, strict=True)
    )
    key = next((piece.key for piece in pieces if piece.key is not None), None)
    keys = None if key is None else tuple(side[:, 0] for side in key.angles(numbers.shape[3]))
    turned, biases = tuple(piece.key is not None for piece in pieces), tuple(piece.bias for piece in pieces)
    form = turns[0].form if turns else RotationForm()
    return StepPlan(pieces, numbers, for_kernel=(queries, keys, turned, biases), form=form)


def _matrices(turns: Sequence[Turn | None], layout: Layout, like: Tensor, wide: torch.dtype) -> Tensor | None:
    """Return matrices that rotate each query, ``[rows, query, head_dim, pieces * head_dim]``: rotated unit vectors."""
    if not any(turns):
        return None
    width, length, each = like.shape[3], layout.query_length, []
    units = torch.eye(width, dtype=wide, device=like.device)[None, :, None].expand(-1, -1, length, -1)
    for turn in turns:
        rows = 1 if turn is None else turn.positions.shape[0]
        unit = units.expand(rows, -1, -1, -1)
        each.append((unit if turn is None else turn(unit, (0, rows), (0, length))).transpose(1, 2))
    most = max(matrix.shape[0] for matrix in each)
    return torch.cat([matrix.expand(most, -1, -1, -1) for matrix in each], -1)
