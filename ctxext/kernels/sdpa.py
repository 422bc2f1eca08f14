"""The general path: torch's scaled_dot_product_attention, with ALiBi as extra columns of q and k."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ctxext.kernels.base import AttentionBackend, Call, Need, capability_of, evened, expand_heads
from ctxext.kernels.blocks import QKV, Output, OutputAndLse, PartRule, by_some_queries
from ctxext.kernels.columns import with_columns
from ctxext.kernels.layout import Layout, Span
from ctxext.kernels.reference import Reference
from ctxext.kernels.spans import Extent

aten = torch.ops.aten

MOST_BACKWARD = 192  # dimensions above which some cards have no backward kernel
BIAS_BYTES = 64 * 2**20
"""Memory in bytes for a bias or a score of pairs, which is materialised for as many queries at a time as fit."""


def kernel_order(need: Need) -> list[SDPBackend]:
    """Return the fused kernels that may serve ``need`` on CUDA, best first.

    cuDNN is the last: it was faster than flash on compute capability 9.0 (published: 1.7 to 2.3x), but builds a plan
    for every shape, hence for every step of decoding. Some versions read beyond lengths that are not a multiple of 128
    (pytorch#169849) or return wrong gradients with a mask (pytorch#196678). The math path is left out for ALiBi columns
    below float64, because it multiplies q and k by the root of ``scale``, which rounds them.
    """
    order = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
    return order if need.biased and need.dtype != torch.float64 else [*order, SDPBackend.MATH]


def _no_fused_kernel(need: Need) -> str | None:
    """Return why none of CUDA's fused kernels takes a call without the math path; None if one does."""
    if need.dtype == torch.float64:
        return None
    is_old = need.capability is not None and need.capability < (8, 0)
    if need.dtype == torch.bfloat16 and is_old:
        return f"its fused kernels for bfloat16 need compute capability 8.0, found {need.capability}. Use float16."
    half = need.dtype != torch.float32
    # Without a mask, flash attention takes 16-bit heads of any size: torch pads them, except with a log-sum-exp.
    masked = need.order == "free" or need.window is not None or need.cached or need.sees == "both"
    step = 8 if half else 4
    if need.width % step and (masked or need.lse or is_old or not half):
        return f"its fused kernels need a head_dim that is a multiple of {step}, found {need.width}."
    return None


@dataclass(frozen=True)
class Sdpa(AttentionBackend):
    """torch's fused attention on any device, with any layout; ALiBi exact and without a bias tensor.

    Pick it nearly always. Blocks of plain causal attention (padding, packing, caches) run one by one, without a mask.
    A few queries over a long cache take a bias of one row per query, and other calls a mask of one byte per pair. With
    slopes, key heads are repeated to the number of query heads (linear memory). If tokens see both ways, slopes become
    a bias that is materialised for some queries at a time (linear memory, slower kernels). Where values have another
    width than keys, the narrower ones are padded with zeros, unless a kernel takes both as they are.

    Args:
        block_overhead: cost of a further kernel call, in pairs of tokens; blocks are used if they save more. None means
            2^12 on CPU (measured: blocks win from 64 tokens on), 2^20 elsewhere (20 us of an H100, estimated).
        dense_rows: cached queries up to which a bias ``[batch, heads, query, key]`` is cheaper than rebuilding k.
    """

    name = "sdpa"
    encodes = True
    summary = "torch's fused kernels; ALiBi as extra columns of q and k"

    block_overhead: int | None = None
    dense_rows: int = 16

    def why_not(self, need: Need) -> str | None:
        if need.dropout and need.device == "cpu":
            return "its CPU kernel has no attention dropout. Load with attention_dropout=0.0, or use 'reference'."
        if need.biased and need.device == "mps":
            return "it computes ALiBi columns in float64, which MPS does not have."
        if need.lse and (need.device not in ("cpu", "cuda") or (need.device == "cuda" and need.dtype == torch.float64)):
            return f"its kernels return no log-sum-exp for {need.dtype} on {need.device!r}, which pieces need."
        if need.device == "cuda" and (need.biased or need.lse) and (reason := _no_fused_kernel(need)):
            return reason
        if need.order == "external" and need.window is not None:
            return "a window needs a mask, and the engine around a sharded layout forbids masks."
        if need.order == "external" and need.cached:
            return "a sharded layout is square: as many keys as queries."
        return None

    def attend(self, call: Call) -> Output:
        kernel = FusedKernel(call.need, call.scale, call.dropout)
        q, k, v, layout = call.q, call.k, call.v, call.layout
        is_short = q.shape[2] <= self.dense_rows and q.shape[2] < k.shape[2]
        if call.need.value_dim is not None and not (is_short and call.slopes is None):
            return self.attend(call.evened)[..., : call.v.shape[3]]
        if is_short:
            return _dense(kernel, call)
        if call.slopes is not None and layout.sees == "both":
            return _by_distance(kernel, call)
        if call.slopes is not None:
            q, k, v = with_columns(call)
        if call.window is None and layout.spans is not None and self._blocks_pay(layout):
            out = _by_blocks(kernel, q, k, v, layout.spans, layout.sees == "past")
        else:
            out = _masked(kernel, q, k, v, layout, call.window)
        return out[..., : call.need.head_dim] if out.shape[-1] > call.need.head_dim else out

    def bands(self, need: Need) -> bool:
        is_half = need.dtype in (torch.float16, torch.bfloat16) and need.width % 8 == 0 and need.width <= 256
        is_new = need.device == "cuda" and torch.version.hip is None and (need.capability or (0, 0)) >= (8, 0)
        return is_half and is_new

    def fuses(self, need: Need) -> bool:
        if need.device == "cpu":
            return True
        is_narrow = need.width % 8 == 0 and need.width <= MOST_BACKWARD and need.order != "free"
        return is_narrow and need.dtype in (torch.float16, torch.bfloat16) and (need.capability or (0, 0)) >= (8, 0)

    def with_lse(self, q: Tensor, k: Tensor, v: Tensor, rule: PartRule) -> OutputAndLse:
        assert rule.softcap is None, "refuses says that it has none"
        mask = rule.mask
        if q.device.type == "cpu" and torch.compiler.is_exporting():
            # torch 2.13.0 decomposes the CPU's kernel into a formula that returns attention weights instead of the
            # log-sum-exp (torch/_decomp/decompositions.py), so an exported program gets ctxext's formula.
            return Reference().with_lse(q, k, v, rule)
        if v.shape[3] != q.shape[3] and (q.device.type == "cpu" or _is_for_flash(q)):
            if q.device.type == "cpu" and q.shape[2] <= self.dense_rows and q.dtype in (torch.float32, torch.float64):
                return Reference().with_lse(q, k, v, rule)  # v stays where it is
            even_q, even_k, even_v = evened(q, k, v)
            out, lse = self.with_lse(even_q, even_k, even_v, rule)
            return out[..., : v.shape[3]], lse
        heads, kv_heads = q.shape[1], k.shape[1]
        is_shared = mask is None or mask.shape[1:3] == (1, 1)  # by all query heads of a key head
        if not rule.causal and is_shared and q.shape[2] <= self.dense_rows and heads > kv_heads:
            # Query heads that share a key head become rows of one block of queries, so that keys are read once for all.
            folded = q.reshape(q.shape[0], kv_heads, -1, q.shape[3])
            out, lse = _fused(folded, k, v, rule)
            return out.reshape(*q.shape[:3], v.shape[3]), lse.reshape(q.shape[:3])
        return _fused(q, k, v, rule)

    def gradients(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad: Tensor, rule: PartRule) -> QKV:
        assert rule.softcap is None, "refuses says that it has none"
        width = max(q.shape[3], v.shape[3])
        is_flash = rule.mask is None and _is_for_flash(q) and width % 8 == 0 and width <= MOST_BACKWARD
        if q.device.type != "cpu" and not is_flash:
            return super().gradients(q, k, v, out, lse, grad, rule)
        if v.shape[3] != q.shape[3]:
            even_q, even_k, even_v, out, grad = evened(q, k, v, out, grad)
            even = self.gradients(even_q, even_k, even_v, out, lse, grad, rule)
            return even[0][..., : q.shape[3]], even[1][..., : q.shape[3]], even[2][..., : v.shape[3]]
        if is_flash:
            tensors = (grad.to(q.dtype), q, k, v, out.to(q.dtype))
            return _flash_backward(tensors, lse, rule)
        hidden = None if rule.mask is None else _as_bias(rule.mask, q)
        lse = lse.masked_fill(lse == -torch.inf, torch.inf)  # a query that sees nothing has no weights
        grads: QKV = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad.to(q.dtype), q, k, v, out.to(q.dtype), lse, 0.0, rule.causal, attn_mask=hidden, scale=rule.scale
        )
        return grads

    def _blocks_pay(self, layout: Layout) -> bool:
        if layout.whole or layout.external_causality:
            return True
        overhead = self.block_overhead
        if overhead is None:
            overhead = 1 << 12 if layout.query_positions.device.type == "cpu" else 1 << 20
        spans = layout.spans or ()
        work = sum((r[1] - r[0]) * (q[1] - q[0]) * (k[1] - k[0]) for r, q, k in spans)
        full = layout.batch * layout.query_length * layout.key_length
        return len(spans) > 0 and work + overhead * len(spans) <= full


