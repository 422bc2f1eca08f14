"""Scores that encodings add to the products of queries and keys, and the backend that adds them.

A score has one of four forms. It is a product of further dimensions of q and k (``columns``); the difference of two
places, in such dimensions too (``places``); equal for all far keys (``far_from``); or any number for each pair
(``rows``). Fused kernels compute the first three. The last is computed for some queries at a time.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from ctxext.errors import InvalidParameterError
from ctxext.kernels import AttentionBackend, Call
from ctxext.kernels.blocks import QKV, Output, by_some_queries
from ctxext.kernels.columns import COLUMNS, HALF_MOST, columns_of, put_in_front
from ctxext.kernels.sdpa import BIAS_BYTES, FusedKernel, Sdpa, bias_dtype, seen
from ctxext.laboratory.near_far import attend_near_far, has_far_keys
from ctxext.methods.encoding import Pairs, Weighting


class PairScore(Weighting):
    """Term that an encoding adds to the scaled product of every query and key.

    Attention computes the term for a few queries at a time, so that it is never stored for all pairs, and computes it
    again in the backward pass.

    Attributes of every score:
        weights: parameters of the term, which get gradients from attention.
        floats: numbers per pair that ``rows`` holds while it computes, all heads together.
        far_from: distance in tokens, at least 1, from which on all keys of a query get the same; None if there is none.
    """

    weights: tuple[Tensor, ...]
    floats: int
    far_from: int | None = None

    @abstractmethod
    def rows(self, queries: slice) -> Float[Tensor, "rows heads queries key"]:
        """Compute the term for these queries, in float32 or float64; one row where all rows of the batch are alike."""

    def columns(self) -> tuple[Tensor, Tensor]:
        """Factor the term into ``query . key`` of a few more dimensions, ``[rows, heads or 1, seq, n]``.

        The product may differ from the term by a constant per query, which a softmax cancels. Only terms of low rank
        have this form.
        """
        raise NotImplementedError

    def above_far(self) -> Float[Tensor, "rows heads queries distances"]:
        """Return near keys' surplus over far keys, for distances below ``far_from``; one query where all are alike."""
        raise NotImplementedError

    def places(self) -> tuple[Float[Tensor, "batch heads query"], Float[Tensor, "batch heads key"]]:
        """Split the term into the place of the query minus the place of the key, in float64, where it has this form.

        A place is one number per head and token, such as a cumulative distance.
        """
        raise NotImplementedError

    def seen(self) -> tuple[str, Tensor]:
        return "added to the score", self.rows(slice(None))

    def form(self, dtype: torch.dtype) -> Literal["columns", "places", "rows"]:
        """Return the form in which the term reaches a kernel; columns need the precision of a 32-bit q."""
        if type(self).places is not PairScore.places:
            return "places"
        is_wide = dtype in (torch.float32, torch.float64)
        return "columns" if is_wide and type(self).columns is not PairScore.columns else "rows"

    def attend(self, call: Call, backend: AttentionBackend) -> Output:
        training = call.need.training or (torch.is_grad_enabled() and any(one.requires_grad for one in self.weights))
        call = replace(call, need=replace(call.need, training=training))
        if not isinstance(backend, Sdpa):
            return _by_rows(self, call, fused=False)
        if call.need.value_dim is not None:
            return self.attend(call.evened, backend)[..., : call.v.shape[3]]
        form, query = self.form(call.q.dtype), call.q.shape[2]
        far = form == "rows" and self.far_from is not None and has_far_keys(call, self.far_from)
        if far and backend.refuses(replace(call.need, lse=True)) is None:
            return attend_near_far(backend, call, self.above_far())
        if form == "rows" or (query <= backend.dense_rows and query < call.k.shape[2]):
            # Columns would need a widened copy of the whole cache for each new token.
            return _by_rows(self, call, fused=True)
        if form == "places" and training and call.q.dtype in (torch.bfloat16, torch.float16):
            # A place's gradient sums over all later tokens, so that rounding of 16-bit columns would dominate it.
            q, k, v = call.q.float(), call.k.float(), call.v.float()
            wide = replace(call, q=q, k=k, v=v, need=replace(call.need, dtype=torch.float32))
            return self.attend(wide, backend).to(call.q.dtype)
        q, k, v = _with_places(self, call) if form == "places" else _with_columns(self, call)
        need = replace(call.need, head_dim=q.shape[3], biased=True)
        if backend.refuses(need) is not None:
            return _by_rows(self, call, fused=True)
        return backend.attend(replace(call, q=q, k=k, v=v, need=need))[..., : call.q.shape[3]]


