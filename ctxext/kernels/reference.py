"""The oracle: attention as in the textbook formula, for some queries at a time."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from ctxext.kernels.base import AttentionBackend, Call, Need, expand_heads
from ctxext.kernels.blocks import Output, OutputAndLse, PartRule, by_some_queries, score_blocks

BYTES = 64 * 2**20
"""Memory in bytes of the scores that autograd computes at once. Below 32 MiB the C library keeps what is freed in one
heap, where small tensors that stay between two blocks of queries would make it useless for the next block."""


class Reference(AttentionBackend):
    """Attention with scores in float32 (float64 for float64 tensors), and gradients by autograd.

    Pick it to check another backend. ``auto`` takes it on a CPU for soft caps and for dropout, which no fused kernel
    has there. Scores are materialised for some queries at a time, so memory is linear; a backward pass recomputes them.
    """

    name = "reference"
    summary = "float32 scores, some queries at a time: obvious, the oracle; soft caps on CPUs"
    encodes = True
    softcaps = True

    def why_not(self, need: Need) -> str | None:
        if need.order == "external":
            return "it masks by itself, but under this layout an engine around the kernel does."
        return None

    def attend(self, call: Call) -> Output:
        query = call.q.shape[2]
        size = max(1, BYTES // (4 * call.q.shape[0] * call.q.shape[1] * call.k.shape[2]))
        if torch.compiler.is_compiling() or size >= query:
            return self._some(call, slice(None), call.q, call.k, call.v)
        some = functools.partial(self._some, call)
        return by_some_queries(some, call.q, call.k, call.v, size, again=call.need.training)

    def _some(self, call: Call, rows: slice, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Compute some queries, ``q``, of a call."""
        layout = call.layout
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        k, v = (x.to(dtype) for x in expand_heads(q.shape[1], k, v))
        scores = q.to(dtype) @ k.transpose(-1, -2) * call.scale
        if call.softcap is not None:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        if call.slopes is not None:
            distances = layout.distances(queries=rows)[:, None]
            scores = scores - call.slopes.to(dtype)[None, :, None, None] * distances
        hidden = ~layout.visible(call.window, queries=rows)[:, None]
        # A row of only -inf gives NaN in the softmax and its gradient: let it see everything, then set it to 0.
        nothing = hidden.all(-1, keepdim=True)
        weights = torch.softmax(scores.masked_fill(hidden & ~nothing, -math.inf), -1)
        weights = torch.dropout(weights.masked_fill(nothing, 0.0), call.dropout, train=call.dropout > 0)
        return (weights @ v).to(q.dtype)

    def bands(self, need: Need) -> bool:
        return True

    def with_lse(self, q: Tensor, k: Tensor, v: Tensor, rule: PartRule) -> OutputAndLse:
        q, k, v = q.detach(), k.detach(), v.detach()
        out = q.new_empty(*q.shape[:3], v.shape[-1])
        lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
        for block in score_blocks(q, k, rule):
            scores, values = block.scores, v[block.there].to(lse.dtype)
            largest = scores.amax(-1, keepdim=True)
            largest.masked_fill_(largest == -math.inf, 0.0)  # of queries that see nothing
            weights = scores.sub_(largest).exp_()
            total = weights.sum(-1, keepdim=True)
            lse[block.here] = (largest + total.log())[..., 0]
            weighted = block.by_key_head(weights) @ values
            out[block.here] = weighted.view_as(out[block.here]) / total.masked_fill(total == 0, 1.0)
        return out, lse
