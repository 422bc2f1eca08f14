"""Positions by accumulated transitions: every token turns what reaches over it, as the text says."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ctxext.errors import IncompatibleError
from ctxext.laboratory.encodings.householder import Transitions
from ctxext.laboratory.scores import PairScore
from ctxext.methods.encoding import Encoding, EncodingMethod, EncodingSpec, Pairs
from ctxext.methods.parameters import Range

WIDTH = 3
"""Tokens that a direction is mixed from: its own, and those before it."""


@dataclass(frozen=True, kw_only=True)
class PaTH(EncodingMethod):
    """Let every token between key and query transform the query on its way, instead of rotation.

    Pick it for tasks that follow a state through a text: with these transitions a model of a few layers learns parity
    and reads it far beyond its training, which no encoding that knows distances alone does. A transition is
    ``I - beta w w^T``: it shrinks, erases or reflects one direction. The direction is a low-rank projection of the
    layer's states, mixed with the two tokens before it, of length 1; both it and the strength are of each token and
    key head. It begins as no positions at all: strengths begin near 0, where a transition changes nothing. The cost:
    scores are computed chunk by chunk in plain torch, without fused kernels, at several times the cost of plain
    attention, and each decoded token goes back over the whole text; a cache keeps, next to keys and values, as many
    numbers again as a key has, and one more. Models with a sliding window are refused, since its cache drops the tokens
    that directions are mixed from. The model needs training.

    Args:
        factor: target_length / trained_length. Dimensionless, at least 1. Says how far the model is meant to read;
            transitions do not depend on it.
        rank: rank of the projection that makes directions, at least 1.
        strength: first value of every strength ``beta``, above 0 and below 2. The authors, who train from scratch,
            begin at 1; near 0 a trained model begins where ``nope`` does.

    Source: Yang et al., arXiv:2505.16381, section 3. Authors' code: fla-org/flash-linear-attention@bc3b101,
        fla/layers/path_attn.py (the same layer; their projection for few key heads is of full rank),
        fla/ops/path_attn/naive.py. Their Triton kernels are not used: they keep transformed keys, which no cache of
        transformers holds.
    """

    name = "path"
    summary = "every token transforms the queries that reach over it"
    source = "arXiv:2505.16381"
    shared = False
    carries = True
    form = "scores"
    forgets: ClassVar[bool] = False

    rank: Annotated[int, Range(least=1, most=4096)] = 32
    strength: Annotated[float, Range(above=0, below=2)] = 0.01

    def build(self, spec: EncodingSpec) -> Encoding:
        return _TransitionsOfTokens(spec, self.rank, self.strength, forgets=self.forgets)


class _TransitionsOfTokens(Encoding):
    """Weights that make a layer's transitions, and gates of query heads where it also forgets."""

    def __init__(self, spec: EncodingSpec, rank: int, strength: float, *, forgets: bool) -> None:
        super().__init__()
        heads, kv_heads, self.head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self.inner = nn.Parameter(torch.randn(rank, spec.hidden_size) * spec.hidden_size**-0.5)
        self.outer = nn.Parameter(torch.randn(kv_heads * self.head_dim, rank) * rank**-0.5)
        # As torch draws a convolution of one channel; the newest token's weight is the last.
        self.mix = nn.Parameter((2 * torch.rand(kv_heads, self.head_dim, WIDTH) - 1) * WIDTH**-0.5)
        self.strong = nn.Parameter(torch.zeros(kv_heads, spec.hidden_size))
        self.strong_bias = nn.Parameter(torch.full((kv_heads,), math.log(strength / (2 - strength))))
        if forgets:
            self.gate = nn.Parameter(torch.randn(heads, spec.hidden_size) * spec.embedding_std)
            self.gate_bias = nn.Parameter(torch.zeros(heads))
        self.kv_heads, self.forgets = kv_heads, forgets

    def carried(self, states: Float[Tensor, "batch seq hidden"]) -> Float[Tensor, "batch kv_heads seq numbers"]:
        """Return what a token carries: what directions are mixed from, its strength, and the gates of its heads.

        Strengths and gates as what a sigmoid is taken of. A direction is mixed where it is used, since that needs the
        tokens before it, which a cache holds.
        """
        directions = F.linear(F.linear(states, self.inner), self.outer)
        parts = [directions, F.linear(states, self.strong, self.strong_bias)]
        if self.forgets:
            parts.append(F.linear(states, self.gate, self.gate_bias))
        split = [part.reshape(*part.shape[:2], self.kv_heads, -1) for part in parts]
        return torch.cat(split, -1).transpose(1, 2)

    def score(self, pairs: Pairs) -> PairScore:
        return _Transformed(pairs, self.mix)


