"""What a patched attention layer does with its queries and keys."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ctxext.architectures._positions import LayoutMask
from ctxext.attention import AttentionBackend, Layout, Need, select
from ctxext.methods import BiasMethod
from ctxext.spec import AlibiSpec

__all__ = ["AlibiAttend", "row_lengths"]


def row_lengths(mask: LayoutMask) -> list[int]:
    """Tokens that each row of the batch holds so far: the length that a dynamic method follows.

    Counted from positions, so that padding, the rest of the batch and unfilled cache slots do not matter.
    """

    def count() -> list[int]:
        layout = mask.layout
        positions = layout.key_positions
        if layout.key_documents is not None:
            positions = torch.where(layout.key_documents >= 0, positions, -1)
        return [int(length) for length in (positions.amax(dim=1) + 1).tolist()]

    if mask.length is not None:
        return [mask.length] * mask.layout.batch
    return mask.layout.memo("row_lengths", count)


@dataclass
class AlibiAttend:
    """ALiBi on a backend. One object serves all layers of a model.

    Args:
        method: gives the slopes; may depend on the length of each row.
        alibi: heads and trained length.
        base_slopes: slopes that the checkpoint was trained with, float64 [heads]; None for the ALiBi paper's.
        backend: a backend's name, or "auto".
    """

    method: BiasMethod
    alibi: AlibiSpec
    backend: str = "auto"
    _slopes: dict[Any, Tensor] = field(default_factory=dict, repr=False)
    _chosen: dict[Need, AttentionBackend] = field(default_factory=dict, repr=False)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: LayoutMask, *, scale: float, window: int | None, dropout: float
    ) -> Tensor:
        """Attention of one layer; tensors are ``[batch, heads, seq, head_dim]``."""
        layout = mask.layout
        if not self.method.dynamic:
            return self._run(q, k, v, layout, self.slopes(self.alibi.trained_length, q.device), scale, window, dropout)
        lengths = row_lengths(mask)
        if len(set(lengths)) == 1:
            return self._run(q, k, v, layout, self.slopes(lengths[0], q.device), scale, window, dropout)
        rows = []
        for row, length in enumerate(lengths):
            one = layout.memo(("row", row), functools.partial(layout.rows, row, row + 1))
            here = slice(row, row + 1)
            slopes = self.slopes(length, q.device)
            rows.append(self._run(q[here], k[here], v[here], one, slopes, scale, window, dropout))
        return torch.cat(rows)

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
