"""A window of single tokens, and a few summaries of all that lies before it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from ctxext.methods.encoding import Encoding, EncodingForm, EncodingMethod, EncodingSpec, OwnAttention, Pairs
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
            summaries of larger blocks than those of the target length share one learned score.
        window: tokens that a query sees one by one, itself included, at least 1; 0 for an eighth of the trained length.

    Source: ctxext's own, in no paper. Nearest kin: log-linear attention, Guo et al., arXiv:2506.04761, whose partition
        of the text into blocks this is. Its blocks are states of linear attention; here they are means of keys and
        values.
    """

    name: ClassVar[str] = "hierarchical_summary"
    summary: ClassVar[str] = "a window of tokens, and summaries of blocks that grow with distance"
    source: ClassVar[str] = "ctxext's own, in no paper"
    shared: ClassVar[bool] = False
    form: ClassVar[EncodingForm] = "own"

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


class _WindowAndSummaries(OwnAttention):
    """Tokens are counted from the start of their document by the slots that they stand in.

    All is computed at once: before Python 3.12 a ``cached_property`` has a lock, which torch.compile breaks a graph at.
    """

    def __init__(self, pairs: Pairs, weights: tuple[Tensor, ...], window: int) -> None:
        self.pairs, self.weights, self.window = pairs, weights, window
        self.floats = 4 * pairs.q.shape[1]
        self.length, self.keys = pairs.q.shape[2], pairs.k.shape[2]
        documents = pairs.key_documents
        slots = torch.arange(self.keys, device=pairs.q.device)
        self.documents = torch.zeros_like(slots)[None] if documents is None else documents
        starts = F.pad(self.documents.diff(dim=1) != 0, (1, 0), value=True)
        self.ranks = slots - torch.where(starts, slots, 0).cummax(1).values
        # Queries stand side by side: the last at the last token, but for a whole text, where padding may follow.
        first = 0 if self.length == self.keys else torch.where(self.documents >= 0, slots, 0).max() + 1 - self.length
        self.at = torch.arange(self.length, device=slots.device) + first
        self.query_ranks, self.query_documents = self.ranks[:, self.at], self.documents[:, self.at]
        # How many tokens of its document lie before a query's window, and which sizes of blocks these make: the digits.
        self.before = torch.where(self.query_documents < 0, 0, (self.query_ranks - self.window + 1).clamp(min=0))
        self.has_block = torch.stack([self.before >> level & 1 for level in range(self.levels)], -1).bool()
        kv_heads, q = pairs.k.shape[1], pairs.q.to(pairs.dtype)
        self.q = q.reshape(q.shape[0], kv_heads, -1, *q.shape[2:])  # [batch, kv_heads, shared, query, head_dim]

    @property
    def levels(self) -> int:
        return self.keys.bit_length()

    def _starts(self, level: int) -> Int[Tensor, "rows query"]:
        """Return the first token of the block of this size: behind all larger ones."""
        return self.before >> level + 1 << level + 1

    def _of_level(self, level: int) -> Float[Tensor, "kv_heads shared 1"]:
        scores = self.pairs.like_scores(self.weights[0])
        return scores[:, min(level, scores.shape[1] - 1), None].view(*self.q.shape[1:3], 1)

    def _mixed(self, of_levels: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the share of each block, and that of the window: ``[batch, kv_heads, shared, query, level or 1]``."""
        scores = torch.stack(of_levels, -1)
        here = self.has_block[:, None, None]
        some = here.any(-1, keepdim=True)
        blocks = scores.masked_fill(~here & some, -math.inf).softmax(-1)
        gate, bias = (
            self.pairs.like_scores(weight).view(*self.q.shape[1:3], *weight.shape[1:]) for weight in self.weights[1:]
        )
        asked = (self.q * gate[:, :, None]).sum(-1, keepdim=True) * self.pairs.scale + bias[..., None, None]
        window = torch.where(some, torch.sigmoid(asked), 1.0)
        return blocks * (1 - window), window

    def attend(self, v: Float[Tensor, "batch kv_heads key head_dim"]) -> Float[Tensor, "batch heads query head_dim"]:
        k, values = self.pairs.k.to(self.q.dtype), v.to(self.q.dtype)
        scores, means = [], []
        for level in range(self.levels):
            # The mean of the 2^level tokens that end at a slot, for every slot; blocks end at some of them.
            ends = self.at - (self.query_ranks - self._starts(level)) + (1 << level) - 1
            ends = torch.where(self.has_block[..., level], ends, 0)
            key = _at(k, ends)[:, :, None]
            scores.append((self.q * key).sum(-1) * self.pairs.scale + self._of_level(level))
            means.append(_at(values, ends))
            if level + 1 < self.levels:
                k, values = ((x + F.pad(x, (0, 0, 1 << level, 0))[:, :, : self.keys]) / 2 for x in (k, values))
        blocks, window = self._mixed(scores)
        far = sum((blocks[..., level, None] * mean[:, :, None] for level, mean in enumerate(means)), torch.zeros(()))
        mixed = window * self._nearby(v).reshape(self.q.shape) + far
        return mixed.flatten(1, 2).to(self.pairs.q.dtype)

    def _nearby(self, v: Tensor) -> Float[Tensor, "batch heads query head_dim"]:
        """Attend inside the window, for some queries at a time."""
        q, k, shared = self.pairs.q, self.pairs.k, self.q.shape[2]
        size, parts = max(BLOCK, self.window), []
        for start in range(0, self.length, size):
            stop = min(start + size, self.length)
            slots = self.at[start] + torch.arange(1 - self.window, stop - start, device=q.device)
            held = slots.clamp(min=0)
            seen = self._seen(slice(start, stop), held) & (slots >= 0)
            some = seen.any(-1, keepdim=True)
            mask = (seen | ~some).repeat(1, shared, 1)[:, None]
            folded = q[:, :, start:stop].reshape(q.shape[0], k.shape[1], -1, q.shape[3])
            keys, values = (x.index_select(2, held) for x in (k, v))
            out = F.scaled_dot_product_attention(folded, keys, values, mask, scale=self.pairs.scale)
            parts.append(torch.where(some[:, None], out.reshape(*q.shape[:2], -1, q.shape[3]), 0.0))
        return torch.cat(parts, 2)

    def _seen(self, queries: slice, slots: Int[Tensor, " slots"]) -> Bool[Tensor, "rows queries slots"]:
        """Return which keys of some slots are in the windows of some queries."""
        documents, back = self.documents[:, None, slots], self.at[queries, None] - slots
        same = (documents == self.query_documents[:, queries, None]) & (documents >= 0)
        return same & (back >= 0) & (back < self.window)

    def weights_of(self, queries: slice) -> Float[Tensor, "batch heads queries key"]:
        dtype = self.q.dtype
        k = self.pairs.k.to(dtype)[:, :, None]
        of_documents = self.documents[:, None] == self.query_documents[..., None]
        scores, shares = [], []
        for level in range(self.levels):
            inside = (self.ranks[:, None] >> level) == (self._starts(level) >> level)[..., None]
            shares.append((inside & of_documents & self.has_block[..., level, None]).to(dtype) / (1 << level))
            key = shares[-1][:, None, None] @ k
            scores.append((self.q * key).sum(-1) * self.pairs.scale + self._of_level(level))
        blocks, window = self._mixed(scores)
        near = self._seen(slice(None), torch.arange(self.keys, device=k.device))[:, None, None]
        some = near.any(-1, keepdim=True)
        products = (self.q @ k.transpose(-1, -2) * self.pairs.scale).masked_fill(~near & some, -math.inf)
        weights = window * products.softmax(-1) * some
        for level, share in enumerate(shares):
            weights = weights + blocks[..., level, None] * share[:, None, None]
        return weights.flatten(1, 2)[:, :, queries]


def _at(
    x: Float[Tensor, "batch heads key numbers"], slots: Int[Tensor, "rows query"]
) -> Float[Tensor, "batch heads query numbers"]:
    return x.gather(2, slots[:, None, :, None].expand(x.shape[0], x.shape[1], -1, x.shape[3]))
