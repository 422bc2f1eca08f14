"""One Triton kernel that merges a part of attention into a total: output, log-sum-exp, weight and cast in one pass."""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16  # queries of one program


@triton.jit
@no_type_check
def _merge(
    total, total_lse, out, lse, bias, heads, length, width,
    total_batch, total_head, total_row, total_lse_batch, total_lse_head, total_lse_row,
    out_batch, out_head, out_row, lse_batch, lse_head, lse_row,
    WIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(length, ROWS)
    tile, group = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    batch, head = group // heads, group % heads
    row = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    dim = tl.arange(0, WIDE)
    inside = row < length
    total_lse += batch * total_lse_batch + head * total_lse_head + row * total_lse_row
    before = tl.load(total_lse, inside, -float("inf"))
    now = tl.load(lse + batch * lse_batch + head * lse_head + row * lse_row, inside, -float("inf")) + bias
    most = tl.maximum(before, now)
    most = tl.where(most == -float("inf"), 0.0, most)  # neither of the two sees a key
    old, new = tl.exp(before - most), tl.exp(now - most)
    both = old + new
    share = (new / tl.where(both == 0.0, 1.0, both))[:, None]
    kept = inside[:, None] & (dim < width)[None]
    total += (batch * total_batch + head * total_head + row * total_row)[:, None] + dim[None]
    out += (batch * out_batch + head * out_head + row * out_row)[:, None] + dim[None]
    x, y = tl.load(total, kept, 0.0).to(share.dtype), tl.load(out, kept, 0.0).to(share.dtype)
    tl.store(total, (x * (1.0 - share) + y * share).to(total.dtype.element_ty), kept)
    tl.store(total_lse, most + tl.log(both), inside)


def launch(total: Tensor, total_lse: Tensor, out: Tensor, lse: Tensor, bias: float) -> None:
    """Merge a part, ``[batch, heads, query, dim]`` and ``[batch, heads, query]``, into the total, in place."""
    batch, heads, length, width = total.shape
    strides = [x for tensor in (total, total_lse, out, lse) for x in tensor.stride()[:3]]
    grid = (triton.cdiv(length, ROWS) * batch * heads,)  # the first axis alone takes more than 65,535
    wide = triton.next_power_of_2(width)
    _merge[grid](total, total_lse, out, lse, bias, heads, length, width, *strides, WIDE=wide, ROWS=ROWS)


SCHEMA = "(Tensor(a!) total, Tensor(b!) total_lse, Tensor out, Tensor lse, float bias) -> ()"
merge = torch.library.custom_op("ctxext::merge", launch, mutates_args=("total", "total_lse"), schema=SCHEMA)
merge.register_fake(lambda total, total_lse, out, lse, bias: None)
