"""Key-value groups of a layer, a key head and the query heads that read it each, split into two kinds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True)
class HeadGroups:
    """Some of the ``total`` key-value groups of a layer, in ascending order."""

    numbers: tuple[int, ...]
    total: int
    _indices: dict[tuple[torch.device, int], Tensor] = field(default_factory=dict, repr=False, compare=False)

    def of(
        self, x: Float[Tensor, "batch heads seq head_dim"], out: Tensor | None = None
    ) -> Float[Tensor, "batch some seq head_dim"]:
        """Return these groups' heads: written to ``out``, or a view where they lie side by side, else a copy."""
        shared, first, count = x.shape[1] // self.total, self.numbers[0], len(self.numbers)
        if self.numbers[-1] - first + 1 == count:
            view = x[:, first * shared : (first + count) * shared]
            return view if out is None else out.copy_(view)
        key = (x.device, shared)
        if key not in self._indices:
            heads = [number * shared + head for number in self.numbers for head in range(shared)]
            self._indices[key] = _index(heads, x.device)
        return torch.index_select(x, 1, self._indices[key], out=out)


@dataclass(frozen=True)
class SplitGroups:
    """The groups of a layer that read far, and the others."""

    far: HeadGroups
    near: HeadGroups
    _far: dict[torch.device, Tensor] = field(default_factory=dict, repr=False, compare=False)
    _orders: dict[tuple[torch.device, int], Tensor] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, far: Sequence[int], total: int) -> SplitGroups:
        """Split ``total`` groups; some, but not all, read far."""
        near = [number for number in range(total) if number not in far]
        return cls(HeadGroups(tuple(far), total), HeadGroups(tuple(near), total))

    def far_groups(self, device: torch.device) -> Bool[Tensor, " groups"]:
        """Return which groups read far; a graph takes the tensor that a call before it has made."""
        if (known := self._far.get(device)) is not None:
            return known
        groups = torch.tensor([number in self.far.numbers for number in range(self.far.total)], device=device)
        if not torch.compiler.is_compiling():
            self._far[device] = groups
        return groups

    def places(self, device: torch.device) -> Int[Tensor, " groups"]:
        """Return the number of each group among the groups that read far, or -1 less its number among the others."""
        key = (device, 0)
        if key not in self._orders:
            far, near = self.far.numbers, self.near.numbers
            places = [far.index(x) if x in far else -1 - near.index(x) for x in range(self.far.total)]
            self._orders[key] = _index(places, device)
        return self._orders[key]

    def far_heads(self, q: Float[Tensor, "batch heads query head_dim"]) -> Bool[Tensor, "heads 1 1"]:
        """Return which query heads read far."""
        return self.far_groups(q.device).repeat_interleave(q.shape[1] // self.far.total)[:, None, None]

    def joined(
        self, far: Float[Tensor, "batch some query head_dim"], near: Float[Tensor, "batch others query head_dim"]
    ) -> Float[Tensor, "batch heads query head_dim"]:
        """Return the outputs of all query heads in their order."""
        shared = far.shape[1] // len(self.far.numbers)
        key = (far.device, shared)
        if key not in self._orders:
            numbers = self.far.numbers + self.near.numbers
            heads = [numbers.index(number) * shared + head for number in range(len(numbers)) for head in range(shared)]
            self._orders[key] = _index(heads, far.device)
        # Memory in the order that the layers expect, so that they need no copy.
        outputs = torch.cat([far.transpose(1, 2), near.transpose(1, 2)], 2)
        return outputs.index_select(2, self._orders[key]).transpose(1, 2)


def _index(heads: list[int], device: torch.device) -> Tensor:
    """Return numbers of heads as a tensor that autograd can use, also where it is first needed in inference mode."""
    with torch.inference_mode(False):
        return torch.tensor(heads, device=device)
