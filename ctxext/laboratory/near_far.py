"""Compute scores that are equal for all keys from some distance on: a near band, and plain attention beyond it.

A softmax ignores a term that is common to all scores of a query. So an encoding that distinguishes only near keys (T5's
buckets, Shaw's vectors) leaves far pairs as they are, and adds to near ones their score *above* the far ones. The band
is materialised for some queries at a time; the rest is one call of an ordinary kernel without a mask, and both are
merged by their log-sum-exp, as in ``ctxext.kernels.pieces``.

Gradients of the far part need the merged output and log-sum-exp, since a kernel's log-sum-exp carries none. Gradients
of the band follow from its share of the whole, and reach the encoding by autograd.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ctxext.kernels.base import AttentionBackend, Call, without_autocast
from ctxext.kernels.blocks import PartRule

QUERIES = 256
"""Queries of the band that are materialised at once, unless the band is wider."""


def has_far_keys(call: Call, band: int) -> bool:
    """Return whether the call is one whole text, with keys beyond ``band`` tokens."""
    layout = call.layout
    if call.window is not None or call.dropout or call.need.compiling:
        return False
    is_text = layout.whole and layout.consecutive and not call.need.cached and layout.sees == "past"
    return is_text and call.need.query_length > band


def attend_near_far(
    backend: AttentionBackend, call: Call, above: Float[Tensor, "rows heads queries distances"]
) -> Float[Tensor, "batch heads query head_dim"]:
    """Compute a call for which ``has_far_keys`` holds, differentiable in all its inputs.

    Args:
        above: surplus of near keys' scores over far keys', by distance.
    """
    band, q = above.shape[3], call.q
    k, v = call.expanded
    outs, lses, size = [], [], max(QUERIES, band)
    for start in range(0, q.shape[2], size):
        stop, first = min(start + size, q.shape[2]), max(0, start - band + 1)
        here = above if above.shape[2] == 1 else above[:, :, start:stop]
        arguments = (q[:, :, start:stop], k[:, :, first:stop], v[:, :, first:stop], here, call.scale)
        part = checkpoint(_near, *arguments, use_reentrant=False) if call.need.training else _near(*arguments)
        outs.append(part[0])
        lses.append(part[1])
    out, lse = torch.cat(outs, 2), torch.cat(lses, 2)
    merged: Tensor = _WithFar.apply(  # type: ignore[no-untyped-call]
        backend,
        call.scale,
        q[:, :, band:],
        call.k[:, :, :-band],
        call.v[:, :, :-band],
        out[:, :, band:],
        lse[:, :, band:],
    )
    return torch.cat([out[:, :, :band].to(q.dtype), merged], 2)


def _near(q: Tensor, k: Tensor, v: Tensor, above: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Compute output and log-sum-exp of the band alone, for queries at the last of these keys.

    Args:
        q: ``[batch, heads, queries, head_dim]``.
        k: ``[batch, heads, keys, head_dim]``.
        v: values, of the shape of ``k``.
        above: the score above far keys by distance, ``[rows, heads, queries or 1, distances]``.
    """
    queries, keys, band = q.shape[2], k.shape[2], above.shape[3]
    places = torch.arange(keys - queries, keys, device=q.device)
    distances = places[:, None] - torch.arange(keys, device=q.device)
    index = distances.clamp(0, band - 1).expand(*above.shape[:2], queries, keys)
    added = above.expand(-1, -1, queries, -1).gather(3, index)
    scores = q.to(added.dtype) @ k.to(added.dtype).transpose(-1, -2) * scale + added
    scores = scores.masked_fill((distances < 0) | (distances >= band), -math.inf)
    lse = torch.logsumexp(scores, -1)
    return (scores - lse[..., None]).exp().to(v.dtype) @ v, lse


class _WithFar(torch.autograd.Function):
    """Attention to the far keys by a kernel, merged with output and log-sum-exp of the near ones.

    Query ``i`` sees the far keys ``0 .. i``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        backend: AttentionBackend,
        scale: float,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        near: Tensor,
        near_lse: Tensor,
    ) -> Tensor:
        far, far_lse = backend.with_lse(q, k, v, PartRule(scale, causal=True))
        lse = torch.logaddexp(near_lse, far_lse.to(near_lse.dtype))
        share = (near_lse - lse).exp()[..., None]
        out = (near * share + far * (1 - share)).to(q.dtype)
        ctx.backend, ctx.scale = backend, scale
        ctx.save_for_backward(q, k, v, near, share, out, lse)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, k, v, near, share, out, lse = ctx.saved_tensors
        with without_autocast(q.device):
            grads = ctx.backend.gradients(q, k, v, out, lse, grad, PartRule(ctx.scale, causal=True))
        wide = grad.to(lse.dtype)
        of_lse = (wide * (near.to(lse.dtype) - out.to(lse.dtype))).sum(-1) * share[..., 0]
        dq, dk, dv = (part.to(x.dtype) for part, x in zip(grads, (q, k, v), strict=True))
        return None, None, dq, dk, dv, (wide * share).to(near.dtype), of_lse