class _Transformed(PairScore):
    """Change of the scores of pairs by transitions, and by gates where there are any."""

    reads_all = True

    def __init__(self, pairs: Pairs, mix: Tensor) -> None:
        if pairs.carried is None:
            raise IncompatibleError(
                "Transitions were asked for without the numbers of each token that they are made of. Call the "
                "attention of a patched model, or give Pairs what Encoding.carried returns."
            )
        self.pairs, self.weights, self.floats = pairs, (pairs.carried, mix), 8 * pairs.q.shape[1]
        self.at, head_dim = pairs.places, mix.shape[1]
        numbers = pairs.carried.to(pairs.dtype)
        directions, strength, gates = torch.split(numbers, [head_dim, 1, numbers.shape[-1] - head_dim - 1], -1)
        w = F.normalize(F.silu(_mixed(directions, pairs.like_scores(mix), pairs)), dim=-1, eps=1e-6)
        beta = pairs.without_padding(2 * torch.sigmoid(strength))[..., 0]
        self.transitions = Transitions(pairs.k.to(pairs.dtype), w, beta)
        self.forgotten = _forgotten(gates, pairs) if gates.shape[-1] else None

    def rows(self, queries: slice) -> Float[Tensor, "batch heads queries key"]:
        asking, at = self.pairs.q[:, :, queries].to(self.pairs.dtype), self.at[:, queries]
        # No query here sees a key from ``stop`` on: the last query is the last key, or lies before it.
        stop = self.pairs.k.shape[2] - self.pairs.q.shape[2] + min(queries.stop or at.shape[1], self.pairs.q.shape[2])
        change = self.transitions.change(asking, at, stop)
        if self.forgotten is not None:
            passed = self.forgotten.gather(2, at[:, None].expand(*self.forgotten.shape[:2], -1))
            change = change + (passed[..., None] - self.forgotten[:, :, None]).to(change.dtype)
        return change * self.pairs.scale


def _mixed(
    directions: Float[Tensor, "batch kv_heads key head_dim"],
    mix: Float[Tensor, "kv_heads head_dim width"],
    pairs: Pairs,
) -> Float[Tensor, "batch kv_heads key head_dim"]:
    """Mix each token's direction with directions of earlier tokens of its document, past any padding between them."""
    mixed, documents = directions * mix[:, None, :, -1], pairs.key_documents
    slots = torch.arange(directions.shape[2], device=directions.device).expand(len(directions), -1)
    last = slots if documents is None else torch.where(documents >= 0, slots, -1).cummax(1).values
    previous = F.pad(last[:, :-1], (1, 0), value=-1)  # the slot of the token before each one; -1 for none
    before = slots
    for back in range(1, WIDTH):
        before = torch.where(before >= 0, previous.gather(1, before.clamp(min=0)), -1)
        same = before >= 0
        if documents is not None:
            same = same & (documents.expand_as(slots).gather(1, before.clamp(min=0)) == documents)
        at = before.clamp(min=0)[:, None, :, None].expand_as(directions)
        mixed = mixed + directions.gather(2, at) * same[:, None, :, None] * mix[:, None, :, -1 - back]
    return mixed


def _forgotten(gates: Float[Tensor, "batch kv_heads key shared"], pairs: Pairs) -> Float[Tensor, "batch heads key"]:
    """Sum up what has been forgotten so far, in float64: only differences count, which are small compared with it."""
    each = pairs.without_padding(F.logsigmoid(gates)).double().cumsum(2)
    return each.transpose(2, 3).flatten(1, 2)