def _is_for_flash(q: Tensor) -> bool:
    """Return whether CUDA's flash attention has a kernel for such heads, padded to a multiple of 8 dimensions."""
    is_half = q.dtype in (torch.float16, torch.bfloat16) and q.shape[3] <= 256
    return q.device.type == "cuda" and is_half and capability_of(q.device) >= (8, 0)


def _fused(q: Tensor, k: Tensor, v: Tensor, rule: PartRule) -> tuple[Tensor, Tensor]:
    """Call the kernels below torch's ``scaled_dot_product_attention``, which also return the log-sum-exp."""
    scale, causal, mask, _, window = rule
    if q.device.type == "cpu":
        hidden = None if mask is None else _as_bias(mask, q)
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=hidden, scale=scale)
        if mask is not None:  # this kernel returns 0, not minus infinity, for a query that sees nothing
            lse = lse.masked_fill(~mask.any(-1).expand(lse.shape), -torch.inf)
        return out, lse
    q, k, v = _aligned(q), _aligned(k), _aligned(v)
    if mask is None and _is_for_flash(q) and q.shape[3] % 8 == 0:
        if window is None:  # aligned to the last key, unlike torch's own function (torch/nn/attention/bias.py)
            out, lse = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)[:2]
            return out, lse
        tensors, lengths = [x.transpose(1, 2) for x in (q, k, v)], (None, None, q.shape[2], k.shape[2])
        sides = _sides(window)
        out, lse = aten._flash_attention_forward(*tensors, *lengths, 0.0, causal, False, scale=scale, **sides)[:2]
        return out.transpose(1, 2), lse
    k, v = expand_heads(q.shape[1], k, v)
    if mask is not None:
        some = mask.any(-1, keepdim=True)
        room = (-k.shape[2]) % 16  # rows of the bias must begin at multiples of 16 bytes
        bias = F.pad(_as_bias(mask | ~some, q), (0, room))[..., : k.shape[2]].expand(*q.shape[:3], k.shape[2])
        out, lse = aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, False, scale=scale)[:2]
        lse = lse[:, :, : q.shape[2]]
        return torch.where(some, out, 0.0), lse.masked_fill(~some[..., 0].expand(lse.shape), -torch.inf)
    out, lse = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=scale)[:2]
    return out, lse[:, :, : q.shape[2]]


