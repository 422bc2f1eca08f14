"""Bring positions to the attention of a patched model.

transformers turns masks, caches and positions into a mask tensor, once per forward pass. Under the attention name
``ctxext`` that step returns a ``LayoutMask`` instead: an object with the position of every query and key. It reaches
each layer as the ``attention_mask`` argument, so gradient checkpointing replays the same object.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import and_masks, causal_mask_function, packed_sequence_mask_function

from ctxext.attention.attend import LayerCall
from ctxext.caches.call import current, paged_batch
from ctxext.caches.held import require_as_read
from ctxext.caches.layout_mask import UNPATCH, LayoutMask, layout_of
from ctxext.caches.records import ATTENTION
from ctxext.errors import IncompatibleError, InvalidParameterError, PatchStateError
from ctxext.kernels import Layout
from ctxext.kernels.layout import Span
from ctxext.kernels.spans import require_no_hole
from ctxext.probe.code import shows_all


@dataclass(frozen=True)
class _Slots:
    """The slots of one call: its places in a row of keys, padding included, as transformers counts them.

    Args:
        key: slots per row that this call sees.
        q_offset: slot of the first query; a tensor if a compiled static cache counts its tokens on the device.
        kv_offset: slot of the first key, above 0 if a cache keeps a sliding window only.
    """

    batch: int
    query: int
    key: int
    q_offset: int | Tensor
    kv_offset: int
    device: torch.device | str | None


def _layout_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    device: torch.device | str | None = None,
    mask_function: Callable[..., Any] = causal_mask_function,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    **options: Any,
) -> LayoutMask | Tensor | None:
    """Build the layout that replaces a mask; registered with transformers as mask function ``ctxext``."""
    device = attention_mask.device if attention_mask is not None and device is None else device
    slots = _Slots(batch_size, q_length, kv_length, q_offset, kv_offset, device)
    sees_both_ways = shows_all(mask_function)
    refusal = None
    if use_vmap and not sees_both_ways:
        refusal = OWN_MASK
    elif not allow_is_causal_skip and not sees_both_ways and _sees_ahead(mask_function, slots, local_size):
        refusal = SEES_AHEAD  # transformers does not guarantee a plain causal mask here
    call = current.call
    if call is None and refusal == OWN_MASK and _is_window(mask_function, slots, options.get("config")):
        refusal = None
    if call is None and refusal and local_size is None:  # the decoder would make a causal mask itself
        raise IncompatibleError(f"{refusal} {UNPATCH}")
    if call is None:  # generate() prepares masks before the decoder runs: keep the padding mask until then
        return attention_mask if attention_mask is None else _over_all_slots(attention_mask, slots)
    if call.shard is not None:
        if sees_both_ways:
            raise IncompatibleError(
                "Its tokens see both ways, but the engine around a shard of a sequence (ctxext_sharded=True) makes "
                "attention causal. Pass whole texts to the model."
            )
        return call.shard
    is_plain = (mask_function is causal_mask_function or sees_both_ways) and local_size is None
    offset = q_offset.clone() if isinstance(q_offset, Tensor) else q_offset  # the cache counts in place
    sizes = {"batch_size": batch_size, "q_length": q_length, "kv_length": kv_length, "kv_offset": kv_offset}
    rule = {"mask_function": mask_function, "allow_is_causal_skip": allow_is_causal_skip, "use_vmap": use_vmap}
    replaced = options | sizes | rule | {"q_offset": offset, "attention_mask": attention_mask, "device": device}
    if local_size is not None:
        replaced["local_size"] = local_size
    if sees_both_ways and call.has_encoder:
        return LayoutMask(_across(slots, attention_mask), call.length, None, replaced, crosses=True)
    if refusal is not None and (local_size is None or call.position_ids is None):
        return LayoutMask(None, call.length, local_size, replaced, refusal=refusal)
    layout = _layout(slots, attention_mask, _on_one_axis(call.position_ids))
    replaced |= _apart(layout, mask_function)
    if refusal is not None:
        return LayoutMask(None, call.length, local_size, replaced, refusal=refusal)
    if not torch.compiler.is_compiling():
        require_as_read(call.cache, layout)
    if sees_both_ways:
        layout = layout.both_ways
    return LayoutMask(layout, call.length, local_size, replaced, is_plain=is_plain)


def _over_all_slots(attention_mask: Tensor, slots: _Slots) -> Tensor:
    """Pad the mask to the length of a static cache; a growing mask would need a graph for each token."""
    empty = slots.kv_offset + slots.key - attention_mask.shape[-1]
    return F.pad(attention_mask, (0, max(empty, 0)))


def _across(slots: _Slots, attention_mask: Tensor | None) -> Layout:
    """Return the layout of cross-attention: every query sees every token of another text, without distances."""
    queries = torch.zeros(slots.batch, slots.query, dtype=torch.long, device=slots.device)
    keys = torch.zeros(slots.batch, slots.key, dtype=torch.long, device=slots.device)
    compiling = torch.compiler.is_compiling()
    if attention_mask is None or (not compiling and _hides_nothing(attention_mask, slots.key)):
        everything = Span((0, slots.batch), (0, slots.query), (0, slots.key))
        return Layout(queries, keys, spans=(everything,), sees="both")
    return Layout(queries, keys, queries, _keep(attention_mask, slots.key, 0).long() - 1, sees="both")


def _on_one_axis(position_ids: Tensor | None) -> Tensor | None:
    """Return positions as ``[rows, tokens]``, also for models that count time, height and width separately."""
    if position_ids is None or position_ids.ndim == 2:
        return position_ids
    agree = (position_ids == position_ids[:1]).all()
    if torch.compiler.is_compiling():
        torch._assert_async(agree, SEVERAL_AXES)  # a graph cannot branch on it
    elif not bool(agree):
        raise IncompatibleError(SEVERAL_AXES)
    return position_ids[0]


SEVERAL_AXES = (
    "position_ids count along several axes that differ, as in a text with an image or a video. ctxext's attention has "
    "one distance between two tokens, so the patched model reads text only. Unpatch the model for such inputs."
)
OWN_MASK = (
    "Its attention hides or shows tokens by a mask function of the model's own, which ctxext's attention by positions "
    "cannot express."
)
SEES_AHEAD = (
    "Its attention is neither causal nor full here: tokens see some later tokens (a prefix, an image block, or a "
    "window to both sides), which ctxext's attention does not support."
)


def _apart(layout: Layout, mask_function: Callable[..., Any]) -> dict[str, Any]:
    """Return what keeps documents of one row apart; not every model does so, and none with a cache."""
    documents = layout.key_documents
    if documents is None or torch.compiler.is_compiling() or not bool((documents > 0).any()):
        return {}
    shown = and_masks(mask_function, packed_sequence_mask_function(documents))
    return {"mask_function": shown, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}


def _sees_ahead(mask_function: Callable[..., Any], slots: _Slots, window: int | None) -> bool:
    """Return whether a token may see its successor, under another rule than that all tokens see all others.

    Prefixes, image blocks and two-sided windows let tokens see later ones. A token that sees further ahead sees the
    next token too, so it is enough to check neighbours. A graph cannot return it, and asserts that none does, but for
    layers of a window, which may be left alone.
    """
    compiling = torch.compiler.is_compiling()
    if mask_function is causal_mask_function or slots.key < 2 or (compiling and window is not None):
        return False
    device, offset = slots.device, slots.q_offset
    if not compiling:
        device, offset = "cpu" if device is None or torch.device(device).type == "meta" else device, int(offset)
    tokens = torch.arange(slots.query, device=device)[None] + offset
    inside = (tokens + 1 >= slots.kv_offset) & (tokens + 1 < slots.kv_offset + slots.key)
    tokens = torch.where(inside, tokens, slots.kv_offset)
    rows = torch.arange(slots.batch, device=device)[:, None]
    ahead = (mask_function(rows, torch.zeros_like(rows), tokens, tokens + 1) & inside).any()
    if compiling:
        torch._assert_async(~ahead, f"{SEES_AHEAD} {UNPATCH}")
        return False
    return bool(ahead)


def _is_window(mask_function: Callable[..., Any], slots: _Slots, config: Any) -> bool:
    """Return whether a mask is the causal one inside a config's window, which the decoder makes itself.

    Gemma 3 puts such a mask together of functions where its processor says of each token that it is of no image.
    """
    window = getattr(config, "sliding_window", None)
    if not window or torch.compiler.is_compiling() or _sees_ahead(mask_function, slots, None):
        return False
    device = "cpu" if slots.device is None or torch.device(slots.device).type == "meta" else slots.device
    tokens = torch.arange(slots.query, device=device)[None] + int(slots.q_offset)
    rows = torch.arange(slots.batch, device=device)[:, None]
    for back in {0, window - 1, window, *(2**power for power in range(slots.key.bit_length()))}:
        keys = tokens - back
        shown = mask_function(rows, torch.zeros_like(rows), tokens, keys.clamp(min=slots.kv_offset))
        if bool(((shown != (back < window)) & (keys >= slots.kv_offset)).any()):
            return False
    return True


def _layout(slots: _Slots, attention_mask: Tensor | None, position_ids: Tensor | None) -> Layout:
    """Return the positions of the queries and keys of one call, from the arguments of transformers' mask function.

    A slot is a place in the row of keys, padding included; a position counts the tokens of one document. transformers
    counts slots, while ALiBi and the layout need positions. Their relation depends on the call:

    1. A first pass with positions: these decide, and a document begins where they restart (``_first_pass``).
    2. Every slot holds a token and the queries are the newest: positions are slots, cache or not.
    3. Slots after the newest query are empty, as in a static cache: positions are slots.
    4. A mask hides slots, which is padding: positions count the tokens that it shows (``_padded``).

    In cases 2 to 4 a cache may hold earlier tokens without a record of their documents. So each row is one document,
    and given positions may only confirm the counted ones. Checks of tensor values are left out while torch.compile
    traces, because a graph cannot branch on them.

    Args:
        attention_mask: ``[batch, slots]``, true for tokens; None for tokens everywhere. May be shorter than the cache.
        position_ids: the positions that the decoder was given; None without any.

    Raises:
        InvalidParameterError: if the mask or the positions have two meanings, or none.
        IncompatibleError: if the positions do not continue the positions of the cache.
    """
    compiling = torch.compiler.is_compiling()
    if not compiling:
        slots = replace(slots, q_offset=int(slots.q_offset))
    is_counted, stop = isinstance(slots.q_offset, int), slots.q_offset + slots.query
    if attention_mask is not None and is_counted:
        _require_covered(attention_mask, stop)
    if attention_mask is not None and not compiling and _hides_nothing(attention_mask, slots.kv_offset + slots.key):
        attention_mask = None  # equal to no mask, for which kernels are faster
    if is_counted and slots.q_offset == slots.kv_offset == 0 and position_ids is not None:
        keep = None if attention_mask is None else _keep(attention_mask, slots.query, 0)
        return _first_pass(position_ids.expand(slots.batch, slots.query).to(slots.device), keep, slots.key)
    keys = torch.arange(slots.kv_offset, slots.kv_offset + slots.key, device=slots.device)
    keys = keys.expand(slots.batch, slots.key)
    places = torch.arange(slots.query, device=slots.device) + slots.q_offset - slots.kv_offset  # queries among keys
    if attention_mask is None and is_counted and slots.kv_offset + slots.key == stop:
        if not compiling:
            _require_agreement(position_ids, keys[:, places], keys[:, places], None)
        causal = Layout.causal(slots.batch, slots.query, slots.key, device=keys.device)
        if not slots.kv_offset:
            return causal
        return replace(causal, query_positions=keys[:, slots.key - slots.query :], key_positions=keys, from_zero=False)
    filled = keys < stop
    if attention_mask is None:
        return _one_document(keys, filled, keys, places, position_ids)
    return _padded(attention_mask, slots.kv_offset, keys, filled, places, position_ids)


def _require_covered(attention_mask: Tensor, length: int | Tensor) -> None:
    """Raise unless a mask covers every token so far; slots that it leaves out would have no meaning."""
    covered = attention_mask.shape[-1]
    if covered < length:
        raise InvalidParameterError(
            f"attention_mask covers {covered} tokens, but the text has {length}, cached ones included. Pass a mask of "
            f"shape [batch, {length}], 1 for tokens and 0 for padding, or none without padding."
        )


def _hides_nothing(attention_mask: Tensor, stop: int) -> bool:
    """Return whether a mask is true up to the slot ``stop``; a fake mask without data counts as true."""
    if attention_mask.shape[-1] < stop:
        return False
    return isinstance(attention_mask, FakeTensor) or bool(attention_mask[:, :stop].all())


def _first_pass(positions: Tensor, keep: Tensor | None, key: int) -> Layout:
    """Return the layout of a first pass with given positions; packed documents restart them, padding has none.

    For example, positions ``0 1 2 0 1`` are two documents, whose tokens do not see each other. A static cache has more
    slots than tokens so far; the rest stays empty.
    """
    batch, query = positions.shape
    compiling = torch.compiler.is_compiling()
    plain = keep is None and key == query and not compiling
    if plain and bool((positions == torch.arange(query, device=positions.device)).all()):
        return Layout.causal(batch, query, device=positions.device)
    keep = torch.ones_like(positions, dtype=torch.bool) if keep is None else keep
    index = torch.arange(query, device=positions.device)
    # Slots, which count the padding in front of a row, mean what a later call makes of them: positions without it.
    of_slots = ((positions == index) | ~keep).all(1, keepdim=True)
    positions = torch.where(of_slots, positions - keep.int().argmax(1, keepdim=True), positions)
    # Padding may stand between two tokens, so compare with the newest token before, not with the neighbour.
    last = torch.where(keep, index, -1).cummax(1).values
    before = F.pad(last[:, :-1], (1, 0), value=-1)
    previous = positions.gather(1, before.clamp(min=0))
    starts = keep & (before >= 0) & (positions <= previous)
    # Gaps inside a document are allowed (PoSE), steps back to another position than 0 are not.
    odd = starts & (positions != 0)
    if not compiling and bool(odd.any()):
        row, token = odd.nonzero()[0].tolist()
        raise InvalidParameterError(
            f"position_ids go from {int(previous[row, token])} to {int(positions[row, token])} in row {row}. They must "
            f"increase, or restart at 0 where a new document begins."
        )
    places = torch.where(keep, positions, 0)
    documents = torch.where(keep, starts.long().cumsum(1), -1)
    empty = (0, key - query)
    return Layout.of(places, F.pad(places, empty), documents, F.pad(documents, empty, value=-1))


def _padded(
    attention_mask: Tensor, kv_offset: int, keys: Tensor, filled: Tensor, places: Tensor, given: Tensor | None
) -> Layout:
    """Return the layout under a mask that hides slots, some of them possibly before the first slot of this call."""
    key = keys.shape[1]
    if given is None and not torch.compiler.is_compiling():
        remedy = "Pad on one side only, or pass position_ids."
        require_no_hole("attention_mask", attention_mask[:, : kv_offset + key].bool(), remedy)
    real = _keep(attention_mask, key, kv_offset) & filled
    before = attention_mask[:, :kv_offset].long().sum(1, keepdim=True)
    positions = (before + real.long().cumsum(1) - 1).clamp(min=0)
    if given is not None:  # slots mean positions without the padding in front of a row, as in a first pass
        of_slots, counted = [given.to(keys.device) == each[:, places] for each in (keys, positions)]
        fits = [(each | ~real[:, places]).all(1, keepdim=True) for each in (of_slots, counted)]
        by_slots = fits[0] & (~fits[1] | of_slots.all(1, keepdim=True))  # padding decides where a row has no token
        in_front = attention_mask.int().argmax(1, keepdim=True)
        positions = torch.where(by_slots, (keys - in_front).clamp(min=0), positions)
    return _one_document(positions, real, keys, places, given)


def _one_document(positions: Tensor, real: Tensor, slots: Tensor, places: Tensor, given: Tensor | None) -> Layout:
    """Return a layout with one document per row, from the positions of its keys and a mask of real tokens."""
    compiling = torch.compiler.is_compiling()
    if not compiling:
        _require_agreement(given, positions[:, places], slots[:, places], real[:, places])
    documents = real.long() - 1
    analyse = not compiling and places.shape[0] > 1  # a single query has no spans, and decoding must be fast
    return Layout.of(positions[:, places], positions, documents[:, places], documents, analyse=analyse)


def _require_agreement(given: Tensor | None, counted: Tensor, slots: Tensor, real: Tensor | None) -> None:
    """Raise unless the positions of a call continue the positions of the cache, with padding counted or not.

    A cache has no record of the document of a key, so documents cannot restart behind one.
    """
    if given is None:
        return
    given = given.to(counted.device).expand(counted.shape)
    fits = torch.stack([(given == counted), (given == slots)])
    if real is not None:
        fits = fits | ~real
    if not bool(fits.all(-1).any(0).all()):
        raise IncompatibleError(
            f"position_ids {given[0, :4].tolist()}... do not continue the cache, which ends at {counted[0, 0].item()}. "
            f"A cache holds one document per row. Use a new cache for a new document, or pack documents without one."
        )


def _keep(attention_mask: Tensor, key: int, kv_offset: int) -> Tensor:
    """Return the two-dimensional mask over this layer's key slots; slots beyond the mask are empty."""
    keep = attention_mask[:, kv_offset : kv_offset + key].bool()
    return F.pad(keep, (0, key - keep.shape[1]))


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,  # sixth, as in transformers' functions: some programs pass it by position
    scaling: Any = None,  # an integer in some models
    sliding_window: int | None = None,
    ctxext_layout: LayoutMask | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute attention from a layout; registered with transformers as attention function ``ctxext``."""
    attend = module.__dict__.get("_ctxext_attend")
    if attend is None:
        raise PatchStateError(
            f"{type(module).__name__} has the attention implementation {ATTENTION!r}, but is not patched. Call "
            f"ctxext.patch or ctxext.load; an adapter that wraps or copies attention layers is added afterwards."
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    rows, heads, tokens = query.shape[:3]
    if (batch := paged_batch()) is not None:
        ctxext_layout = batch.mask(module, query)
        count = ctxext_layout.layout.batch
        query, key, value = (x.view(x.shape[1], count, -1, x.shape[3]).transpose(0, 1) for x in (query, key, value))
    mask = layout_of(attention_mask if ctxext_layout is None else ctxext_layout)
    given = {**options, "dropout": dropout, "scaling": scaling}  # for the model's own attention function
    if sliding_window is not None:
        given["sliding_window"] = sliding_window
    call = LayerCall(query, key, value, mask, module, scale, sliding_window, dropout, given)
    if ctxext_layout is None and getattr(attend, "checks_window", True) and (disputed := call.disputed_window):
        raise IncompatibleError(f"{disputed}.")
    out = attend(call)
    return out.transpose(1, 2).contiguous().view(rows, tokens, heads, -1), None


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, _layout_mask)
