"""What a patched attention layer does with its queries and keys."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from ctxext.architectures._caches import current_filling
from ctxext.architectures._positions import LayoutMask
from ctxext.architectures._regime import note_regimes, refuse_mixed_regimes
from ctxext.attention import AttentionBackend, Layout, Need, named, require_usable, select
from ctxext.methods import BiasMethod
from ctxext.spec import AlibiSpec

__all__ = ["AlibiAttend"]


@dataclass
class AlibiAttend:
    """ALiBi on a backend. One object serves all layers of a model.

    Args:
        method: gives the slopes; may depend on the length of each row.
        alibi: heads and trained length.
        backend: a backend's name as ``ctxext.attention.named`` takes it, or "auto".
    """

    method: BiasMethod
    alibi: AlibiSpec
    backend: str = "auto"
    _slopes: dict[Any, Tensor] = field(default_factory=dict, repr=False)
    _chosen: dict[Need, AttentionBackend] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        require_usable(self.backend)

    def notes(self) -> tuple[str, ...]:
        """What a user must know about a backend that was asked for by name."""
        said = None if self.backend == "auto" else named(self.backend).approximation
        return () if said is None else (said,)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: LayoutMask, *, scale: float, window: int | None, dropout: float
    ) -> Tensor:
        """Attention of one layer; tensors are ``[batch, heads, seq, head_dim]``."""
        layout = mask.layout
        q, k, v = _as_autocast_wants(q, k, v)
        if not self.method.dynamic:
            return self._run(q, k, v, layout, self.slopes(self.alibi.trained_length, q.device), scale, window, dropout)
        rows = layout.memo("regimes", lambda: self._regimes(mask))
        regimes = {regime for documents in rows for regime in documents.values()}
        if len(regimes) == 1:
            return self._run(q, k, v, layout, self.slopes(regimes.pop(), q.device), scale, window, dropout)
        parts = []
        for row, documents in enumerate(rows):
            one = layout.memo(("row", row), functools.partial(layout.rows, row, row + 1))
            here = slice(row, row + 1)
            out = torch.zeros_like(q[here])
            for regime in sorted(set(documents.values())):
                slopes = self.slopes(regime, q.device)
                found = self._run(q[here], k[here], v[here], one, slopes, scale, window, dropout)
                out = torch.where(_standing_in(one, documents, regime), found, out)
            parts.append(out)
        return torch.cat(parts)

    def _regimes(self, mask: LayoutMask) -> list[dict[int, int]]:
        """For each row, the regime of each document; padding and unfilled cache slots are in none."""
        layout, trained, filling = mask.layout, self.alibi.trained_length, current_filling()
        if filling is not None:
            filling.spoil()  # this layer's keys are in the cache already
        if mask.length is not None:
            regime = self.method.regime(trained, mask.length)
            note_regimes(0, [regime])
            return [{0: regime}]
        ends = _extremes(layout.key_positions, layout.key_documents, "amax")
        starts = _extremes(layout.query_positions, layout.query_documents, "amin")
        rows = []
        for row, (last, first) in enumerate(zip(ends, starts, strict=True)):
            before, now = [first.get(d, 0) for d in last], [place + 1 for place in last.values()]
            refuse_mixed_regimes(self.method, trained, row, len(ends), before, now)
            rows.append({d: self.method.regime(trained, p + 1) for d, p in last.items()} or {0: trained})
        return rows

    def slopes(self, length: int, device: torch.device) -> Tensor:
        """The method's slopes for ``length`` tokens, float64 [heads], kept per device."""
        found = self._slopes.get((length, device))  # asked once: another thread may clear them at any time
        if found is None:
            if len(self._slopes) > 64:
                self._slopes.clear()
            with torch.inference_mode(False):  # what is made in it could not be used in training, and this is kept
                found = self.method.slopes(self.alibi, length).to(device)
            # A tensor without data, as torch.export traces with, would stay behind in the live model.
            if torch.compiler.is_dynamo_compiling() or not is_fake(found):
                self._slopes[length, device] = found
        return found

    def _run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: Layout,
        slopes: Tensor,
        scale: float,
        window: int | None,
        dropout: float,
    ) -> Tensor:
        backend = choose(self._chosen, self.backend, q, k, v, layout, biased=True, window=window, dropout=dropout)
        return backend(q, k, v, layout, scale=scale, slopes=slopes, window=window, dropout=dropout)


def _as_autocast_wants(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values in the dtype that autocast gives to torch's own attention.

    Rotation leaves queries and keys in float32 there, and values as their projection made them.
    """
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(part if part.dtype is torch.float64 else part.to(dtype) for part in tensors)


def _standing_in(layout: Layout, documents: dict[int, int], regime: int) -> Tensor:
    """Which queries of a row stand in a document of this regime: bool ``[1, 1, query, 1]``."""
    if layout.query_documents is None:
        return torch.ones(1, 1, layout.query_length, 1, dtype=torch.bool, device=layout.query_positions.device)
    chosen = torch.tensor([d for d, own in documents.items() if own == regime], device=layout.query_positions.device)
    return torch.isin(layout.query_documents, chosen)[:, None, :, None]


def _extremes(positions: Tensor, documents: Tensor | None, which: str) -> list[dict[int, int]]:
    """For each row, the last ("amax") or first ("amin") position of each document."""
    if documents is None:
        return [{0: place} for place in getattr(positions, which)(1).tolist()]
    rows = []
    for places, names in zip(positions, documents, strict=True):
        ids, index = torch.unique(names, return_inverse=True)
        found = torch.empty_like(ids).scatter_reduce(0, index, places.to(ids.dtype), which, include_self=False)
        rows.append({name: place for name, place in zip(ids.tolist(), found.tolist(), strict=True) if name >= 0})
    return rows


def choose(
    chosen: dict[Need, AttentionBackend],
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    *,
    biased: bool,
    window: int | None,
    dropout: float,
) -> AttentionBackend:
    """The backend for a call; asked once per kind of call."""
    need = Need.of(q, k, v, layout, biased=biased, window=window, dropout=dropout)
    if torch.compiler.is_compiling():
        return select(name, need)[0]
    found = chosen.get(need)
    if found is None:
        if len(chosen) > 256:  # lengths are part of a need: decoding would fill it
            chosen.clear()
        found = chosen[need] = select(name, need)[0]
    return found