def _sides(window: int | None) -> dict[str, int]:
    """Return the numbers of keys to each side that a query of a causal call of flash attention sees."""
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}


def _flash_backward(tensors: Sequence[Tensor], lse: Tensor, rule: PartRule) -> QKV:
    """Call the backward of CUDA's flash attention, on grad, q, k, v and the merged output."""
    by_token = [_aligned(x).transpose(1, 2) for x in tensors]
    lengths = (None, None, by_token[1].shape[1], by_token[2].shape[1])
    state = torch.empty(2, dtype=torch.uint64, device=lse.device)  # of the generator, which only dropout reads
    dq, dk, dv = aten._flash_attention_backward(
        *by_token,
        lse.contiguous(),
        *lengths,
        0.0,
        rule.causal,
        state,
        state[0],
        scale=rule.scale,
        **_sides(rule.window),
    )
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _as_bias(mask: Tensor, like: Tensor) -> Tensor:
    """Return a mask as a bias of 0 and minus infinity, in ``like``'s dtype."""
    return torch.zeros(mask.shape, dtype=like.dtype, device=like.device).masked_fill(~mask, -torch.inf)


def _aligned(x: Tensor) -> Tensor:
    """Return the tensor in such an order that heads and tokens begin at multiples of 16 bytes, as CUDA's kernels want.

    Keys out of a cache in which other numbers travel with them are a part of longer vectors. torch asks only how many
    dimensions a head has, and then finds no kernel ("cutlassF: no kernel found to launch").
    """
    step = 16 // x.element_size()
    is_aligned = all(stride % step == 0 for stride, size in zip(x.stride()[:-1], x.shape, strict=False) if size > 1)
    return x if is_aligned else x.clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True, eq=False)  # compared by identity: torch.compile hashes it before it has its fields
