"""A cache of constant memory: a layer of it that holds what later queries can see, and nothing else.

transformers' ``DynamicCache`` keeps the keys of all tokens. Where a method sees the first tokens of a text and the
newest ones only, those between are dropped. The cache stays transformers' own: one of its layers, which grow, is
replaced by a ``BoundedLayer``, which still counts all tokens and gives back fewer keys::

    slots of the text      0 1 2 3 4 5 6 7 8 9 ...            each row of a padded batch begins at another slot
    columns that are held  [first tokens of each row][newest slots of all rows]
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
    """What the queries of a text can see: its ``first`` tokens, and the ``newest``, the query itself included."""

    first: int
    newest: int

    @property
    def spare(self) -> int:
        """Newest tokens that are held beyond those, so that a cache may be cropped; twice as many make a new cut."""
        return max(32, self.newest // 16)

    def __str__(self) -> str:
        most = self.first + self.newest + 2 * self.spare
        return f"holds the first {self.first} tokens and the newest, at most {most:,} in all"


def reach_of(regions: Sequence[Region]) -> Reach | None:
    """What queries can see in any of these regions; None where that has no bound."""
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
    """A layer of a cache that holds the first tokens of each row and the newest ones.

    Args:
        reach: what must be held.
        whole: the layer, with the keys of all tokens, whose place it takes.
    """

    keys: Any
    values: Any

    def __init__(self, reach: Reach, whole: DynamicLayer) -> None:
        super().__init__()
        self.__dict__.update(vars(whole))
        self.reach = reach
        self.cumulative_length = int(whole.get_seq_length())
        self.first_slots: Int[Tensor, "batch first"] | None = None  # -1 for none, at the front; None: nothing dropped
        self.newest_slot = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.cumulative_length += key_states.shape[-2]
        found: tuple[Tensor, Tensor] = super().update(key_states, value_states, *args, **kwargs)
        return found

    def get_seq_length(self) -> int:
        """Tokens of the text, dropped ones included."""
        return self.cumulative_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns that attention will be given, which a ``Layout`` says the positions of."""
        return (self.keys.shape[-2] if self.is_initialized else 0) + query_length, 0

    def slots(self, query: int = 0) -> Int[Tensor, "rows key"]:
        """The slot of each column, -1 for what is none, with ``query`` tokens to come; one row where all are alike."""
        newest = torch.arange(self.newest_slot, self.cumulative_length + query, device=self.device)[None]
        if self.first_slots is None:
            return newest
        return torch.cat([self.first_slots, newest.expand(self.first_slots.shape[0], -1)], 1)

    def drop(self, layout: Layout) -> None:
        """Drop what no query after those of ``layout``, the call that has just been computed, can see."""
        first, newest = self.reach
        spare, queries = self.reach.spare, layout.query_length
        if self.keys.shape[-2] < first + newest + 2 * spare:
            return
        # Assisted decoding takes back some of the tokens that a pass has added: what those saw must stay.
        kept = newest - 1 + (max(spare, queries) if 2 * queries <= newest else spare)
        cut = self.keys.shape[-2] - kept  # columns before it
        if cut <= first:
            return
        columns = layout.memo(("first tokens", first, cut), lambda: _first_columns(layout, first, cut))
        if columns is None:
            return
        slots = self.slots().expand(columns.shape[0], -1).gather(1, columns.clamp(min=0))
        self.first_slots = torch.where(columns < 0, -1, slots)
        self.newest_slot = self.cumulative_length - kept
        self.keys, self.values = (_held(part, columns.clamp(min=0), cut) for part in (self.keys, self.values))

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Remove the newest tokens.

        Args:
            tokens_to_remove: their number, negative, as transformers wants it; before 5.18, a positive number is how
                many stay. Its assisted decoding gives it as a tensor there.

        Raises:
            IncompatibleError: if tokens that the last one left would see were dropped.
        """
        length, asked = self.cumulative_length, int(tokens_to_remove)
        removed = -asked if asked <= 0 else max(0, length - asked)
        most = length - (self.newest_slot + self.reach.newest - 1)
        if self.first_slots is not None and removed > most:
            raise IncompatibleError(
                f"This cache holds the first {self.reach.first} and the newest {length - self.newest_slot} of its "
                f"{length} tokens, as nothing else is seen any more, so it can be cropped by up to {most} tokens, "
                f"found {removed}. Start with a new cache."
            )
        if removed and self.is_initialized:
            left = max(0, self.keys.shape[-2] - removed)
            self.keys, self.values = self.keys[:, :, :left], self.values[:, :, :left]
            self.cumulative_length = max(0, length - removed)

    def reset(self) -> None:
        """Empty it."""
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
    """A layer of a cache that holds less than all tokens; all of its layers hold the same."""
    layers = getattr(getattr(cache, "self_attention_cache", cache), "layers", ())
    return next((layer for layer in layers if isinstance(layer, BoundedLayer)), None)


def _held(part: Tensor, first: Int[Tensor, "batch first"], cut: int) -> Tensor:
    """The first tokens of each row and all columns from ``cut`` on."""
    where = first[:, None, :, None].expand(-1, part.shape[1], -1, part.shape[3])
    return torch.cat([part.gather(2, where), part[:, :, cut:]], 2)


def _first_columns(layout: Layout, first: int, cut: int) -> Int[Tensor, "batch first"] | None:
    """Columns of the first tokens of each row, as far as they lie before ``cut``, last; -1 for the others.

    None where the rows are not one document each with padding on the left only: there, slots do not tell distances.
    """
    documents = layout.key_documents
    at = torch.arange(first, device=layout.key_positions.device)
    if documents is None:
        return at.expand(layout.batch, -1)
    real = documents == 0
    if bool((documents > 0).any() | (real.int().diff(dim=1) < 0).any() | ~real[:, -1].all()):
        return None
    begin = real.int().argmax(1, keepdim=True)
    found = torch.minimum((cut - begin).clamp(min=0), torch.tensor(first, device=at.device))
    columns = begin + at - (first - found)
    return torch.where(at < first - found, -1, columns)
