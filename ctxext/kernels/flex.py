"""FlexAttention: the bias as a compiled ``score_mod``, visibility as a block mask, optionally a window per head."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, no_type_check

import torch
from jaxtyping import Bool
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from ctxext.errors import BackendUnavailableError
from ctxext.kernels.base import AttentionBackend, Call, Need
from ctxext.kernels.blocks import Output, OutputAndLse, PartRule
from ctxext.kernels.layout import Layout

BLOCK = 128
"""Tokens per side of a block of the mask."""

# Limit of recompilations, one for each kind of call.
KINDS = 256


class Flex(AttentionBackend):
    """FlexAttention: exact float32 bias inside the kernel; invisible blocks are skipped.

    Pick it on CUDA for head dimensions at which eight more columns cost a lot (128), and for windows. It compiles for
    seconds at first use, and has no backward on CPU.
    """

    name = "flex"
    summary = "FlexAttention: float32 bias and soft caps in the kernel, block-sparse masks"
    softcaps = True

    def why_not(self, need: Need) -> str | None:
        if need.device not in ("cpu", "cuda"):
            return f"it compiles for CPU and CUDA, found {need.device!r}."
        if need.device == "cuda" and (narrowest := min(need.head_dim, need.value_dim or need.head_dim)) < 16:
            return f"its CUDA kernels need a head_dim of at least 16, found {narrowest}."
        if need.device == "cpu" and need.lse:
            return "on CPU it compiles for about 10 s for every shape, and attention in pieces has many."
        if need.device == "cpu" and need.training:
            return "FlexAttention has no backward on CPU. Use 'sdpa' to train."
        if need.device == "cpu" and need.cached:
            return "on CPU it compiles for about 10 s whenever the number of keys changes."
        if need.dropout:
            return "FlexAttention has no attention dropout. Load the model with attention_dropout=0.0."
        if need.order == "external":
            return "it masks by itself, but under this layout an engine around the kernel does."
        if need.dtype == torch.float64:
            return "its kernels are for float32, bfloat16 and float16."
        if need.training and (need.query_length % BLOCK or need.key_length % BLOCK):
            return (
                f"its backward with a bias and a block mask has given NaN for lengths that no {BLOCK} divides "
                f"(pytorch#153799). Pad the lengths {need.query_length} and {need.key_length}."
            )
        return None

    def attend(self, call: Call) -> Output:
        q, k, v, layout, slopes, window = call.q, call.k, call.v, call.layout, call.slopes, call.window
        if not torch.is_grad_enabled():  # on CPU it refuses tensors that require one, even without a backward pass
            q, k, v = q.detach(), k.detach(), v.detach()
        mask = layout.memo(("block mask", window), lambda: block_mask(layout, window))
        grouped = False
        if q.shape[1] != k.shape[1]:
            grouped = True
        out: Tensor = _kernel(q.device)(
            q,
            k,
            v,
            score_mod=_score_mod(None if slopes is None else slopes.float(), layout, call.softcap),
            block_mask=mask,
            scale=call.scale,
            enable_gqa=grouped,
            kernel_options=_options(q, k),
        )
        return out

    def with_lse(self, q: Tensor, k: Tensor, v: Tensor, rule: PartRule) -> OutputAndLse:
        q, k, v = q.detach(), k.detach(), v.detach()
        out, extra = _kernel(q.device)(
            q,
            k,
            v,
            score_mod=_score_cap(rule.softcap),
            block_mask=_blocks_of(rule, q.shape[2], k.shape[2], q.device),
            scale=rule.scale,
            enable_gqa=q.shape[1] != k.shape[1],
            kernel_options=_options(q, k),
            return_aux=AuxRequest(lse=True),
        )
        return out, extra.lse


def _kernel(device: torch.device) -> Callable[..., Any]:
    """Return FlexAttention, compiled unless it is being compiled."""
    if torch.compiler.is_compiling():
        return flex_attention
    return _compiled(device.type)


def _options(q: Tensor, k: Tensor) -> dict[str, bool] | None:
    """Return options that disable the decoding kernel where its row block would be too large.

    The kernel for fewer than 128 queries reads a key once for all query heads of its group, as rows of one block. Where
    these are more than a block of the mask, torch 2.11 to 2.13 find no kernel at all ("No choices to select").
    """
    group = q.shape[1] // k.shape[1]
    most = 1 << ((BLOCK // group).bit_length() - 1) if group <= BLOCK else 0
    is_too_much = q.device.type == "cuda" and most < q.shape[2] < BLOCK
    return {"FORCE_USE_FLEX_ATTENTION": True} if is_too_much else None


def _blocks_of(rule: PartRule, query: int, key: int, device: torch.device) -> BlockMask | None:
    """Return the visible pairs as a block mask; None if all are visible."""
    mask = rule.mask
    if mask is None and not rule.causal:
        return None

    @no_type_check  # traced by the kernel
    def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return j <= i if mask is None else mask[b, 0, i, j]

    rows = None if mask is None else mask.shape[0]
    return create_block_mask(sees, rows, None, query, key, device=str(device))


@functools.cache
def _compiled(device: str) -> Callable[..., Any]:
    """Compile one function per device. Its cache is keyed by shapes, so later calls only look it up.

    ``fullgraph`` makes too many recompilations an error; otherwise torch would silently go on in plain Python with full
    score matrices. torch's limit of eight is below the number of kinds of calls: dtypes, documents or none, one query
    or many, a window, grouped heads. Scales and caps stay constants: the kernels for CUDA take no number as an input
    (``unbacked_bindings``, torch 2.11). The CPU code generator is wrong for dynamic shapes (an undeclared variable,
    torch 2.13).
    """
    compiled = torch.compile(flex_attention, fullgraph=True, dynamic=False if device == "cpu" else None)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        try:
            with torch._dynamo.config.patch(recompile_limit=KINDS, specialize_float=True):
                return compiled(*args, **kwargs)
        except torch._dynamo.exc.TorchDynamoException as error:  # torch 2.15 on a CPU, with a soft cap
            raise BackendUnavailableError(
                f"Backend 'flex': torch {torch.__version__} cannot compile this call. Set attention='auto', or another."
            ) from error

    return kernel


def _score_cap(softcap: float | None) -> Callable[..., Tensor] | None:
    """Return the soft cap as a function of a score; None for none."""
    if softcap is None:
        return None

    @no_type_check
    def cap(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.tanh(score / softcap) * softcap

    score_mod: Callable[..., Tensor] = cap
    return score_mod


def _score_mod(slopes: Tensor | None, layout: Layout, softcap: float | None) -> Callable[..., Tensor] | None:
    """Return cap and bias as a function of indices. Its tensors are inputs of the compiled kernel, not constants."""
    queries, keys = layout.query_positions, layout.key_positions
    cap, both_ways = _score_cap(softcap), layout.sees == "both"
    if slopes is None:
        return cap

    @no_type_check  # traced by the kernel, where the bookkeeping of a type checker would be a side effect
    def subtract_bias(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if cap is not None:
            score = cap(score, b, h, i, j)
        distance = queries[b, i] - keys[b, j]
        if both_ways:
            distance = distance.abs()
        return score - slopes[h] * distance

    score_mod: Callable[..., Tensor] = subtract_bias
    return score_mod


def _mask_mod(layout: Layout, window: int | None) -> Callable[..., Tensor]:
    """Return ``Layout.visible`` as a function of indices."""
    queries, keys = layout.query_positions, layout.key_positions
    query_documents, key_documents = layout.query_documents, layout.key_documents
    both_ways = layout.sees == "both"

    @no_type_check
    def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        distance = queries[b, i] - keys[b, j]
        if both_ways:
            distance = distance.abs()
        seen = distance >= 0
        if window is not None:
            seen = seen & (distance < window)
        if query_documents is not None and key_documents is not None:
            seen = seen & (query_documents[b, i] == key_documents[b, j]) & (key_documents[b, j] >= 0)
        return seen

    mask_mod: Callable[..., Tensor] = sees
    return mask_mod


def block_mask(layout: Layout, window: int | None) -> BlockMask:
    """Return the layout's visibility in blocks, from the extremes of each block's positions and documents.

    Memory is one byte per *block*, while ``create_block_mask`` evaluates every pair (10 GB at 8K tokens and 16 heads).
    A block that may hold a visible pair is kept and masked pair by pair; a block that is surely visible throughout
    needs no mask.
    """
    queries = _extremes(layout.query_positions, layout.query_documents)
    keys = _extremes(layout.key_positions, layout.key_documents)
    q_low, q_high, q_first, q_last, q_whole = (x[:, :, None] for x in queries)
    k_low, k_high, k_first, k_last, k_whole = (x[:, None, :] for x in keys)
    nearest, farthest = q_low - k_high, q_high - k_low  # between a query and a key of each pair of blocks
    some = (k_first <= q_last) & (q_first <= k_last)
    every = (k_first == k_last) & (q_first == q_last) & (k_first == q_first) & q_whole & k_whole
    if layout.sees == "both":
        nearest, farthest = torch.maximum(nearest, k_low - q_high), torch.maximum(farthest, k_high - q_low)
    else:
        some, every = some & (farthest >= 0), every & (nearest >= 0)
    if window is not None:
        some = some & (nearest < window)
        every = every & (farthest < window)
    some, every = some[:, None], (every & some)[:, None]
    partial_count, partial = _ordered(some & ~every)
    full_count, full = _ordered(every)
    return BlockMask.from_kv_blocks(
        partial_count,
        partial,
        full_count,
        full,
        BLOCK_SIZE=BLOCK,
        mask_mod=_mask_mod(layout, window),
        seq_lengths=(layout.query_length, layout.key_length),
    )


def _extremes(positions: Tensor, documents: Tensor | None) -> tuple[Tensor, ...]:
    """Return per block: lowest and highest position, lowest and highest document, and whether all are tokens."""
    batch, length = positions.shape
    blocks = -(-length // BLOCK)
    documents = torch.zeros_like(positions) if documents is None else documents
    real = torch.zeros(batch, blocks * BLOCK, dtype=torch.bool, device=positions.device)
    real[:, :length] = documents >= 0
    far = 1 << 40  # beyond any position, while differences still fit into 64 bits

    def fold(values: Tensor, empty: int) -> Tensor:
        padded = torch.full((batch, blocks * BLOCK), empty, dtype=torch.long, device=values.device)
        padded[:, :length] = values
        return torch.where(real, padded, empty).view(batch, blocks, BLOCK)

    return (
        fold(positions, far).amin(-1),
        fold(positions, -far).amax(-1),
        fold(documents, far).amin(-1),
        fold(documents, -far).amax(-1),
        real.view(batch, blocks, BLOCK).all(-1),
    )


def _ordered(kept: Bool[Tensor, "batch heads rows columns"]) -> tuple[Tensor, Tensor]:
    """Return the number of kept blocks per row, and the indices of all blocks, kept ones first."""
    order = torch.argsort(kept.to(torch.int8), dim=-1, descending=True, stable=True)
    return kept.sum(-1, dtype=torch.int32), order.to(torch.int32)
