"""Compute ALiBi in a patched attention layer, with the slopes of each row and document."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from ctxext.attention.attend import Backends, LayerCall, require_float64
from ctxext.caches.generation import LengthRule, fit_to_lengths, note_fitted_lengths
from ctxext.caches.layout_mask import LayoutMask
from ctxext.caches.records import current_pass
from ctxext.errors import IncompatibleError
from ctxext.files import digest
from ctxext.kernels import Layout
from ctxext.kernels.base import expand_heads
from ctxext.methods import BiasMethod
from ctxext.spec import AlibiSpec


@dataclass
class AlibiAttend:
    """ALiBi on a backend; one object serves all layers of a model.

    Args:
        method: the source of the slopes, which may depend on the length of each row.
    """

    method: BiasMethod
    alibi: AlibiSpec
    backends: Backends
    _slopes: dict[Any, Tensor] = field(default_factory=dict, repr=False)

    @property
    def reads_pages(self) -> bool:
        """True if it computes continuous batches: the slopes are the same for each request."""
        return not self.method.dynamic

    def __call__(self, layer: LayerCall) -> Tensor:
        """Compute the attention of one layer, ``[batch, heads, seq, head_dim]``."""
        require_float64(layer.q.device)
        layout = layer.mask.layout
        if not self.method.dynamic:
            return self._run(layer, layout, self.alibi.trained_length)
        rows = layout.memo("fitted_lengths", lambda: self._fitted_lengths(layer.mask))
        fitted_lengths = {fitted for documents in rows for fitted in documents.values()}
        if len(fitted_lengths) == 1:
            return self._run(layer, layout, fitted_lengths.pop())
        parts = []
        for row, documents in enumerate(rows):
            row_layout = layout.memo(("row", row), functools.partial(layout.rows, row, row + 1))
            q, k, v = (part[row : row + 1] for part in layer[:3])
            alone, (first, *others) = layer._replace(q=q, k=k, v=v), sorted(set(documents.values()))
            out = self._run(alone, row_layout, first)
            for fitted in others:
                part = self._run(alone, row_layout, fitted)
                out = torch.where(_is_in(row_layout, documents, fitted), part, out)
            parts.append(out)
        return torch.cat(parts)

    def _run(self, layer: LayerCall, layout: Layout, length: int) -> Tensor:
        """Attend with the slopes for a length in tokens."""
        slopes = self.slopes(length, layer.q.device)
        if self.method.splits_heads:
            return self._halves(layer, layout, slopes)
        return self.backends.run(layer.call(layout, slopes=slopes))

    def _halves(self, layer: LayerCall, layout: Layout, slopes: Tensor) -> Tensor:
        """Attend with the first half of the heads to earlier tokens, with the other half to later ones."""
        q, k, v, *_ = layer
        if layout.sees != "both":
            raise IncompatibleError(
                "both_ways='halves' needs attention that sees both ways, but it is causal here. Unpatch the model for "
                "such inputs."
            )
        if layout.query_length != layout.key_length:
            raise IncompatibleError(
                f"both_ways='halves' needs the whole text at once, found {layout.query_length} queries and "
                f"{layout.key_length} keys: heads that look ahead cannot use a cache. Call the model with "
                f"use_cache=False."
            )
        half = q.shape[1] // 2
        if k.shape[1] % 2:  # a key head serves queries of both halves
            k, v = expand_heads(q.shape[1], k, v)
        (q, q_ahead), (k, k_ahead), (v, v_ahead) = (part.chunk(2, 1) for part in (q, k, v))
        # Keep the two halves: layers find shared data by the identity of their slopes.
        first, second = layout.memo("half the slopes", lambda: (slopes[:half], slopes[half:]), owner=slopes)
        past = layout.memo("past", lambda: layout.past)
        mirrored = layout.memo("mirrored", lambda: layout.mirrored)
        back = self.backends.run(layer.call(past, q=q, k=k, v=v, slopes=first))
        q, k, v = (part.flip(2) for part in (q_ahead, k_ahead, v_ahead))
        ahead = self.backends.run(layer.call(mirrored, q=q, k=k, v=v, slopes=second))
        return torch.cat([back, ahead.flip(2)], 1)

    def _fitted_lengths(self, mask: LayoutMask) -> list[dict[int, int]]:
        """Return for each row the fitted length of each document, without padding and unfilled cache slots."""
        layout, filling = mask.layout, current_pass.filling
        rule = LengthRule(self.method, self.alibi.trained_length)
        if filling is not None:
            filling.spoil()  # the cache already contains the keys of this layer
        if isinstance(mask.length, int) and not (rule.by_request or current_pass.continues):
            fitted = rule.fitted(mask.length)
            note_fitted_lengths(0, [fitted])
            return [{0: fitted}]
        ends = _extremes(layout.key_positions, layout.key_documents, "amax")
        starts = _extremes(layout.query_positions, layout.query_documents, "amin")
        rows = []
        for row, (last, first) in enumerate(zip(ends, starts, strict=True)):
            before, now = [first.get(d, last[d] + 1) for d in last], [place + 1 for place in last.values()]
            fitted_lengths = fit_to_lengths(rule, row, len(ends), before, now, mask.length)
            rows.append(dict(zip(last, fitted_lengths, strict=True)) or {0: rule.trained_length})
        return rows

    def slopes(self, length: int, device: torch.device) -> Tensor:
        """Return the method's slopes for ``length`` tokens, float64 [heads], cached per device."""
        slopes = self._slopes.get((length, device))  # look once: another thread may clear the cache at any time
        if slopes is None:
            if len(self._slopes) > 64:
                self._slopes.clear()
            with torch.inference_mode(
                False
            ):  # training could not use a tensor from inference mode, and this one is kept
                slopes = self.method.slopes(self.alibi, length).to(device)
            # A fake tensor, as torch.export traces with, must not stay in the live model.
            if torch.compiler.is_dynamo_compiling() or not is_fake(slopes):
                self._slopes[length, device] = slopes
        return slopes


def _is_in(layout: Layout, documents: dict[int, int], fitted: int) -> Tensor:
    """Mark the queries of a row in documents of this fitted length: bool ``[1, 1, query, 1]``."""
    of_query = layout.query_documents
    assert of_query is not None, "one document has one length"
    chosen = torch.tensor([d for d, length in documents.items() if length == fitted], device=of_query.device)
    return torch.isin(of_query, chosen)[:, None, :, None]


def _extremes(positions: Tensor, documents: Tensor | None, reduction: str) -> list[dict[int, int]]:
    """Return for each row the last ("amax") or first ("amin") position of each document."""
    if documents is None:
        return [{0: place} for place in getattr(positions, reduction)(1).tolist()]
    rows = []
    for places, names in zip(positions, documents, strict=True):
        ids, index = torch.unique(names, return_inverse=True)
        extremes = torch.empty_like(ids).scatter_reduce(0, index, places.to(ids.dtype), reduction, include_self=False)
        rows.append({name: place for name, place in zip(ids.tolist(), extremes.tolist(), strict=True) if name >= 0})
    return rows


def bias_fingerprint(method: BiasMethod, alibi: AlibiSpec) -> str:
    """Return 12 hexadecimal digits of a hash of the slopes at the target length."""
    slopes = method.slopes(alibi, method.target_length(alibi.trained_length))
    return digest(slopes.float().numpy().tobytes())
