"""Products of Householder-like transitions between two tokens, a chunk of tokens at a time.

Every token ``t`` has a transition ``H_t = I - beta_t w_t w_t^T``, and a query at ``i`` meets the key at ``j`` through
all transitions behind the key, up to the query's::

    q_i^T H_i H_{i-1} ... H_{j+1} k_j

Inside a chunk the product is written as ``I - W^T T diag(beta) W`` with a triangular ``T`` (the UT transform), which
one solve finds for all tokens of a chunk. From chunk to chunk a query is carried back: it leaves a chunk as ``q`` times
the product of its transitions. A query inside a chunk passes those transitions only that are not behind itself, which
is the same formula with zeros for the others; so there is one formula for all pairs.

Source: Yang et al., arXiv:2505.16381, section 3. Authors' code: fla-org/flash-linear-attention@bc3b101,
    fla/ops/path_attn/naive.py and parallel.py. They move keys to the end of their chunk; here queries do all moving.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor


class Transitions:
    """The transitions of a row of tokens, made ready once for all queries.

    Memory is linear in the number of tokens: each token's own numbers, and ``size`` more for its chunk.

    Args:
        k: keys, float32 or float64.
        w: directions, of length 1.
        beta: strengths, in [0, 2]. Where it is 0 the transition changes nothing, whatever ``w`` is.
        size: tokens of a chunk, at least 1. The result does not depend on it, but for rounding.
    """

    def __init__(
        self,
        k: Float[Tensor, "batch kv_heads key head_dim"],
        w: Float[Tensor, "batch kv_heads key head_dim"],
        beta: Float[Tensor, "batch kv_heads key"],
        size: int = 64,
    ) -> None:
        self.length, self.size = k.shape[2], size
        room = (-self.length) % size
        self.k, self.w = (_chunked(F.pad(x, (0, 0, 0, room)), size) for x in (k, w))
        strong = self.w * _chunked(F.pad(beta, (0, room))[..., None], size)
        behind = (strong @ self.k.transpose(-1, -2)).tril(-1)
        solved = torch.linalg.solve_triangular(
            strong @ self.w.transpose(-1, -2), torch.cat([strong, behind], -1), upper=False, unitriangular=True
        )
        self.onto_queries, self.onto_scores = solved.split([k.shape[3], size], -1)

    def change(
        self, q: Float[Tensor, "batch heads query head_dim"], places: Int[Tensor, "rows query"], stop: int
    ) -> Float[Tensor, "batch heads query key"]:
        """Return what the transitions add to the products of these queries and all keys: 0 where none is between.

        Args:
            q: queries, in the dtype of the keys.
            places: key that each query is at; one row where all rows of the batch are alike.
            stop: key that lies behind all queries. Keys from there on are left out.
        """
        batch, kv_heads, head_dim = self.k.shape[0], self.k.shape[1], q.shape[3]
        shared = q.shape[1] // kv_heads
        q = q.reshape(batch, kv_heads, -1, head_dim)  # query heads that share a key head become rows of one block
        places = places.repeat(1, shared)[:, None, :, None]
        moved, parts = torch.zeros_like(q), []
        for chunk in range((stop - 1) // self.size, -1, -1):
            slots = torch.arange(chunk * self.size, (chunk + 1) * self.size, device=q.device)
            along = ((q + moved) @ self.w[:, :, chunk].transpose(-1, -2)) * (slots <= places)
            parts.append(moved @ self.k[:, :, chunk].transpose(-1, -2) - along @ self.onto_scores[:, :, chunk])
            moved = moved - along @ self.onto_queries[:, :, chunk]
        change = torch.cat(parts[::-1], -1)
        change = F.pad(change, (0, self.length - change.shape[-1]))  # which also takes the room at the end away
        return change.reshape(batch, kv_heads * shared, -1, self.length)


def _chunked(x: Tensor, size: int) -> Float[Tensor, "batch heads chunks size numbers"]:
    return x.reshape(*x.shape[:2], -1, size, x.shape[3])
