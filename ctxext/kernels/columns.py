"""ALiBi without a bias tensor: the bias in further dimensions (columns) of q and k.

``scale * q.k - slope * (i - j)`` is ``scale`` times an inner product of longer vectors. With ``b(p) = slope * p /
scale`` split into pieces ``p1 + p2 + ...`` that the tensors' dtype can hold::

    q' = [1, -p1(i), 1, -p2(i), ..., q]        k' = [p1(j), 1, p2(j), 1, ..., k]

    scale * q'.k' = scale * q.k + scale * ((p1(j) - p1(i)) + (p2(j) - p2(i)) + ...)

so any kernel without ALiBi computes it: fused, packed, cached, ring or sharded.

**Why pieces.** One column for ``b(p)`` would not do: bfloat16 has 8 bits, so that its numbers near 100,000 are 512
apart, while neighbouring keys differ by one slope. So the first piece holds the leading bits of ``b(p)``, the second
the leading bits of the remainder, and so on.

**Error bound.** Let the significand of a piece have ``s`` bits, ``P`` pieces, ``D = max |position - origin|``. Each
piece rounds to nearest, so after P pieces at most ``2^-(s P) |b|`` is left over and the score term is off by at most

    2 * slope * D * 2^-(s P)                            (the remainder that no piece holds)
    + gamma * slope * |i - j|,  gamma <= 2 P * 2^-24    (float32 additions, as with a dense bias)

A product of a piece and 1 is exact, and because the i and the j piece of one level are neighbours, each difference is
taken before the next level or ``q.k`` is added: every rounding is relative to a partial sum that has already
shrunk to about ``slope * |i - j| / scale``. Far keys may be off by more in absolute terms; their weight is
``exp(-slope * |i - j|)``, so ``error * weight`` never exceeds ``gamma / e``. This holds for sequential additions, as on
CPUs. A tensor core aligns the products of a step of 8 or 16 dimensions to the largest of them and cuts off bits below
2^-24 of it. Emulated so, in bfloat16 with slope ``2^-0.5``, scores of near keys are off by 3e-4 at 8K positions, 1e-3
at 32K and 6e-3 at 128K, where one weight rounded to bfloat16 is off by 2e-3. This was not measured on a GPU yet.

With 8 columns there is room for P = 4: 32 bits in bfloat16, 44 in float16 and float32. At 128K positions, slope
``2^-0.5`` and a centred origin the first term is 2e-5 in bfloat16 and 5e-9 in float32; three bfloat16 pieces would
leave 6e-3. Fewer pieces save nothing, since head dimensions are multiples of 8. float32 pieces carry 11 bits, not 24,
so that a TensorFloat-32 matrix unit loses nothing either. float16 ends at 65504: its k pieces are divided by
``HALF_RANGE`` and its ones multiplied by it, and since it also ends below, at 2^-24, the first term is then at least
``scale * HALF_RANGE * 2^-24``.

Source: the rank-2 form is FlashBias (arXiv:2505.12044); splitting it into pieces is ours.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from ctxext.errors import InvalidParameterError
from ctxext.kernels.base import Call
from ctxext.kernels.blocks import QKV
from ctxext.kernels.layout import Layout

COLUMNS = 8
"""Number of columns that ALiBi adds to q and k: a multiple of 8, as fused kernels require."""

PIECES = COLUMNS // 2
HALF_RANGE = 256.0
HALF_MOST = torch.finfo(torch.float16).max * HALF_RANGE
"""Greatest place that float16 columns hold, times the scale."""
SIGNIFICAND = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 11, torch.float64: 53}
"""Bits per piece, the leading one included; float32 has those of TensorFloat-32."""


def alibi_columns(
    positions: Int[Tensor, "batch seq"],
    slopes: Float[Tensor, " heads"],
    *,
    scale: float,
    dtype: torch.dtype,
    side: Literal["query", "key"],
    origin: Int[Tensor, " batch"] | int = 0,
) -> Float[Tensor, "batch heads seq 8"]:
    """Return the columns that go in front of q (or k).

    Only positions are needed, so each rank of a sequence-parallel run builds its columns. Both sides must be given the
    same ``origin``: sharded runs use a constant, such as half the global length.

    Args:
        slopes: score lost per token, one per *query* head (repeat key heads first), float32 or float64.
        scale: the kernel's factor of the inner product. The kernel must apply it after the product, in float32: fused
            kernels do, while SDPA's math path multiplies q and k by its root and would round the columns.
        origin: subtracted from the positions; the nearer to their middle, the smaller the error.

    Raises:
        InvalidParameterError: if ``dtype`` is not bfloat16, float16, float32 or float64.
    """
    if dtype not in SIGNIFICAND:
        raise InvalidParameterError(f"ALiBi columns need one of {', '.join(map(str, SIGNIFICAND))}, found {dtype}.")
    centred = positions - (origin if isinstance(origin, int) else origin[:, None])
    return columns_of(
        slopes.double()[None, :, None] * centred.double()[:, None, :], scale=scale, dtype=dtype, side=side
    )


def columns_of(
    places: Float[Tensor, "batch heads seq"], *, scale: float, dtype: torch.dtype, side: Literal["query", "key"]
) -> Float[Tensor, "batch heads seq 8"]:
    """Return columns that add ``place of the key - place of the query`` to the score, with gradients of the places."""
    rest = places / scale
    shrink = HALF_RANGE if dtype == torch.float16 else 1.0
    rest = rest / shrink if side == "key" else -rest / shrink
    ones = torch.full_like(rest, shrink).to(dtype)
    columns: list[Tensor] = []
    for _ in range(PIECES):
        piece = _round(rest, SIGNIFICAND[dtype]).to(dtype)
        rest = rest - piece.double()
        columns += [piece, ones] if side == "key" else [ones, piece]
    return torch.stack(columns, -1)


def layout_columns(
    layout: Layout, slopes: Float[Tensor, " heads"], *, scale: float, dtype: torch.dtype
) -> tuple[Float[Tensor, "batch heads query 8"], Float[Tensor, "batch heads key 8"]]:
    """Return the columns of q and of k for a layout, centred per row, shared by all layers of one forward.

    Raises:
        InvalidParameterError: if float16 columns would overflow (checked where reading values costs no device sync).
    """

    def build() -> tuple[Tensor, Tensor]:
        # A shard meets keys of other ranks, whose middle is unknown here, so all ranks take 0.
        sharded = layout.external_causality
        origin = torch.zeros_like(layout.key_positions[:, 0]) if sharded else _middle(layout)
        queries, keys = layout.query_positions, layout.key_positions
        if layout.query_documents is not None and layout.key_documents is not None:
            # Slots without a token may hold any position, and infinity times a weight of zero is NaN.
            queries = torch.where(layout.query_documents >= 0, queries, origin[:, None])
            keys = torch.where(layout.key_documents >= 0, keys, origin[:, None])
        if dtype == torch.float16 and keys.device.type == "cpu" and not torch.compiler.is_compiling():
            reach = max(int((side - origin[:, None]).abs().max()) for side in (queries, keys))
            require_half(reach, float(slopes.max()), scale)
        return (
            alibi_columns(queries, slopes, scale=scale, dtype=dtype, side="query", origin=origin),
            alibi_columns(keys, slopes, scale=scale, dtype=dtype, side="key", origin=origin),
        )

    return layout.memo(("columns", scale, dtype), build, owner=slopes)


def with_columns(call: Call) -> QKV:
    """Return q, k and v of a call with slopes: columns in front of q and k, as many zeros behind v.

    v is padded because fused kernels need equal head dimensions. Key heads are repeated to the number of query heads
    because slopes differ between query heads.
    """
    assert call.slopes is not None
    assert call.layout.sees == "past", "columns cannot hold an absolute distance"
    return put_in_front(call, *layout_columns(call.layout, call.slopes, scale=call.scale, dtype=call.q.dtype))


def put_in_front(call: Call, query: Tensor, key: Tensor) -> QKV:
    """Return q and k of a call with columns in front, and v with as many zeros behind; key heads are repeated."""
    k, v = call.expanded
    return torch.cat([query, call.q], -1), torch.cat([key, k], -1), F.pad(v, (0, query.shape[-1]))


def require_half(reach: int, slope: float, scale: float) -> None:
    """Refuse columns that float16 cannot hold: ``slope * reach`` is the greatest place.

    Raises:
        InvalidParameterError: if it is too great.
    """
    if reach * slope / scale > HALF_MOST:
        raise InvalidParameterError(
            f"float16 ALiBi columns reach {int(HALF_MOST * scale / slope)} tokens to either side at slope {slope}, "
            f"found {reach}. Use bfloat16."
        )


def _middle(layout: Layout) -> Int[Tensor, " batch"]:
    """Return per row the middle between the first and the last position of a key, without a device sync."""
    positions, documents = layout.key_positions, layout.key_documents
    real = torch.ones_like(positions, dtype=torch.bool) if documents is None else documents >= 0
    limits = torch.iinfo(positions.dtype)
    low = torch.where(real, positions, limits.max).amin(1)
    high = torch.where(real, positions, limits.min).amax(1)
    return torch.where(real.any(1), low + torch.div(high - low, 2, rounding_mode="floor"), 0)


def _round(x: Float[Tensor, "batch heads seq"], bits: int) -> Float[Tensor, "batch heads seq"]:
    """Round float64 numbers to ``bits`` significant bits by Veltkamp's splitting (no bit tricks, so it compiles)."""
    if bits >= 53:
        return x
    spread = x * float(2 ** (53 - bits) + 1)
    return spread - (spread - x)