class FusedKernel:
    """torch's kernel with the settings that all blocks of one call share."""

    need: Need
    scale: float
    dropout: float

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        """Run the kernel; k and v may have fewer heads than q."""
        if mask is not None or (self.need.device == "cuda" and not _is_for_flash(q)):
            # Efficient attention has no grouped heads: torch would materialise all scores.
            k, v = expand_heads(q.shape[1], k, v)
        if self.need.device == "cuda":
            q, k, v = _aligned(q), _aligned(k), _aligned(v)
        grouped = False
        if q.shape[1] != k.shape[1]:  # a branch, because dynamic shapes would turn the expression into a SymBool
            grouped = True
        with self._kernels():
            return F.scaled_dot_product_attention(
                q, k, v, mask, self.dropout, is_causal=causal, scale=self.scale, enable_gqa=grouped
            )

    def merges(self, q: Tensor) -> bool:
        """Return whether parts may be merged by log-sum-exp: a kernel returns it, and no gradient is needed."""
        if self.need.training or self.need.compiling or self.dropout:
            return False
        return self.need.device == "cpu" or (_is_for_flash(q) and q.shape[3] % 8 == 0)

    def _kernels(self) -> contextlib.AbstractContextManager[object]:
        if self.need.device == "cuda":
            return sdpa_kernel(kernel_order(self.need), set_priority=True)
        if self.need.device == "cpu" and self.need.biased:
            return sdpa_kernel(SDPBackend.FLASH_ATTENTION)
        return contextlib.nullcontext()


def _by_blocks(kernel: FusedKernel, q: Tensor, k: Tensor, v: Tensor, spans: tuple[Span, ...], causal: bool) -> Tensor:
    """Run every span by itself, with zeros elsewhere; splitting tensors keeps the backward pass linear."""
    groups: dict[Extent, list[Span]] = {}
    for span in spans:
        groups.setdefault(span.rows, []).append(span)
    if len(spans) == 1 and spans[0].covers(q.shape[0], q.shape[2], k.shape[2]):
        return _block(kernel, q, k, v, causal)
    rows, covered = _sections(list(groups), q.shape[0])
    parts: list[Tensor] = []
    row_parts = zip(covered, torch.split(q, rows), torch.split(k, rows), torch.split(v, rows), strict=True)
    for span_rows, q_rows, k_rows, v_rows in row_parts:
        if span_rows is None:
            parts.append(torch.zeros_like(q_rows))
        else:
            parts.append(_row_blocks(kernel, q_rows, k_rows, v_rows, groups[span_rows], causal))
    return torch.cat(parts)


