"""A cache layer of constant memory, which holds only the keys that later queries can see.

transformers' ``DynamicCache`` keeps the keys of all tokens. If a method sees only the first and the newest tokens of a
text, those between are dropped. The cache object stays; its growing layers are replaced by a ``BoundedLayer`` each,
which still counts all tokens and returns fewer keys::

    slots of the text      0 1 2 3 4 5 6 7 8 9 ...            each row of a padded batch begins at another slot
    columns in the layer   [first tokens of each row][newest slots of all rows]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from ctxext.attention import Layout
from ctxext.errors import IncompatibleError
from ctxext.spec import Band, Region, Sinks


class Reach(NamedTuple):
    """The numbers of tokens that a query can see: the ``first`` of its text, and the ``newest``, itself included."""

    first: int
    newest: int

    @property
    def spare(self) -> int:
        """Number of newest tokens held beyond these, so that a cache may be cropped; twice as many cause a drop."""
        return max(32, self.newest // 16)

    def __str__(self) -> str:
        most = self.first + self.newest + 2 * self.spare
        return f"holds the first {self.first} tokens and the newest, at most {most:,} in all"


def reach_of(regions: Sequence[Region]) -> Reach | None:
    """Return the numbers of tokens that queries see in any of these regions; None if there is no bound."""
    first = newest = 0
    for region in regions:
        if isinstance(region, Sinks):
            first = max(first, region.count)
        elif isinstance(region, Band) and region.stop is not None:
            newest = max(newest, region.stop, region.plain_before)
        else:
            return None
    return Reach(first, newest)


class BoundedLayer(DynamicLayer):  # type: ignore[misc]
    """A cache layer that holds the first tokens of each row and the newest ones.

    Args:
        reach: the numbers of tokens that must be held.
        whole: the layer to replace, with the keys of all tokens.
    """

    keys: Any
    values: Any

    def __init__(self, reach: Reach, whole: DynamicLayer) -> None:
        super().__init__()
        self.__dict__.update(vars(whole))
        self.reach = reach
        self.cumulative_length = int(whole.get_seq_length())
        self.first_slots: Int[Tensor, "batch first"] | None = None  # -1 pads the front; None if nothing was dropped
        self.newest_slot = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.cumulative_length += key_states.shape[-2]
        states: tuple[Tensor, Tensor] = super().update(key_states, value_states, *args, **kwargs)
        return states

    def get_seq_length(self) -> int:
        """Return the number of tokens of the text, dropped ones included."""
        return self.cumulative_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of columns that attention will receive; a ``Layout`` has their positions."""
        return (self.keys.shape[-2] if self.is_initialized else 0) + query_length, 0

    def slots(self, query: int = 0) -> Int[Tensor, "rows key"]:
        """Return the slot of each column, -1 for none, with ``query`` tokens to come; one row if all are equal."""
        newest = torch.arange(self.newest_slot, self.cumulative_length + query, device=self.device)[None]
        if self.first_slots is None:
            return newest
        return torch.cat([self.first_slots, newest.expand(self.first_slots.shape[0], -1)], 1)

    def drop(self, layout: Layout) -> None:
        """Drop keys that no query after those of ``layout``, the layout of the finished call, can see."""
        first, newest = self.reach
        spare, queries = self.reach.spare, layout.query_length
        if self.keys.shape[-2] < first + newest + 2 * spare:
            return
        # Assisted decoding removes some tokens of the last pass again; keys that the others see must stay.
        kept = newest - 1 + (max(spare, queries) if 2 * queries <= newest else spare)
        cut = self.keys.shape[-2] - kept  # the first newest column
        if cut <= first:
            return
        columns = layout.memo(("first tokens", first, cut), lambda: _first_columns(layout, first, cut))
        if columns is None:
            return
        slots = self.slots().expand(columns.shape[0], -1).gather(1, columns.clamp(min=0))
        self.first_slots = torch.where(columns < 0, -1, slots)
        self.newest_slot = self.cumulative_length - kept
        self.keys, self.values = (
            _first_and_newest(part, columns.clamp(min=0), cut) for part in (self.keys, self.values)
        )

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Remove the newest tokens.

        Args:
            tokens_to_remove: a negative number of tokens. Before transformers 5.18, a positive number of tokens that
                stay, which assisted decoding passes as a tensor.

        Raises:
            IncompatibleError: if the remaining last token would see tokens that were dropped.
        """
        length, argument = self.cumulative_length, int(tokens_to_remove)
        removed = -argument if argument <= 0 else max(0, length - argument)
        most = length - (self.newest_slot + self.reach.newest - 1)
        if self.first_slots is not None and removed > most:
            raise IncompatibleError(
                f"This cache can be cropped by up to {most} tokens, found {removed}. It holds only the first "
                f"{self.reach.first} and the newest {length - self.newest_slot} of its {length} tokens. Start with a "
                f"new cache."
            )
        if removed and self.is_initialized:
            left = max(0, self.keys.shape[-2] - removed)
            self.keys, self.values = self.keys[:, :, :left], self.values[:, :, :left]
            self.cumulative_length = max(0, length - removed)

    def reset(self) -> None:
        """Empty the layer."""
        self.keys = self.values = None
        self.is_initialized = False
        self.cumulative_length = self.newest_slot = 0
        self.first_slots = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        self._pick(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        if self.first_slots is not None:
            self.first_slots = self.first_slots.repeat_interleave(repeats, dim=0)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._pick(indices)

    def _pick(self, rows: Tensor) -> None:
        if self.first_slots is not None:
            self.first_slots = self.first_slots[rows.to(self.first_slots.device)]


def bounded_layer_of(cache: Any) -> BoundedLayer | None:
    """Return a bounded layer of a cache, None if there is none; all layers hold the same tokens."""
    layers = getattr(getattr(cache, "self_attention_cache", cache), "layers", ())
    return next((layer for layer in layers if isinstance(layer, BoundedLayer)), None)


def _first_and_newest(part: Tensor, first: Int[Tensor, "batch first"], cut: int) -> Tensor:
    """Return the first tokens of each row and all columns from ``cut`` on."""
    where = first[:, None, :, None].expand(-1, part.shape[1], -1, part.shape[3])
    return torch.cat([part.gather(2, where), part[:, :, cut:]], 2)


def _first_columns(layout: Layout, first: int, cut: int) -> Int[Tensor, "batch first"] | None:
    """Return the columns before ``cut`` of the first tokens of each row, aligned right and padded with -1.

    Return None unless each row is one document with padding on the left only: otherwise slots do not give distances.
    """
    documents = layout.key_documents
    at = torch.arange(first, device=layout.key_positions.device)
    if documents is None:
        return at.expand(layout.batch, -1)
    real = documents == 0
    if bool((documents > 0).any() | (real.int().diff(dim=1) < 0).any() | ~real[:, -1].all()):
        return None
    begin = real.int().argmax(1, keepdim=True)
    counts = torch.minimum((cut - begin).clamp(min=0), torch.tensor(first, device=at.device))
    columns = begin + at - (first - counts)
    return torch.where(at < first - counts, -1, columns)
