"""Cache layers that hold only the keys that later queries can see, for all key heads or for some of them.

transformers' ``DynamicCache`` keeps the keys of all tokens. If a method sees only the first and the newest tokens of a
text, those between are dropped. The cache object stays; its growing layers are replaced by a ``BoundedLayer`` each,
which still counts all tokens and returns fewer keys::

    slots of the text      0 1 2 3 4 5 6 7 8 9 ...            each row of a padded batch begins at another slot
    columns in the layer   [first tokens of each row][newest slots of all rows]

If only some key heads of a layer see so little, a ``SplitLayer`` holds all keys of the others beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from ctxext.errors import IncompatibleError, InvalidParameterError
from ctxext.kernels import Layout
from ctxext.kernels.groups import HeadGroups, SplitGroups
from ctxext.methods.remap import Band, Region, Sinks

# Attribute of a tensor with room for more tokens: the number of tokens written to it.
WRITTEN = "_ctxext_written"
# Attribute of a layer: the number of its leading slots whose keys have the rotation of the farthest piece, and the slot
# of the first query for which they have it.
SETTLED = "_ctxext_settled"


class Reach(NamedTuple):
    """The numbers of tokens that a query can see: the ``first`` of its text, and the ``newest``, itself included.

    Queries before position ``whole_before`` see all tokens before them.
    """

    first: int
    newest: int
    whole_before: int = 0

    @property
    def spare(self) -> int:
        """Number of newest tokens held beyond these, so that a cache may be cropped; twice as many cause a drop."""
        return max(32, self.newest // 16)

    @property
    def most(self) -> int:
        """Number of tokens held at most of a text that is not held whole."""
        return self.first + self.newest + 2 * self.spare

    @property
    def bend(self) -> int:
        """Length in tokens from which a text that is read in one call is not held whole."""
        return max(self.most, self.whole_before and self.whole_before + self.spare)

    def __str__(self) -> str:
        whole = f"all of up to {self.whole_before + self.spare:,} tokens, and of a longer text " * (
            self.whole_before > 0
        )
        return f"{whole}the first {self.first} and the newest, at most {self.most:,} in all"


def reach_of(regions: Sequence[Region]) -> Reach | None:
    """Return the numbers of tokens that queries see in any of these regions; None if there is no bound."""
    first = newest = whole_before = 0
    for region in regions:
        if isinstance(region, Sinks):
            first = max(first, region.count)
        elif isinstance(region, Band) and region.stop is not None:
            newest, whole_before = max(newest, region.stop), max(whole_before, region.plain_before)
        else:
            return None
    return Reach(first, newest, whole_before)


class BoundedLayer(DynamicLayer):  # type: ignore[misc]
    """A cache layer that holds the first tokens of each row and the newest ones."""

    keys: Any
    values: Any

    def __init__(self, reach: Reach, whole: DynamicLayer) -> None:
        super().__init__()
        self.__dict__.update(vars(whole))
        self.reach = reach
        self.cumulative_length = int(whole.get_seq_length())
        self.first_slots: Int[Tensor, "batch first"] | None = None  # -1 pads the front; None if nothing was dropped
        self.newest_slot = 0
        self.whole_until = 0  # the shortest length to which a layer that dropped keys may be cropped

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.cumulative_length += key_states.shape[-2]
        states: tuple[Tensor, Tensor] = super().update(key_states, value_states, *args, **kwargs)
        return states

    def get_seq_length(self) -> int:
        """Return the number of tokens of the text, dropped ones included."""
        return self.cumulative_length

    def held(self, layout: Layout) -> Layout:
        """Return the layout of the keys in this layer, from that of all keys of the text."""
        first = self.first_slots
        if first is None:
            return layout
        key = ("held", first.shape[1], self.newest_slot)  # all layers drop the same tokens
        return layout.memo(key, lambda: layout.at_slots(self.slots()))

    def require_padding(self, layout: Layout) -> None:
        """Raise ``InvalidParameterError`` if rows in this layer are padded, and the layout knows of no padding."""
        first = self.first_slots
        if first is None or layout.key_documents is not None:
            return
        if bool((first != torch.arange(first.shape[1], device=first.device)).any()):
            raise InvalidParameterError(
                "attention_mask hides no token, but this cache was filled with padding in front of some rows. Pass the "
                f"mask of all {layout.key_length} tokens so far, 1 for tokens and 0 for padding."
            )

    def slots(self) -> Int[Tensor, "rows key"]:
        """Return the slot of each column, -1 for none; one row if all are equal."""
        newest = torch.arange(self.newest_slot, self.cumulative_length, device=self.device)[None]
        if self.first_slots is None:
            return newest
        return torch.cat([self.first_slots, newest.expand(self.first_slots.shape[0], -1)], 1)

    def drop(self, layout: Layout) -> None:
        """Drop keys that no query after those of ``layout``, the layout of all keys of a call, can see."""
        first, newest, whole_before = self.reach
        queries, held = layout.query_length, self.held(layout)
        if not is_worth_dropping(self.reach, layout, held.key_length):
            return
        # Assisted decoding removes some tokens of the last pass again; keys that the others see must stay.
        spare = self.reach.spare
        kept = newest - 1 + (max(spare, queries) if 2 * queries <= newest else spare)
        cut = held.key_length - kept  # the first newest column
        if cut <= first:
            return
        columns = held.memo(("first tokens", first, cut), lambda: _first_columns(held, first, cut))
        if columns is None:
            return
        slots = self.slots().expand(columns.shape[0], -1).gather(1, columns.clamp(min=0))
        self.first_slots = torch.where(columns < 0, -1, slots)
        self.newest_slot = self.cumulative_length - kept
        if whole_before:
            self.whole_until = self.cumulative_length - _next_position(layout) + whole_before
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
        length, removed = self.cumulative_length, removed_by(tokens_to_remove, self.cumulative_length)
        most = length - max(self.newest_slot + self.reach.newest - 1, self.whole_until)
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
        self.cumulative_length = self.newest_slot = self.whole_until = 0
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


class SplitLayer(DynamicLayer):  # type: ignore[misc]
    """A cache layer of which some key heads read far, and hold all keys, and the others hold few.

    Until there is something to drop, ``keys`` and ``values`` are those of all heads. From then on they are those of the
    far heads, ``near`` has the others', and ``update`` returns the far heads' alone.
    """

    keys: Any
    values: Any

    def __init__(self, reach: Reach, heads: SplitGroups, whole: DynamicLayer) -> None:
        super().__init__()
        self.__dict__.update(vars(whole))
        self.reach, self.heads = reach, heads
        self.near: BoundedLayer | None = None

    def drop(self, layout: Layout) -> None:
        """Drop keys of the near heads that no query after those of ``layout`` can see; split the layer before that."""
        if self.near is None:
            if not is_worth_dropping(self.reach, layout, layout.key_length):
                return
            whole, far, near = DynamicLayer(), self.heads.far, self.heads.near
            whole.__dict__.update(vars(self), keys=near.of(self.keys), values=near.of(self.values))
            self.near = BoundedLayer(self.reach, whole)
            # Copies: a view would keep the keys of all heads alive.
            self.keys, self.values = (far.of(part).clone() for part in (self.keys, self.values))
        self.near.drop(layout)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.near is not None:
            far, near = self.heads.far, self.heads.near
            in_place = not torch.is_grad_enabled() and not torch.compiler.is_compiling()
            held = (self.keys.dtype, self.values.dtype)
            if in_place and (key_states.dtype, value_states.dtype) == held:
                self.near.cumulative_length += key_states.shape[-2]
                for layer, heads in ((self, far), (self.near, near)):
                    layer.keys = _appended(layer.keys, heads, key_states, self.reach.spare)
                    layer.values = _appended(layer.values, heads, value_states, self.reach.spare)
                return self.keys, self.values
            self.near.update(near.of(key_states), near.of(value_states), *args, **kwargs)
            key_states, value_states = far.of(key_states), far.of(value_states)
        states: tuple[Tensor, Tensor] = super().update(key_states, value_states, *args, **kwargs)
        return states

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        if self.near is not None:
            self.near.crop(tokens_to_remove)  # first, because it may refuse
        super().crop(-removed_by(tokens_to_remove, self.get_seq_length()))

    def reset(self) -> None:
        """Empty the layer."""
        super().reset()
        self.__dict__.pop(SETTLED, None)  # a text that follows is read by all heads at first
        self.keys = self.values = self.near = None
        self.is_initialized = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        if self.near is not None:
            self.near.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        if self.near is not None:
            self.near.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        if self.near is not None:
            self.near.batch_select_indices(indices)

    def offload(self) -> None:
        super().offload()
        if self.near is not None:
            self.near.offload()

    def prefetch(self) -> None:
        super().prefetch()
        if self.near is not None:
            self.near.prefetch()


def bounded_layer_of(cache: Any) -> BoundedLayer | None:
    """Return a bounded layer of a cache, None if there is none; all of them hold the same tokens."""
    layers = getattr(getattr(cache, "self_attention_cache", cache), "layers", ())
    parts = (layer.near if isinstance(layer, SplitLayer) else layer for layer in layers)
    return next((part for part in parts if isinstance(part, BoundedLayer)), None)


def require_one_length(cache: Any) -> None:
    """Raise ``IncompatibleError`` if the layers of a cache hold texts of different lengths.

    A layer that dropped keys may refuse to be cropped, after layers before it were cropped.
    """
    layers = getattr(getattr(cache, "self_attention_cache", cache), "layers", ())
    lengths = {
        int(layer.get_seq_length()) for layer in layers if isinstance(layer, DynamicLayer) and layer.keys is not None
    }
    if len(lengths) > 1:
        raise IncompatibleError(
            f"Some layers of this cache hold {min(lengths)} tokens and others {max(lengths)}, as after "
            f"a crop that was refused. Start with a new cache."
        )


def removed_by(argument: int | Tensor, length: int) -> int:
    """Return how many of ``length`` tokens a crop removes; see ``BoundedLayer.crop``."""
    tokens = int(argument)
    return min(-tokens if tokens <= 0 else max(0, length - tokens), length)


def is_worth_dropping(reach: Reach, layout: Layout, held: int) -> bool:
    """Return whether, after the call of ``layout``, many of the ``held`` keys are out of sight and of crops' reach."""
    if held < reach.most:
        return False
    return reach.whole_before == 0 or _next_position(layout) >= reach.whole_before + reach.spare


def _next_position(layout: Layout) -> int:
    """Return the lowest position of a token that may follow in any row."""
    return 1 + layout.memo("last position", lambda: int(layout.query_positions[:, -1].min()))


def _appended(held: Tensor, heads: HeadGroups, new: Tensor, spare: int) -> Tensor:
    """Return held keys or values with the new ones of some heads behind them, written in place where room is left.

    Room belongs to the tensor that was returned last: any other, as after a crop, is copied to a new place.
    """
    length, stop, room = held.shape[2], held.shape[2] + new.shape[2], held._base
    if room is None or getattr(room, WRITTEN, None) != length or room.shape[2] < stop:
        with torch.inference_mode(False):  # also later, outside of this mode, tokens are written to it
            room = held.new_empty(*held.shape[:2], stop + spare, held.shape[3])
        room[:, :, :length] = held
    heads.of(new, room[:, :, length:stop])
    setattr(room, WRITTEN, stop)
    with torch.inference_mode(False):
        return room[:, :, :stop]


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
