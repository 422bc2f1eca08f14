"""What a patched attention layer does with its queries and keys."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ctxext.architectures._positions import LayoutMask
from ctxext.architectures._regime import refuse_mixed_regimes
from ctxext.attention import AttentionBackend, Layout, Need, check_name, named, select
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
        check_name(self.backend)

    def notes(self) -> tuple[str, ...]:
        """What a user must know about a backend that was asked for by name."""
        said = None if self.backend == "auto" else named(self.backend).approximation
        return () if said is None else (said,)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: LayoutMask, *, scale: float, window: int | None, dropout: float
    ) -> Tensor:
        """Attention of one layer; tensors are ``[batch, heads, seq, head_dim]``."""
        layout = mask.layout
        if not self.method.dynamic:
            return self._run(q, k, v, layout, self.slopes(self.alibi.trained_length, q.device), scale, window, dropout)
        lengths = layout.memo("lengths", lambda: self._lengths(mask))
        if len(set(lengths)) == 1:
            return self._run(q, k, v, layout, self.slopes(lengths[0], q.device), scale, window, dropout)
        rows = []
        for row, length in enumerate(lengths):
            one = layout.memo(("row", row), functools.partial(layout.rows, row, row + 1))
            here = slice(row, row + 1)
            slopes = self.slopes(length, q.device)
            rows.append(self._run(q[here], k[here], v[here], one, slopes, scale, window, dropout))
        return torch.cat(rows)

    def _lengths(self, mask: LayoutMask) -> list[int]:
        """Tokens that each row holds so far, padding and unfilled cache slots not counted."""
        layout = mask.layout
        if mask.length is not None:
            return [mask.length] * layout.batch
        keys, queries = layout.key_positions, layout.query_positions
        if layout.key_documents is not None and layout.query_documents is not None:
            keys = torch.where(layout.key_documents >= 0, keys, -1)
            queries = torch.where(layout.query_documents >= 0, queries, torch.iinfo(queries.dtype).max)
        lengths = [int(last) + 1 for last in keys.amax(dim=1).tolist()]
        firsts = [int(first) for first in queries.amin(dim=1).tolist()]
        cached = [0 if first >= length else first for first, length in zip(firsts, lengths, strict=True)]
        refuse_mixed_regimes(self.method, self.alibi.trained_length, cached, lengths)
        return lengths

    def slopes(self, length: int, device: torch.device) -> Tensor:
        """The method's slopes for ``length`` tokens, float64 [heads], kept per device."""
        length = max(length, self.alibi.trained_length) if self.method.dynamic else 0
        if (length, device) not in self._slopes:
            if len(self._slopes) > 64:
                self._slopes.clear()
            slopes = self.method.slopes(self.alibi, length or self.alibi.trained_length)
            self._slopes[length, device] = slopes.to(device)
        return self._slopes[length, device]

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
        backend = choose(self._chosen, self.backend, q, k, layout, biased=True, window=window, dropout=dropout)
        return backend(q, k, v, layout, scale=scale, slopes=slopes, window=window, dropout=dropout)


def choose(
    chosen: dict[Need, AttentionBackend],
    name: str,
    q: Tensor,
    k: Tensor,
    layout: Layout,
    *,
    biased: bool,
    window: int | None,
    dropout: float,
) -> AttentionBackend:
    """The backend for a call; asked once per kind of call."""
    need = Need.of(q, k, layout, biased=biased, window=window, dropout=dropout)
    if torch.compiler.is_compiling():
        return select(name, need)[0]
    if need not in chosen:
        if len(chosen) > 256:  # lengths are part of a need: decoding would fill it
            chosen.clear()
        chosen[need] = select(name, need)[0]
    return chosen[need]
