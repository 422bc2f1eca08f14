"""Scores of some queries and heads at a time, for attention that is written out: memory stays linear in the length."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CPU_BYTES = 8 * 2**20
"""Memory in bytes of the scores of a block on a CPU: the caches of its cores hold them."""

ACCELERATOR_BYTES = 256 * 2**20
"""Memory in bytes of the scores of a block elsewhere; less would leave an accelerator idle."""

ROWS = 64
"""Least number of rows (queries times the query heads of a key head) in a block: fewer make slow matrix products."""


QKV = tuple[Tensor, Tensor, Tensor]
"""q, k and v, or their gradients."""
Output = Float[Tensor, "batch heads query value_dim"]
OutputAndLse = tuple[Output, Float[Tensor, "batch heads query"]]
"""The output of attention, and the log-sum-exp of each query's scores."""


class PartRule(NamedTuple):
    """The scores of a call without positions, and its visible pairs.

    Args:
        scale: Factor of ``q . k``.
        causal: True if the last query sees all keys, and each query before it one key fewer; else all see all keys.
            Only a backend with ``bands`` is given more keys than queries.
        mask: Visible pairs, bool, ``[batch, heads or 1, query, key]``; not together with ``causal``.
        softcap: Bound of the scores; only given to a backend with ``softcaps``.
        window: Keys that a query of a causal call sees, up to the key of the query itself; only given to a backend with
            ``bands``.
    """

    scale: float
    causal: bool = False
    mask: Tensor | None = None
    softcap: float | None = None
    window: int | None = None


class ScoreBlock(NamedTuple):
    """Scores, and the part of a call to which they belong.

    Args:
        here: index of the block in queries and outputs: rows, query heads and queries.
        there: index of the block in keys and values: rows, key heads and keys.
    """

    here: tuple[slice, slice, slice]
    there: tuple[slice, slice, slice]
    scores: Float[Tensor, "batch heads queries keys"]

    def by_key_head(self, x: Float[Tensor, "batch heads queries dim"]) -> Float[Tensor, "batch kv_heads rows dim"]:
        """Return queries or scores of this block as rows of the key heads that they read."""
        return x.reshape(x.shape[0], self.there[1].stop - self.there[1].start, -1, x.shape[-1])


def by_some_queries(
    attend: Callable[[slice, Tensor, Tensor, Tensor], Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    size: int,
    *,
    again: bool,
) -> Tensor:
    """Attend from ``size`` queries at a time; with ``again``, a backward pass computes each part once more."""
    parts = []
    for start in range(0, q.shape[2], size):
        rows = slice(start, min(start + size, q.shape[2]))
        arguments = (rows, q[:, :, rows], k, v)
        parts.append(checkpoint(attend, *arguments, use_reentrant=False) if again else attend(*arguments))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def score_blocks(
    q: Float[Tensor, "batch heads query head_dim"],
    k: Float[Tensor, "batch kv_heads key head_dim"],
    rule: PartRule,
) -> Iterator[ScoreBlock]:
    """Yield all scores of a call of ``AttentionBackend.with_lse``, invisible pairs as minus infinity.

    Scores are float32 (float64 for float64 tensors), and new tensors. A causal block holds only keys that one of its
    queries sees. Query heads that share a key head are rows of one matrix product, so no key is repeated.
    """
    scale, causal, mask, softcap, window = rule
    (batch, heads, query, head_dim), (kv_heads, key) = q.shape, k.shape[1:3]
    wide, shared = torch.promote_types(q.dtype, torch.float32), heads // kv_heads
    most = CPU_BYTES if q.device.type == "cpu" else ACCELERATOR_BYTES
    rows = max(most // (wide.itemsize * batch * shared * key), -(-ROWS // shared))
    some = max(1, min(kv_heads, rows // query))  # key heads whose scores fit together
    factor = scale if softcap is None else scale / softcap
    for first in range(0, kv_heads, some):
        key_heads = slice(first, min(first + some, kv_heads))
        query_heads = slice(key_heads.start * shared, key_heads.stop * shared)
        keys = k[:, key_heads].to(wide)
        for start in range(0, query, rows):
            stop = min(start + rows, query)
            here = slice(None), query_heads, slice(start, stop)
            newest = stop + key - query if causal else key  # the last query of a causal call sees all keys
            seen = slice(0 if window is None else max(0, newest - (stop - start) - window + 1), newest)
            block = q[here].to(wide).reshape(batch, keys.shape[1], -1, head_dim)
            scores = (block @ keys[:, :, seen].transpose(-1, -2)).mul_(factor)  # scaled last, as kernels do
            if softcap is not None:
                scores = scores.tanh_().mul_(softcap)
            scores = scores.view(batch, -1, stop - start, scores.shape[-1])
            if causal and stop - start > 1:
                near = scores if window is not None else scores[..., start - stop :]  # the others are all visible
                pairs = torch.ones(near.shape[-2:], dtype=torch.bool, device=q.device)
                behind = near.shape[-1] - near.shape[-2]
                near.masked_fill_(pairs.triu(behind + 1), -math.inf)
                if window is not None:
                    near.masked_fill_(pairs.tril(behind - window), -math.inf)
            if mask is not None:
                of_heads = query_heads if mask.shape[1] > 1 else slice(None)
                scores.masked_fill_(~mask[:, of_heads, start:stop, seen], -math.inf)
            yield ScoreBlock(here, (slice(None), key_heads, seen), scores)
