"""Attention of a few queries over a long cache, as in decoding: all pieces of a query under one softmax.

Each pair of a query and a slot belongs to one piece or to none. The piece rotates the query, and perhaps the key, for
their score, and one softmax runs over all slots. Nothing is merged by log-sum-exp, and no value is read on the host, so
that a graph can hold a step: borders are in a tensor of the pieces' numbers, and the cache alone sets the shapes. On
CUDA two Triton kernels do all of it (``_step_kernel``).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, UInt8
from packaging.version import Version
from torch import Tensor
from torch.nn.functional import pad

from ctxext.kernels.base import Call, expand_heads, runs_triton, without_autocast
from ctxext.kernels.blocks import Output
from ctxext.kernels.layout import Layout
from ctxext.kernels.pieces import RotationForm, TurnedPiece
from ctxext.kernels.regions import HIDDEN, MOST_PIECES
from ctxext.methods.remap import Ahead, Piece

FEW = 8
"""Queries of a call that is computed as a step: one token, or the tokens of speculative decoding."""

# Triton 3.6 and 3.7 (of torch 2.11 to 2.13) do not translate a tile of scores that a branch changes, for AMD GPUs.
TRITON_FOR_AMD = Version("3.8")


class StepPlan(NamedTuple):
    """Plan of a step, which the layers of a forward pass share; see ``plan_step``.

    Args:
        numbers: Number of the piece that serves each pair, ``[rows, groups or 1, query, key]``; ``HIDDEN`` for none.
        for_kernel: Arguments of the kernel that follow ``numbers``; None without a kernel.
    """

    pieces: tuple[TurnedPiece, ...]
    numbers: Tensor
    for_kernel: tuple[Any, ...] | None = None
    form: RotationForm = RotationForm()


def why_no_step(q: Tensor, k: Tensor) -> str | None:
    """Return why a call is not a step; None if it is. A step has few queries, and a fixed number of slots."""
    is_fixed = isinstance(q.shape[2], int) and isinstance(k.shape[2], int)
    return None if is_fixed and q.shape[2] <= FEW else f"a step has up to {FEW} tokens, and a fixed number of them"


def served_by(layout: Layout, pieces: Sequence[TurnedPiece], first: int = 0) -> UInt8[Tensor, "rows 1 query key"]:
    """Return the number of the piece that serves each pair, ``HIDDEN`` for none; one row if all rows are equal.

    Pieces are numbered from ``first`` on.
    """
    queries, keys = layout.query_positions[:, :, None], layout.key_positions[:, None, :]
    visible = layout.visible()
    if layout.query_documents is None and queries.stride(0) == keys.stride(0) == 0:
        queries, keys, visible = queries[:1], keys[:1], visible[:1]
    numbers = torch.full(visible.shape, HIDDEN, dtype=torch.uint8, device=visible.device)
    for number, piece in enumerate(pieces, first):
        numbers = torch.where(visible & piece.region.holds(queries, keys), number, numbers)
    return numbers[:, None]


def attend_step(call: Call, plan: StepPlan, *, settled: int = 0, sinks: Float[Tensor, " heads"] | None) -> Output:
    """Compute attention of a few queries, without a gradient.

    Args:
        call: Call of plain attention, with q and k as the model rotated them.
        settled: Leading slots whose keys have the rotation of the last piece; for the kernel only.
        sinks: Score of each query head's sink, as in gpt-oss; None for no sinks.
    """
    q, v, wide = call.q, call.v, torch.promote_types(call.q.dtype, torch.float32)
    if plan.for_kernel is not None:
        return _rows(
            q,
            call.k,
            v,
            plan.numbers,
            *plan.for_kernel,
            sinks=sinks,
            scale=call.scale,
            softcap=call.softcap,
            form=plan.form,
            settled=settled,
        )
    batch, heads, length, slots = *q.shape[:3], v.shape[2]
    numbers = plan.numbers if plan.numbers.shape[1] == 1 else expand_heads(heads, plan.numbers)[0]
    scores = torch.full((batch, heads, length, slots), -math.inf, dtype=wide, device=q.device)
    turned: dict[Any, Tensor] = {None: call.k}
    with without_autocast(q.device):
        for number, piece in enumerate(plan.pieces):
            rows = q if piece.query is None else piece.query(q, (0, batch), (0, length))
            where = piece.key and piece.key.where
            if piece.key is not None and where not in turned:
                turned[where] = piece.key(call.k, (0, batch), (0, slots))
            score = _by_group(rows.to(wide), turned[where].to(wide).transpose(2, 3)) * call.scale
            if call.softcap is not None:
                score = call.softcap * torch.tanh(score / call.softcap)
            scores = torch.where(numbers == number, score + piece.bias, scores)
        if sinks is not None:
            scores = torch.cat([scores, sinks.to(wide).view(1, -1, 1, 1).expand(batch, -1, length, 1)], -1)
        weights = torch.where(numbers == HIDDEN, 0, scores.softmax(-1)[..., :slots])  # a row that sees nothing has NaN
        return _by_group(weights.to(v.dtype), v)


def _rows(*arguments: Any, **how: Any) -> Tensor:
    """Call the kernels, which only now import Triton."""
    from ctxext.kernels._step_kernel import attend_rows

    return attend_rows(*arguments, **how)


def _by_group(rows: Tensor, columns: Tensor) -> Tensor:
    """Multiply ``[batch, heads, query, n]`` by ``[batch, groups, n, m]``, all heads of a group at once."""
    folded = rows.reshape(*columns.shape[:2], -1, rows.shape[3]) @ columns
    return folded.view(*rows.shape[:3], columns.shape[3])


def plan_step(
    layout: Layout,
    pieces: Sequence[TurnedPiece],
    q: Tensor,
    *,
    few: Sequence[TurnedPiece] = (),
    many: Tensor | None = None,
) -> StepPlan:
    """Return the plan of a step on a layout.

    Args:
        pieces: Pieces of attention; all keys that some of them rotate are rotated alike.
        few: Pieces of the other groups; ``many``, bool ``[groups]``, marks the groups that attend in ``pieces``.
    """
    numbers = served_by(layout, pieces)
    if many is not None:
        numbers = torch.where(many[:, None, None], numbers, served_by(layout, few, len(pieces)))
    pieces = (*pieces, *few)
    return _for_kernel(pieces, numbers, q) if why_no_kernel(q, pieces) is None else StepPlan(pieces, numbers)


def plan_split(
    layout: Layout, pieces: Sequence[TurnedPiece], held: Layout, few: Sequence[TurnedPiece], q: Tensor
) -> StepPlan:
    """Return the kernel's plan of a step on two layouts of keys, whose heads attend in ``pieces`` and in ``few``.

    The slots of ``held`` follow the slots of ``layout``.
    """
    far, near = served_by(layout, pieces), served_by(held, few, len(pieces))
    sides, rows = (pad(far, (0, near.shape[3]), value=HIDDEN), pad(near, (far.shape[3], 0), value=HIDDEN)), q.shape[0]
    numbers = torch.cat([x.expand(rows, -1, -1, -1) if far.shape[0] != near.shape[0] else x for x in sides], 1)
    return _for_kernel((*pieces, *few), numbers, q)


def attend_split(
    q: Tensor, far: tuple[Tensor, Tensor], near: tuple[Tensor, Tensor, Tensor], plan: StepPlan, **how: Any
) -> Output:
    """Compute a step of all heads by the kernel from two kinds of keys; ``near`` and ``how`` as in ``attend_rows``."""
    assert plan.for_kernel is not None
    return _rows(q, *far, plan.numbers, *plan.for_kernel, form=plan.form, near=near, **how)


def why_no_kernel(q: Tensor, pieces: Sequence[Piece | TurnedPiece]) -> str | None:
    """Return why the Triton kernel does not compute a step in these pieces, whatever keys are rotated; None if it does.

    It rotates keys in one way, as keys ahead of a query are not.
    """
    if not runs_triton(q.device):
        return "its kernel runs on CUDA, with Triton"
    if torch.version.hip is not None and (found := _triton_version()) < TRITON_FOR_AMD:
        return f"its kernel for AMD GPUs is compiled by Triton {TRITON_FOR_AMD} or newer, found {found}"
    if q.dtype is torch.float64 or torch.is_grad_enabled():
        return "its kernel has no gradient, and no float64"
    few = len(pieces) <= MOST_PIECES and not any(isinstance(piece.region, Ahead) for piece in pieces)
    return None if few else f"its kernel takes up to {MOST_PIECES} pieces, none of them of keys ahead of a query"


@functools.cache
def _triton_version() -> Version:
    """Return the version of Triton, whose package has another name on ROCm."""
    import triton

    return Version(triton.__version__)


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
