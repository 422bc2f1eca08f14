"""A window of single tokens, and a few summaries of all that lies before it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from ctxext.kernels import AttentionBackend, Call
from ctxext.kernels.sdpa import Sdpa
from ctxext.methods.encoding import Encoding, EncodingMethod, EncodingSpec, Pairs, Weighting
from ctxext.methods.parameters import MOST_TOKENS, Range, require

BLOCK = 128
"""Queries whose windows are looked through together, at least."""


@dataclass(frozen=True, kw_only=True)
class HierarchicalSummary(EncodingMethod):
    """Attend to the last tokens one by one, and to all before them through at most log2(N) summaries of their blocks.

    Pick it to see what a text costs that is read coarsely where it is far: time and memory grow with N log N, not with
    N squared, and a token's age is told by the size of the block it is in. The tokens before a query's window are cut
    into blocks of 1, 2, 4, 8 ... tokens, each at most once, the largest first in the text; a block's summary is the
    mean of its keys and of its values. Window and summaries are two attentions, mixed by a gate per head that the query
    opens. What is lost: a single far token cannot be read, only the mean of its block, so copying from far away is out
    of reach; inside the window nothing tells the order of tokens. The model needs training.

    This is a reading of "local window, hierarchical summaries, gate" that has been ascribed to PaTH and is not in its
    paper (``path`` is what the paper has). The form is ctxext's own, and nobody has published results for it.

    Args:
        factor: target_length / trained_length. Dimensionless, at least 1. Says how far the model is meant to read;
            blocks larger than the target length has share one learned score.
        window: tokens that a query sees one by one, itself included, at least 1; 0 for an eighth of the trained length.

    Source: ctxext's own, in no paper. Nearest kin: log-linear attention, Guo et al., arXiv:2506.04761, whose partition
        of the text into blocks this is. Its blocks are states of linear attention; here they are means of keys and
        values.
    """

    name = "hierarchical_summary"
    summary = "a window of tokens, and summaries of blocks that grow with distance"
    source = "ctxext's own, in no paper"
    shared = False
    form = "attention"

    window: Annotated[int, Range(least=0, most=MOST_TOKENS, of="tokens")] = 0

    def build(self, spec: EncodingSpec) -> Encoding:
        window, target = self.window or max(1, spec.trained_length // 8), self.target_length(spec.trained_length)
        require(window <= target, "window", window, f"at most the target length of {target:,} tokens")
        return _Summaries(spec, window, target.bit_length())


class _Summaries(Encoding):
    def __init__(self, spec: EncodingSpec, window: int, levels: int) -> None:
        super().__init__()
        self.window = window
        self.level = nn.Parameter(torch.zeros(spec.num_heads, levels))
        self.gate = nn.Parameter(torch.zeros(spec.num_heads, spec.head_dim))
        self.gate_bias = nn.Parameter(torch.zeros(spec.num_heads))

    def score(self, pairs: Pairs) -> _WindowAndSummaries:
        return _WindowAndSummaries(pairs, (self.level, self.gate, self.gate_bias), self.window)


class _WindowAndSummaries(Weighting):
    """Attention over the tokens of a call without the padding between them: their keys side by side, in their order.

    All is computed at once: before Python 3.12 a ``cached_property`` has a lock, which torch.compile breaks a graph at.
    """

    reads_all = True

    def __init__(self, pairs: Pairs, weights: tuple[Tensor, ...], window: int) -> None:
        self.pairs, self.weights, self.window = pairs, weights, window
        self.length, keys = pairs.q.shape[2], pairs.k.shape[2]
        places = torch.arange(keys, device=pairs.q.device).expand(len(pairs.places), -1)
        self.documents, self.order, self.of_slot = torch.zeros_like(places), None, places
        if pairs.key_documents is not None:
            real = pairs.key_documents >= 0
            self.order = (~real).long().argsort(dim=1, stable=True)
            self.documents = pairs.key_documents.gather(1, self.order)
            self.of_slot = (real.cumsum(1) - 1).clamp(min=0)
        starts = F.pad(self.documents.diff(dim=1) != 0, (1, 0), value=True)
        self.ranks = places - torch.where(starts, places, 0).cummax(1).values
        self.at = self.of_slot.gather(1, pairs.places)
        # Padding has any place. A token has the place of its own key.
        is_token = pairs.key_positions.gather(1, pairs.places) == pairs.query_positions
        if pairs.key_documents is not None:
            is_token = is_token & (pairs.key_documents.gather(1, pairs.places) >= 0)
        self.query_documents = torch.where(is_token, self.documents.gather(1, self.at), -1)
        self.query_ranks = self.ranks.gather(1, self.at)
        # How many tokens of its document lie before a query's window, and which sizes of blocks these make: the digits.
        self.before = torch.where(is_token, (self.query_ranks - self.window + 1).clamp(min=0), 0)
        self.levels = keys.bit_length()
        self.has_block = torch.stack([self.before >> level & 1 for level in range(self.levels)], -1).bool()
        kv_heads, q = pairs.k.shape[1], pairs.q.to(pairs.dtype)
        self.q = q.reshape(q.shape[0], kv_heads, -1, *q.shape[2:])  # [batch, kv_heads, shared, query, head_dim]

    def attend(self, call: Call, backend: AttentionBackend) -> Float[Tensor, "batch heads query value_dim"]:
        if not isinstance(backend, Sdpa) or call.dropout:
            weights = torch.dropout(self._weights(), call.dropout, train=call.dropout > 0)
            values = self._side_by_side(call.v).to(weights.dtype).repeat_interleave(self.q.shape[2], 1)
            return (weights @ values).to(call.q.dtype)
        k, values = (self._side_by_side(x).to(self.q.dtype) for x in (call.k, call.v))
        near = self._nearby(k, values)
        scores, means = [], []
        for level in range(self.levels):
            # The mean of the 2^level tokens that end at a token, for every token; blocks end at some of them.
            ends = self.at - (self.query_ranks - self._starts(level)) + (1 << level) - 1
            ends = torch.where(self.has_block[..., level], ends, 0)
            key = _at(k, ends)[:, :, None]
            scores.append(self._of_level(level, key))
            means.append(_at(values, ends))
            if level + 1 < self.levels:
                k, values = ((x + F.pad(x, (0, 0, 1 << level, 0))[:, :, : x.shape[2]]) / 2 for x in (k, values))
        blocks, window = self._mixed(scores)
        far = sum((blocks[..., level, None] * mean[:, :, None] for level, mean in enumerate(means)), torch.zeros(()))
        return (window * near + far).flatten(1, 2).to(call.q.dtype)

    def seen(self) -> tuple[str, Float[Tensor, "batch heads query key"]]:
        weights = self._weights()
        return "share of attention", weights.gather(3, self.of_slot[:, None, None].expand_as(weights))

    def _side_by_side(self, x: Float[Tensor, "batch kv_heads key numbers"]) -> Tensor:
        return x if self.order is None else _at(x, self.order)

    def _starts(self, level: int) -> Int[Tensor, "rows query"]:
        """Return the first token of the block of this size: behind all larger ones."""
        return self.before >> level + 1 << level + 1

    def _of_level(self, level: int, key: Tensor) -> Float[Tensor, "batch kv_heads shared query"]:
        """Return the score of each query's block of this size, whose keys have the mean ``key``."""
        scores = self.pairs.like_scores(self.weights[0])
        of_size = scores[:, min(level, scores.shape[1] - 1), None].view(*self.q.shape[1:3], 1)
        return (self.q * key).sum(-1) * self.pairs.scale + of_size

    def _mixed(self, of_levels: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the shares of each block and of the window: ``[batch, kv_heads, shared, query, level or 1]``."""
        scores = torch.stack(of_levels, -1)
        here = self.has_block[:, None, None]
        some = here.any(-1, keepdim=True)
        blocks = scores.masked_fill(~here & some, -math.inf).softmax(-1)
        gate, bias = (
            self.pairs.like_scores(weight).view(*self.q.shape[1:3], *weight.shape[1:]) for weight in self.weights[1:]
        )
        opened = (self.q * gate[:, :, None]).sum(-1, keepdim=True) * self.pairs.scale + bias[..., None, None]
        window = torch.where(some, torch.sigmoid(opened), 1.0)
        return blocks * (1 - window), window

    def _nearby(self, k: Tensor, v: Tensor) -> Float[Tensor, "batch kv_heads shared query value_dim"]:
        """Attend inside the window, for some queries at a time."""
        parts = []
        size = max(BLOCK, self.window)
        for start in range(0, self.length, size):
            queries = slice(start, min(start + size, self.length))
            # From one token to the next the place grows by 1; padding stands anywhere.
            is_token, count = self.query_documents[:, queries] >= 0, queries.stop - queries.start
            first = torch.where(is_token, self.at[:, queries], k.shape[2]).amin(1, keepdim=True)
            places = first + torch.arange(1 - self.window, count, device=first.device)
            nearby = places.clamp(0, k.shape[2] - 1)
            seen = self._sees(queries, nearby) & (places == nearby)[:, None]
            some = seen.any(-1, keepdim=True)[:, None]
            mask = (seen | ~some[:, 0]).repeat(1, self.q.shape[2], 1)[:, None]
            asking = self.q[..., queries, :].flatten(2, 3)
            out = F.scaled_dot_product_attention(asking, _at(k, nearby), _at(v, nearby), mask, scale=self.pairs.scale)
            parts.append(torch.where(some[:, None], out.reshape(*self.q.shape[:3], count, -1), 0.0))
        return torch.cat(parts, 3)

    def _sees(self, queries: slice, places: Int[Tensor, "rows places"]) -> Bool[Tensor, "rows queries places"]:
        """Return which keys at some places are in the windows of some queries."""
        of_query, back = self.query_documents[:, queries, None], self.at[:, queries, None] - places[:, None]
        same = (self.documents.gather(1, places)[:, None] == of_query) & (of_query >= 0)
        return same & (back >= 0) & (back < self.window)

    def _weights(self) -> Float[Tensor, "batch heads query key"]:
        """Return the weights of the values by definition, of keys side by side; 0 where masked."""
        k = self._side_by_side(self.pairs.k).to(self.q.dtype)[:, :, None]
        of_documents = self.documents[:, None] == self.query_documents[..., None]
        scores, shares = [], []
        for level in range(self.levels):
            inside = (self.ranks[:, None] >> level) == (self._starts(level) >> level)[..., None]
            shares.append((inside & of_documents & self.has_block[..., level, None]).to(k.dtype) / (1 << level))
            key = shares[-1][:, None, None] @ k
            scores.append(self._of_level(level, key))
        blocks, window = self._mixed(scores)
        every = torch.arange(k.shape[3], device=k.device).expand(len(self.documents), -1)
        near = self._sees(slice(None), every)[:, None, None]
        some = near.any(-1, keepdim=True)
        products = (self.q @ k.transpose(-1, -2) * self.pairs.scale).masked_fill(~near & some, -math.inf)
        weights = window * products.softmax(-1) * some
        for level, share in enumerate(shares):
            weights = weights + blocks[..., level, None] * share[:, None, None]
        return weights.flatten(1, 2)


def _at(
    x: Float[Tensor, "batch heads key numbers"], places: Int[Tensor, "rows places"]
) -> Float[Tensor, "batch heads places numbers"]:
    return x.gather(2, places[:, None, :, None].expand(x.shape[0], x.shape[1], -1, x.shape[3]))