def _row_blocks(kernel: FusedKernel, q: Tensor, k: Tensor, v: Tensor, spans: list[Span], causal: bool) -> Tensor:
    """Run ``_by_blocks`` for rows that share their spans."""
    q_sizes, q_covered = _sections([span.query for span in spans], q.shape[2])
    k_sizes, k_covered = _sections(sorted(span.key for span in spans), k.shape[2])
    k_parts = dict(zip(k_covered, torch.split(k, k_sizes, 2), strict=True))
    v_parts = dict(zip(k_covered, torch.split(v, k_sizes, 2), strict=True))
    key_of = {span.query: span.key for span in spans}
    parts = [
        torch.zeros_like(part)
        if section is None
        else _block(kernel, part, k_parts[key_of[section]], v_parts[key_of[section]], causal)
        for section, part in zip(q_covered, torch.split(q, q_sizes, 2), strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def _block(kernel: FusedKernel, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Compute plain attention; if causal, with the last query at the last key."""
    query, key = q.shape[2], k.shape[2]
    if query == key and causal:
        return kernel(q, k, v, causal=True)
    if query == 1 or not causal:
        return kernel(q, k, v)
    # is_causal would align the *first* query with the first key.
    if kernel.merges(q):
        return _after(kernel, q, k, v)
    mask = torch.ones(query, key, dtype=torch.bool, device=q.device).tril(key - query)
    return kernel(q, k, v, mask[None, None])


def _after(kernel: FusedKernel, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute queries at the last keys without a mask: merge full attention to earlier keys with a causal block."""
    before = k.shape[2] - q.shape[2]
    far, far_lse = _fused(q, k[:, :, :before], v[:, :, :before], PartRule(kernel.scale))
    near, near_lse = _fused(q, k[:, :, before:], v[:, :, before:], PartRule(kernel.scale, causal=True))
    share = torch.sigmoid(near_lse - far_lse)[..., None]
    return torch.lerp(far.to(share.dtype), near.to(share.dtype), share).to(q.dtype)


def _sections(ranges: list[Extent], length: int) -> tuple[list[int], list[Extent | None]]:
    """Cut ``0 .. length`` at sorted, disjoint ``ranges``; return sizes and the range of each, None for a gap."""
    sizes: list[int] = []
    sections: list[Extent | None] = []
    position = 0
    for start, stop in ranges:
        if start > position:
            sizes.append(start - position)
            sections.append(None)
        sizes.append(stop - start)
        sections.append((start, stop))
        position = stop
    if position < length:
        sizes.append(length - position)
        sections.append(None)
    return sizes, sections


def seen(
    layout: Layout, window: int | None, queries: slice | None = None
) -> tuple[Bool[Tensor, "batch 1 query key"], Bool[Tensor, "batch 1 query 1"]]:
    """Return a mask of some queries without empty rows, and a marker of the rows that really see something."""
    visible = layout.visible(window, queries=queries)[:, None]
    some = visible.any(-1, keepdim=True)
    return visible | ~some, some


def _masked(kernel: FusedKernel, q: Tensor, k: Tensor, v: Tensor, layout: Layout, window: int | None) -> Tensor:
    """Compute any layout with a mask of one byte per pair, shared by all heads."""
    mask, some = layout.memo(("mask", window), lambda: seen(layout, window))
    return torch.where(some, kernel(q, k, v, mask), 0.0)


def _bias(distances: Tensor, slopes: Tensor, q: Tensor) -> Tensor:
    """Return the ALiBi bias of the scores, ``[batch, heads, query, key]``."""
    bias = -slopes.double()[None, :, None, None] * distances[:, None].double()
    return bias.to(bias_dtype(q))


def bias_dtype(q: Tensor) -> torch.dtype:
    """Return the dtype of a bias for queries like these."""
    # CPU kernels add a float32 bias to 16-bit scores, CUDA's need q's dtype. Rounding the bias by 2^-9 of itself
    # matters only where it is large, and there the weight is small.
    return q.dtype if q.device.type != "cpu" or q.dtype == torch.float64 else torch.float32


def _by_distance(kernel: FusedKernel, call: Call) -> Tensor:
    """Compute ALiBi for tokens that see both ways, with a bias for some queries at a time: columns cannot hold it.

    If the bias of all queries fits, the layers of a forward pass share it; otherwise the backward pass recomputes it.
    """
    q, layout, slopes, window = call.q, call.layout, call.slopes, call.window
    assert slopes is not None
    heads, length = q.shape[1], q.shape[2]
    k, v = call.expanded
    shared = layout
    if layout.whole and layout.consecutive:  # distances are the same in all rows
        shared = Layout(layout.query_positions[:1], layout.key_positions[:1], sees="both")
    size = max(1, BIAS_BYTES // (4 * heads * shared.batch * k.shape[2]))

    def some_rows(rows: slice) -> tuple[Tensor, Tensor]:
        mask, some = seen(shared, window, rows)
        return _bias(shared.distances(queries=rows), slopes, q).masked_fill(~mask, -torch.inf), some

    def attend(rows: slice, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bias, some = some_rows(rows)
        return torch.where(some, kernel(q, k, v, bias), 0.0)

    if size >= length:
        bias, some = layout.memo(("both ways", q.dtype, window), lambda: some_rows(slice(None)), owner=slopes)
        return torch.where(some, kernel(q, k, v, bias), 0.0)
    return by_some_queries(attend, q, k, v, size, again=call.need.training)


def _dense(kernel: FusedKernel, call: Call) -> Tensor:
    """Compute few queries over a long cache: read k and v in place, with a bias as small as the scores.

    Query heads that share a key head become rows of one query block, so that grouped heads copy nothing.
    """
    q, k, v, layout, slopes, window = call.q, call.k, call.v, call.layout, call.slopes, call.window
    batch, heads, query, head_dim = q.shape
    shape = (batch, heads, query, v.shape[3])
    kv_heads = k.shape[1]
    folded = q.reshape(batch, kv_heads, heads // kv_heads * query, head_dim)
    if slopes is None and query == 1 and window is None and layout.whole:
        return kernel(folded, k, v).reshape(shape)
    mask, some = layout.memo(("mask", window), lambda: seen(layout, window))
    if slopes is None:
        shared = mask.expand(batch, heads // kv_heads, query, -1).reshape(batch, 1, folded.shape[2], -1)
        return torch.where(some, kernel(folded, k, v, shared).reshape(shape), 0.0)

    def build() -> Tensor:
        return _bias(layout.distances(), slopes, q).masked_fill(~mask, -torch.inf)

    bias = layout.memo(("bias", q.device, q.dtype, window), build, owner=slopes)
    rows = bias.reshape(batch, kv_heads, folded.shape[2], -1)
    return torch.where(some, kernel(folded, k, v, rows).reshape(shape), 0.0)
