"""The oracle: attention as in the textbook formula."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from ctxext.attention.base import AttentionBackend, Call, Need, expand_heads
from ctxext.spec import OwnAttention, ScoreForm


class Reference(AttentionBackend):
    """Attention with the full score matrix in float32 (float64 for float64 tensors) and gradients by autograd.

    Pick it to check another backend. Memory is quadratic: ``heads * query * key`` floats, several times.
    """

    name: ClassVar[str] = "reference"
    summary: ClassVar[str] = "full float32 score matrix: slow, obvious, the oracle"
    scores: ClassVar[tuple[ScoreForm, ...]] = ("none", "columns", "places", "rows", "own")

    def why_not(self, need: Need) -> str | None:
        if need.order == "external":
            return "it masks by itself, but under this layout an engine around the kernel does."
        return None

    def attend(self, call: Call) -> Float[Tensor, "batch heads query head_dim"]:
        q, k, v, layout = call.q, call.k, call.v, call.layout
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        k, v = expand_heads(k, q.shape[1]).to(dtype), expand_heads(v, q.shape[1]).to(dtype)
        if isinstance(call.score, OwnAttention):
            weights = call.score.weights_of(slice(None)).to(dtype)
            return (torch.dropout(weights, call.dropout, train=call.dropout > 0) @ v).to(q.dtype)
        scores = q.to(dtype) @ k.transpose(-1, -2) * call.scale
        if call.slopes is not None:
            scores = scores - call.slopes.to(dtype)[None, :, None, None] * layout.distances()[:, None]
        if call.score is not None:
            scores = scores + call.score.rows(slice(None)).to(dtype)
        hidden = ~layout.visible(call.window)[:, None]
        # A row of only -inf gives NaN in the softmax and its gradient: let it see everything, then set it to 0.
        nothing = hidden.all(-1, keepdim=True)
        weights = torch.softmax(scores.masked_fill(hidden & ~nothing, -math.inf), -1)
        weights = torch.dropout(weights.masked_fill(nothing, 0.0), call.dropout, train=call.dropout > 0)
        return (weights @ v).to(q.dtype)

    def with_lse(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool, mask: Tensor | None = None
    ) -> tuple[Float[Tensor, "batch heads query head_dim"], Float[Tensor, "batch heads query"]]:
        dtype = torch.promote_types(q.dtype, torch.float32)
        k, v = expand_heads(k, q.shape[1]).to(dtype), expand_heads(v, q.shape[1]).to(dtype)
        scores = q.to(dtype) @ k.transpose(-1, -2) * scale
        if causal:
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
            scores = scores.masked_fill(~seen, -math.inf)
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf)
        return (torch.softmax(scores, -1).nan_to_num() @ v).to(q.dtype), torch.logsumexp(scores, -1)