@dataclass(frozen=True, eq=False)
class ByDistance(PairScore):
    """A score that depends only on the head and on the distance from the query back to the key.

    Args:
        pairs: queries and keys of the call.
        of: function from integer distances ``[...]`` to scores ``[heads, ...]``, in float32 or float64.
        weights: parameters that ``of`` uses.
        floats: numbers per pair that ``rows`` holds while it computes.
        far_from: distance from which on ``of`` is constant; None if it never is.
    """

    pairs: Pairs
    of: Callable[[Tensor], Tensor]
    weights: tuple[Tensor, ...]
    floats: int
    far_from: int | None = None

    def rows(self, queries: slice) -> Float[Tensor, "rows heads queries key"]:
        return self.of(self.pairs.distances(queries)).transpose(0, 1)

    def above_far(self) -> Float[Tensor, "1 heads 1 distances"]:
        assert self.far_from is not None
        by_distance = self.of(torch.arange(self.far_from + 1, device=self.pairs.q.device))
        return (by_distance[:, :-1] - by_distance[:, -1:])[None, :, None]


def _with_columns(score: PairScore, call: Call) -> QKV:
    """Return q, k and v of a call whose score is a product of further dimensions, put in front of q and k."""
    (query, key), (batch, heads) = score.columns(), call.q.shape[:2]
    room = -query.shape[-1] % COLUMNS  # head dimensions are multiples of 8, for fused kernels
    query = query / call.scale
    query, key = (F.pad(part, (0, room)).expand(batch, heads, -1, -1).to(call.q.dtype) for part in (query, key))
    return put_in_front(call, query, key)


def _with_places(score: PairScore, call: Call) -> QKV:
    """Return q, k and v of a call whose score is the difference of two places, in columns as for slopes.

    The error is as in ``kernels.columns``, with the difference of two places for ``slope * distance``. Places of both
    sides get gradients, although a term common to all keys of a query changes nothing: the rounding error of a pair's
    gradient is then on both sides, and cancels for inputs that both places share.
    """
    dtype, (queries, keys) = call.q.dtype, score.places()
    if dtype == torch.float16 and keys.device.type == "cpu" and not torch.compiler.is_compiling():
        _require_half(float(keys.detach().abs().max()), call.scale)
    # Not centred as for slopes: the middle would depend on tokens that a query must not see.
    query = columns_of(-queries, scale=call.scale, dtype=dtype, side="query")
    key = columns_of(-keys, scale=call.scale, dtype=dtype, side="key")
    return put_in_front(call, query, key)


def _require_half(place: float, scale: float) -> None:
    """Raise ``InvalidParameterError`` for a place that columns of float16 cannot hold."""
    if place > HALF_MOST * scale:
        raise InvalidParameterError(
            f"This text has places up to {place:,.0f} under its encoding, and columns of float16 hold "
            f"{HALF_MOST * scale:,.0f}. Use bfloat16."
        )


def _by_rows(score: PairScore, call: Call, *, fused: bool) -> Tensor:
    """Add a score for some queries at a time, and recompute it in a backward pass.

    Fused kernels give no gradient to a bias, so the softmax is written out if one is needed.
    """
    kernel, layout = FusedKernel(call.need, call.scale, call.dropout), call.layout
    k, v = call.expanded
    size = max(1, BIAS_BYTES // (4 * score.floats * layout.batch * k.shape[2]))

    def attend(rows: slice, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask, some = seen(layout, call.window, rows)
        bias = score.rows(rows).masked_fill(~mask, -torch.inf)
        if fused and not bias.requires_grad:
            return torch.where(some, kernel(q, k, v, bias.to(bias_dtype(q))), 0.0)
        scores = q.to(bias.dtype) @ k.to(bias.dtype).transpose(-1, -2) * call.scale + bias
        weights = torch.dropout(torch.softmax(scores, -1), call.dropout, train=call.dropout > 0)
        wide = q.dtype if fused else bias.dtype
        return torch.where(some, weights.to(wide) @ v.to(wide), 0.0).to(q.dtype)

    return by_some_queries(attend, call.q, k, v, size, again=call.need.training)
