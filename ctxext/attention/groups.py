"""Some of the key-value groups of a layer: key heads, and the query heads that read each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class HeadGroups:
    """Some of the ``total`` key-value groups of a layer, in ascending order.

    Args:
        numbers: the groups, counted from 0; at least one.
        total: all groups of the layer.
    """

    numbers: tuple[int, ...]
    total: int
    _indices: dict[torch.device, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def of(self, x: Float[Tensor, "batch heads seq head_dim"]) -> Float[Tensor, "batch some seq head_dim"]:
        """Return these groups' heads of queries, keys or values: a view where they lie side by side, else a copy."""
        shared, first, count = x.shape[1] // self.total, self.numbers[0], len(self.numbers)
        if self.numbers[-1] - first + 1 == count:
            return x[:, first * shared : (first + count) * shared]
        return x.index_select(1, self._heads(shared, x.device))

    def _heads(self, shared: int, device: torch.device) -> Tensor:
        """Return the heads of these groups, ``shared`` to a group."""
        groups = self._indices.get(device)
        if groups is None:
            groups = self._indices[device] = torch.tensor(self.numbers, device=device)
        return groups if shared == 1 else (groups[:, None] * shared + torch.arange(shared, device=device)).flatten()


def joined(
    parts: Sequence[tuple[HeadGroups, Float[Tensor, "batch some query head_dim"]]],
) -> Float[Tensor, "batch heads query head_dim"]:
    """Return all heads in order, from those of groups that together are all of a layer's."""
    order = torch.tensor([number for groups, _ in parts for number in groups.numbers]).argsort()
    # Memory in the order that the layers expect, so that they need no copy.
    outputs = torch.cat([output.transpose(1, 2) for _, output in parts], 2)
    batch, query, heads, head_dim = outputs.shape
    grouped = outputs.view(batch, query, len(order), heads // len(order), head_dim)
    ordered = grouped.index_select(2, order.to(outputs.device))
    return ordered.view(batch, query, heads, head_dim).transpose(1, 2)
