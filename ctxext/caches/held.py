"""The growing cache layer of a remapped model: which keys it holds, for which heads, and how they are rotated.

transformers' ``DynamicCache`` keeps the keys of all tokens as the model rotated them. A ``HeldLayer`` in its place may
rotate keys to their final position, once, when only the farthest piece of a method reads them from then on. If a
method sees only the first and the newest tokens of a text, it drops those between, and still counts all tokens::

    slots of the text      0 1 2 3 4 5 6 7 8 9 ...            each row of a padded batch begins at another slot
    columns in the layer   [first tokens of each row][newest slots of all rows]

If only some key heads see so little, a second layer inside the first holds the keys of these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from ctxext.errors import IncompatibleError, InvalidParameterError
from ctxext.kernels import Layout
from ctxext.methods.remap import Band, Region, Sinks

if TYPE_CHECKING:
    from ctxext.kernels.groups import HeadGroups, SplitGroups
    from ctxext.kernels.pieces import TurnedPiece

# Attribute of a tensor with room for more tokens: the number of tokens written to it.
WRITTEN = "_ctxext_written"
MOST_ROOM = 256
"""Tokens that a layer reserves at most, beyond those it holds."""


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
    """Return the numbers of tokens that queries see in any of these regions; None without a bound."""
    first = newest = whole_before = 0
    for region in regions:
        if isinstance(region, Sinks):
            first = max(first, region.count)
        elif isinstance(region, Band) and region.stop is not None:
            newest, whole_before = max(newest, region.stop), max(whole_before, region.plain_before)
        else:
            return None
    return Reach(first, newest, whole_before)


class HeldLayer(DynamicLayer):  # type: ignore[misc]
    """A growing cache layer of a remapped model, which knows what became of each key.

    A layer of transformers becomes one by a change of its class alone: the class has the values of a new layer.

    Args:
        first_slots: slots of the first tokens of each row, ``[batch, first]``, -1 in front of them; None while the
            layer holds all tokens.
        newest_slot: slot of the first newest token.
        whole_until: shortest length in tokens to which a layer that dropped keys may be cropped.
        turned: number of leading slots whose keys have the rotation of the farthest piece.
        turned_for: slot of the first query for which they have it.
        near: layer of the heads that hold few keys; this one holds all keys of the others then.
        heads: groups of both kinds.
    """

    keys: Any
    values: Any
    reach: Reach | None = None
    first_slots: Int[Tensor, "batch first"] | None = None
    newest_slot = whole_until = turned = turned_for = 0
    near: HeldLayer | None = None
    heads: SplitGroups | None = None

    @property
    def is_whole(self) -> bool:
        """True if the layer holds the keys of all heads and tokens as the model rotated them."""
        return self.first_slots is None and self.near is None and not self.turned

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values; without a gradient they are written in place where room is left."""
        new = (key_states, value_states)
        kinds = (None, None) if self.heads is None else (self.heads.far, self.heads.near)
        is_held = self.is_initialized and self.keys.ndim == 4  # early_initialization() leaves vectors of no numbers
        in_place = is_held and not torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if in_place and (self.keys.dtype, self.values.dtype) == (key_states.dtype, value_states.dtype):
            for layer, heads in zip((self, self.near), kinds, strict=True):
                if layer is not None:
                    layer.keys, layer.values = (
                        _appended(old, heads, states)
                        for old, states in zip((layer.keys, layer.values), new, strict=True)
                    )
            return self.keys, self.values
        if self.near is not None and self.heads is not None:
            self.near.update(*map(self.heads.near.of, new))
            new = (self.heads.far.of(key_states), self.heads.far.of(value_states))
        states: tuple[Tensor, Tensor] = super().update(*new)
        return states

    def get_seq_length(self) -> int:
        """Return the number of tokens of the text, dropped ones included."""
        columns = int(super().get_seq_length())
        return columns if self.first_slots is None else self.newest_slot + columns - self.first_slots.shape[1]

    def layout(self, layout: Layout) -> Layout:
        """Return the layout of the keys in this layer, out of the layout of all keys of the text."""
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
        newest = torch.arange(self.newest_slot, self.get_seq_length(), device=self.device)[None]
        if self.first_slots is None:
            return newest
        return torch.cat([self.first_slots, newest.expand(self.first_slots.shape[0], -1)], 1)

    def settle(self, layout: Layout, pieces: Sequence[TurnedPiece], *, by_kernel: bool) -> tuple[Tensor, int]:
        """Rotate keys in place, once, when only the farthest piece will read them from now on.

        The model caches a key as it rotated it. After some steps the key is far from every query that is still to come.
        Then the key is rotated for the last piece in the cache. Without that, every step would rotate all far keys
        again. A cropped cache brings near keys back, and these are rotated back. The kernel of a step rotates keys as
        it reads them, so that for it near keys are rotated back, and no others.

        Returns:
            The keys to attend to, and how many leading ones have the rotation of the last piece.
        """
        keys, turn, done = self.keys, pieces[-1].key, self.turned
        stop, now = keys.shape[2], keys.shape[2] - layout.query_length
        if turn is None or (by_kernel and (not done or now >= self.turned_for)):
            return keys, done
        wanted = _far_for_good(pieces, stop, *layout.memo("first query", lambda: _first_query(layout)))
        if torch.is_grad_enabled() or (keys.is_inference() and not torch.is_inference_mode_enabled()):
            if done:  # the cached keys must not change: rotate a copy back
                near = turn(keys[:, :, :done], (0, keys.shape[0]), (0, done), back=True)
                keys = torch.cat([near, keys[:, :, done:]], 2)
            return keys, 0
        first, last = sorted((done, wanted))
        if first < last:
            keys[:, :, first:last] = turn(keys[:, :, first:last], (0, keys.shape[0]), (first, last), back=wanted < done)
        self.turned, self.turned_for = wanted, now
        return keys, wanted

    def drop(self, layout: Layout, reach: Reach, heads: SplitGroups | None = None) -> None:
        """Drop keys that no later query can see; ``layout`` is the layout of all keys of a call.

        With two kinds of groups, only the near groups see so little. Their keys move to the layer ``near`` then.
        """
        if heads is not None and self.near is None:
            if not is_worth_dropping(reach, layout, layout.key_length):
                return
            self.near, self.heads = HeldLayer(), heads
            self.near.lazy_initialization(self.keys, self.values)
            # Copies: a view would keep the keys of all heads alive, and the room behind them.
            self.near.keys, self.near.values = (heads.near.of(part).clone() for part in (self.keys, self.values))
            self.keys, self.values = (heads.far.of(part).clone() for part in (self.keys, self.values))
        (self.near or self)._drop(layout, reach)

    def _drop(self, layout: Layout, reach: Reach) -> None:
        """Drop keys of all heads in this layer."""
        queries, held = layout.query_length, self.layout(layout)
        if not is_worth_dropping(reach, layout, held.key_length):
            return
        # Assisted decoding removes some tokens of the last pass again; keys that the others see must stay.
        kept = reach.newest - 1 + (max(reach.spare, queries) if 2 * queries <= reach.newest else reach.spare)
        cut = held.key_length - kept  # the first newest column
        if cut <= reach.first:
            return
        columns = held.memo(("first tokens", reach.first, cut), lambda: _first_columns(held, reach.first, cut))
        if columns is None:
            return
        length, slots = self.get_seq_length(), self.slots().expand(columns.shape[0], -1)
        self.reach, self.newest_slot = reach, length - kept
        self.first_slots = torch.where(columns < 0, -1, slots.gather(1, columns.clamp(min=0)))
        if reach.whole_before:
            self.whole_until = length - _next_position(layout) + reach.whole_before
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
        length = self.get_seq_length()
        tokens = int(tokens_to_remove)
        removed = min(-tokens if tokens <= 0 else max(0, length - tokens), length)
        if self.near is not None:
            self.near.crop(tokens_to_remove)  # first, because it may refuse
        if self.reach is not None and self.first_slots is not None:
            most = length - max(self.newest_slot + self.reach.newest - 1, self.whole_until)
            if removed > most:
                raise IncompatibleError(
                    f"This cache can be cropped by up to {most} tokens, found {removed}. It holds only the first "
                    f"{self.reach.first} and the newest {length - self.newest_slot} of its {length} tokens. Start with "
                    f"a new cache."
                )
        if removed and self.is_initialized:
            left = self.keys.shape[-2] - removed
            self.keys, self.values = self.keys[:, :, :left], self.values[:, :, :left]
            self.turned = min(self.turned, length - removed)

    def reset(self) -> None:
        """Empty the layer."""
        self.keys = self.values = self.reach = self.first_slots = self.near = self.heads = None
        self.newest_slot = self.whole_until = self.turned = self.turned_for = 0
        self.is_initialized = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        self._rows(lambda layer: layer.reorder_cache(beam_idx), lambda slots: slots[beam_idx.to(slots.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._rows(
            lambda layer: layer.batch_repeat_interleave(repeats), lambda slots: slots.repeat_interleave(repeats, 0)
        )

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._rows(lambda layer: layer.batch_select_indices(indices), lambda slots: slots[indices.to(slots.device)])

    def _rows(self, change: Callable[[HeldLayer], None], pick: Callable[[Tensor], Tensor]) -> None:
        """Change the rows of the other heads, and of the record of first tokens."""
        if self.near is not None:
            change(self.near)
        if self.first_slots is not None:
            self.first_slots = pick(self.first_slots)

    def offload(self) -> None:
        super().offload()
        if self.near is not None:
            self.near.offload()

    def prefetch(self) -> None:
        super().prefetch()
        if self.near is not None:
            self.near.prefetch()


def held_layers(cache: Any) -> list[HeldLayer]:
    """Return the held layers of a cache."""
    layers = getattr(getattr(cache, "self_attention_cache", cache), "layers", ())
    return [layer for layer in layers if isinstance(layer, HeldLayer)]


def require_as_read(cache: Any, layout: Layout) -> None:
    """Raise an error if a cache that dropped keys is not what a layout of all keys of the text says.

    Raises:
        IncompatibleError: if its layers hold texts of different lengths, as after a crop that some of them refused.
        InvalidParameterError: if rows are padded, and the layout knows of no padding.
    """
    layers = held_layers(cache)
    bounded = next((part for layer in layers if (part := layer.near or layer).first_slots is not None), None)
    if bounded is None:
        return
    lengths = {layer.get_seq_length() for layer in layers if layer.keys is not None}
    if len(lengths) > 1:
        raise IncompatibleError(
            f"Some layers of this cache hold {min(lengths)} tokens and others {max(lengths)}, as after "
            f"a crop that was refused. Start with a new cache."
        )
    bounded.require_padding(layout)


def is_worth_dropping(reach: Reach, layout: Layout, held: int) -> bool:
    """Return whether, after the call of ``layout``, many of the ``held`` keys are out of sight and of crops' reach."""
    if held < reach.most:
        return False
    return reach.whole_before == 0 or _next_position(layout) >= reach.whole_before + reach.spare


def _next_position(layout: Layout) -> int:
    """Return the lowest position of a token that may follow in any row."""
    return 1 + layout.memo("last position", lambda: int(layout.query_positions[:, -1].min()))


def _appended(held: Tensor, heads: HeadGroups | None, new: Tensor) -> Tensor:
    """Return held keys or values with the new ones of some heads, or all, behind them, in place where room is left.

    Room belongs to the tensor that was returned last: any other, as after a crop, is copied to a new place.
    """
    length, stop, room = held.shape[2], held.shape[2] + new.shape[2], held._base
    spare = min(MOST_ROOM, max(32, stop // 64))
    if room is None or getattr(room, WRITTEN, None) != length or room.shape[2] < stop:
        with torch.inference_mode(False):  # also later, outside of this mode, tokens are written to it
            room = held.new_empty(*held.shape[:2], stop + spare, held.shape[3])
        room[:, :, :length] = held
    place = room[:, :, length:stop]
    place.copy_(new) if heads is None else heads.of(new, place)
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


def _first_query(layout: Layout) -> tuple[int, int]:
    """Return the lowest position of a row's first query, and its lowest slot if all padding stood in front of the text.

    Padding between two tokens, as on the right of an earlier call, brings keys nearer in positions than in slots.
    """
    if layout.key_documents is None:
        return (layout.key_length - layout.query_length,) * 2
    positions = layout.query_positions[:, 0]
    lowest = torch.stack([positions, positions + (layout.key_documents >= 0).int().argmax(1)]).amin(1)
    return int(lowest[0]), int(lowest[1])


def _far_for_good(pieces: Sequence[TurnedPiece], stop: int, first_position: int, first: int) -> int:
    """Count the leading slots whose keys queries from slot ``first`` on read in the last piece only, or not at all.

    The queries end before slot ``stop``. Their lowest position in any row, ``first_position``, is lower than ``first``
    if a row is padded.
    """
    nearer = [piece.region for piece in pieces if piece.key is not pieces[-1].key]
    if not nearer:
        return stop
    bands = [region for region in nearer if isinstance(region, Band) and region.stop is not None]
    if len(bands) < len(nearer) or first_position < max(band.plain_before for band in bands):
        return 0
    return max(0, first - max(band.stop or 0 for band in bands) + 1)
