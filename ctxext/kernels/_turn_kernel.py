"""One Triton kernel that rotates queries or keys by given angles, in one pass."""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16  # tokens of one program


@triton.jit
@no_type_check
def _turn(
    x, cos, sin, turned, heads, length, width, first, pairs,
    x_batch, x_head, x_row, turned_batch, turned_head, turned_row, angle_batch, angle_row,
    INTERLEAVED: tl.constexpr, BACK: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(length, ROWS)
    tile, group = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    batch, head = group // heads, group % heads
    row = (tile.to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    dim = tl.arange(0, WIDE)[None]
    place = dim - first
    rotates = (place >= 0) & (place < 2 * pairs)
    pair = place // 2 if INTERLEAVED else place % pairs
    is_second = place % 2 == 1 if INTERLEAVED else place >= pairs
    apart = 1 if INTERLEAVED else pairs
    partner = tl.where(is_second, dim - apart, dim + apart)
    inside = (row < length) & (dim < width)
    x += batch * x_batch + head * x_head + row * x_row
    angle = batch * angle_batch + row * angle_row + pair
    c, s = tl.load(cos + angle, inside & rotates, 1.0), tl.load(sin + angle, inside & rotates, 0.0)
    own, other = tl.load(x + dim, inside, 0.0).to(c.dtype), tl.load(x + partner, inside & rotates, 0.0).to(c.dtype)
    value = own * c + other * tl.where(is_second != BACK, s, -s)
    there = turned + batch * turned_batch + head * turned_head + row * turned_row + dim
    tl.store(there, value.to(turned.dtype.element_ty), inside)


def launch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, tail: bool, back: bool) -> Tensor:
    """Rotate ``x``, ``[batch, heads, seq, dim]``, by angles ``[batch or 1, 1, seq, pairs]``, ``back`` the other way.

    The last dimensions rotate if ``tail``, else the first ones.
    """
    (batch, heads, length, width), pairs = x.shape, cos.shape[-1]
    x = x if x.stride(-1) == 1 else x.contiguous()
    cos, sin, turned = cos.contiguous(), sin.contiguous(), torch.empty_like(x)
    strides = (*x.stride()[:3], *turned.stride()[:3], cos.stride(0) if cos.shape[0] > 1 else 0, pairs)
    grid = (triton.cdiv(length, ROWS) * batch * heads,)  # as in _merge_kernel
    _turn[grid](
        x,
        cos,
        sin,
        turned,
        heads,
        length,
        width,
        width - 2 * pairs if tail else 0,
        pairs,
        *strides,
        INTERLEAVED=interleaved,
        BACK=back,
        WIDE=triton.next_power_of_2(width),
        ROWS=ROWS,
    )
    return turned


SCHEMA = "(Tensor x, Tensor cos, Tensor sin, bool interleaved, bool tail, bool back) -> Tensor"
turn = torch.library.custom_op("ctxext::turn", launch, mutates_args=(), schema=SCHEMA)
turn.register_fake(lambda x, cos, sin, interleaved, tail, back: torch.empty_like(x))
