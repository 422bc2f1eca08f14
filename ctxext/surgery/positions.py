"""How positions reach the attention of a patched model.

Stock transformers turns masks, caches and positions into a mask tensor, once per forward pass. Under the attention
name ``ctxext`` that step yields a ``LayoutMask`` instead: an object that says where every query and key stands. It
travels to each layer as the ``attention_mask`` argument, so gradient checkpointing replays exactly what was seen.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import DynamicLayer, StaticLayer
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from ctxext.attention import Layout
from ctxext.attention.layout import Span
from ctxext.attention.spans import require_no_hole
from ctxext.errors import IncompatibleError, InvalidParameterError, PatchStateError
from ctxext.surgery.bounded import BoundedLayer, bounded_layer_of
from ctxext.surgery.caches import cache_in
from ctxext.surgery.override import ForwardOverride
from ctxext.surgery.travelling import Travelling

PLAIN_LAYERS = (DynamicLayer, StaticLayer, BoundedLayer)  # others keep something else than what they return


class LayoutMask:
    """A layout in the place of an attention mask.

    No dataclass: engines that cast a layer's inputs look into those, and would build another layout for every layer.

    Args:
        layout: where queries and keys stand.
        length: the sequence's global length in tokens, where a caller that holds only a shard of it said so.
        window: tokens that the mask in whose place this is would have let a query see; None for all.
        crosses: whether the keys are an encoder's, of another text than the queries.
        travels: what an encoding has for each token of this layer.
    """

    ndim = 2

    def __init__(
        self,
        layout: Layout,
        length: int | None = None,
        window: int | None = None,
        *,
        crosses: bool = False,
        travels: Travelling | None = None,
    ) -> None:
        self.layout, self.length, self.window, self.crosses = layout, length, window, crosses
        self.travels = travels

    def to(self, *args: Any, **kwargs: Any) -> LayoutMask:
        """Models and device hooks move masks like tensors; a dtype means nothing here."""
        target = next((a for a in (*args, kwargs.get("device")) if isinstance(a, torch.device | str | int)), None)
        if target is None or torch.empty(0, device=target).device == self.layout.query_positions.device:
            return self
        layout = self.layout.memo(("to", str(target)), lambda: self.layout.to(torch.device(target)))
        return LayoutMask(layout, self.length, self.window, crosses=self.crosses, travels=self.travels)

    def carrying(self, travels: Travelling) -> LayoutMask:
        """The same for one layer, with what an encoding has for each of its tokens."""
        return LayoutMask(self.layout, self.length, self.window, crosses=self.crosses, travels=travels)


def layout_of(attention_mask: Any) -> LayoutMask:
    """Read the layout off what a layer received as its mask.

    Raises:
        PatchStateError: if it is not there, because something between the decoder and the layer replaced the mask.
    """
    if isinstance(attention_mask, LayoutMask):
        return attention_mask
    raise PatchStateError(
        f"The attention of a model patched by ctxext received {type(attention_mask).__name__} instead of a layout. Its "
        f"decoder was called in a way that ctxext does not see; call the model itself, and do not change its "
        f"_attn_implementation."
    )


ATTENTION = "ctxext"


@dataclass(frozen=True)
class _DecoderCall:
    """What the decoder was called with, for the mask function that runs inside it."""

    position_ids: Tensor | None
    length: int | None
    shard: LayoutMask | None = None
    cache: Any = None
    has_encoder: bool = False


class _CurrentCall(threading.local):
    """The call that this thread is inside of. Not a context variable: torch.compile cannot trace those."""

    call: _DecoderCall | None = None


_current = _CurrentCall()


@dataclass
class PositionedForward(ForwardOverride):
    """Stands in for a decoder's ``forward``: notes the positions it is called with, then calls what stood there."""

    @classmethod
    def around(cls, decoder: nn.Module) -> PositionedForward:
        """What to put in the place of ``decoder.forward``."""
        return cls(decoder, decoder.__dict__.get("forward"))

    def __call__(
        self, *args: Any, ctxext_length: int | None = None, ctxext_sharded: bool = False, **kwargs: Any
    ) -> Any:
        """Run the decoder.

        Args:
            *args: the decoder's own.
            ctxext_length: global length in tokens of a sequence of which this process holds a shard; needed by
                dynamic methods under sequence parallelism.
            ctxext_sharded: whether this call holds a shard, and context parallelism replaced torch's attention by one
                that sees the whole sequence; needs ``position_ids``, counted from its start, and ``ctxext_length``.
            **kwargs: the decoder's own.
        """
        given = self.given(args, kwargs)
        if getattr(self.module.config, "_attn_implementation", None) == ATTENTION:
            kwargs = kwargs | _checked(self.module.config, given)
        outer = _current.call
        call = _DecoderCall(None, None) if outer is None else outer
        if cache_in(given) is not None:
            call = replace(call, cache=cache_in(given))
        if given.get("position_ids") is not None:
            call = replace(call, position_ids=given["position_ids"])
        if given.get("encoder_hidden_states") is not None:
            call = replace(call, has_encoder=True)
        if ctxext_length is not None:
            call = replace(call, length=ctxext_length)
        if ctxext_sharded:
            call = replace(call, shard=_shard(given, call))
        _current.call = call
        try:
            return self.run(*args, **kwargs)
        finally:
            _current.call = outer


@dataclass
class SharedForward(PositionedForward):
    """Stands in for the ``forward`` of a decoder whose layers hand their keyword arguments on to the attention.

    A shard's layout goes there by that way too: engines drop the mask, since theirs would have to be dense.
    """

    def run(self, *args: Any, **kwargs: Any) -> Any:
        config: Any = self.module.config
        found = config._attn_implementation
        if found != ATTENTION:
            raise PatchStateError(
                f"The attention implementation of this {type(self.module).__name__} is now {found!r}. Its extension "
                f"lives in ctxext's attention, without which its positions would be wrong. "
                f"Go back with model.set_attn_implementation({ATTENTION!r}). A kernel is chosen when patching: "
                f"ctxext.patch(..., attention='sdpa'); and ctxext.unpatch takes the extension off."
            )
        shard = None if _current.call is None else _current.call.shard
        return super().run(*args, **(kwargs if shard is None else kwargs | {"ctxext_layout": shard}))


def _shard(given: dict[str, Any], call: _DecoderCall) -> LayoutMask:
    """The layout of a shard, from the arguments of the call that holds it."""
    mask, tokens = given.get("attention_mask"), given.get("input_ids")
    if call.position_ids is None or call.length is None:
        raise InvalidParameterError(
            "A shard of a sequence (ctxext_sharded=True) needs position_ids, counted from the start of the whole "
            "sequence, and ctxext_length, the whole length in tokens."
        )
    if isinstance(mask, Tensor) and not bool(mask.all()):
        raise IncompatibleError("A shard of a sequence cannot be padded: its engine takes no mask. Cut or fill texts.")
    rows = (given["inputs_embeds"] if tokens is None else tokens).shape[0]
    return LayoutMask(Layout.shard(call.position_ids.expand(rows, -1)), call.length)


def _checked(config: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Refuse what attention by positions cannot do; return the mask that replaces the given one, if any."""
    if given.get("output_attentions") or getattr(config, "output_attentions", False):
        raise IncompatibleError("A fused kernel has no attention weights; ctxext.unpatch the model to see them.")
    mask = given.get("attention_mask")
    if isinstance(mask, dict):  # generate() prepared one per layer type; under our name all are the padding itself
        return {"attention_mask": next((part for part in mask.values() if part is not None), None)}
    if isinstance(mask, Tensor) and mask.ndim > 2:
        raise IncompatibleError(
            f"attention_mask must be [batch, keys] with 1 for tokens, found {tuple(mask.shape)}: this model "
            f"computes attention from positions. Give a two-dimensional one, or position_ids that restart."
        )
    return {}


def cache_layer_of(keys: Tensor) -> Any:
    """The layer of the cache, of a plain kind, whose storage ``keys`` is; None where they are a copy of it, or new."""
    cache = None if _current.call is None else _current.call.cache
    layers = getattr(getattr(cache, "self_attention_cache", cache), "layers", ())
    return next((layer for layer in layers if type(layer) in PLAIN_LAYERS and layer.keys is keys), None)


def replace_cache_layer(old: Any, new: Any) -> None:
    """Put another layer in the place of one that ``cache_layer_of`` found in this call."""
    cache: Any = None if _current.call is None else _current.call.cache
    layers = getattr(cache, "self_attention_cache", cache).layers
    layers[next(index for index, layer in enumerate(layers) if layer is old)] = new


def declared_length() -> int | None:
    """The global length that the caller of the decoder named with ``ctxext_length``."""
    return None if _current.call is None else _current.call.length


@dataclass(frozen=True)
class _Slots:
    """The places in a row of keys that one call is about, padding included, as transformers counts them.

    Args:
        batch: rows.
        query: queries of a row.
        key: slots of a row that this call sees.
        q_offset: slot of the first query; a tensor where a compiled static cache counts its tokens on the device.
        kv_offset: slot of the first key, above 0 where a cache keeps a sliding window only.
        device: where the layout is built.
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
    **_: Any,
) -> LayoutMask | Tensor | None:
    """Mask function of the name ``ctxext``, in the signature that transformers calls."""
    if use_vmap:
        raise IncompatibleError(
            "Its attention hides or shows tokens by a rule of the model's own (a mask function on top of the causal "
            "one), which ctxext's attention by positions cannot say. Unpatch the model for such inputs."
        )
    device = attention_mask.device if attention_mask is not None and device is None else device
    slots = _Slots(batch_size, q_length, kv_length, q_offset, kv_offset, device)
    sees_both_ways = mask_function is bidirectional_mask_function
    if not allow_is_causal_skip and not sees_both_ways:  # transformers does not vouch for a plain causal mask here
        _require_causal(mask_function, slots)
    call = _current.call
    if call is None:  # masks are prepared ahead of the decoder, by generate() too: leave the padding as it is for then
        return attention_mask if attention_mask is None else _over_all_slots(attention_mask, slots)
    if call.shard is not None:
        if sees_both_ways:
            raise IncompatibleError(
                "Its tokens see both ways, and an engine around a shard of a sequence (ctxext_sharded=True) makes "
                "attention causal. Give the model whole texts."
            )
        return call.shard
    if sees_both_ways and call.has_encoder:
        return LayoutMask(_across(slots, attention_mask), call.length, crosses=True)
    bounded = bounded_layer_of(call.cache)
    if bounded is None:
        layout = _layout(slots, attention_mask, _on_one_axis(call.position_ids))
    else:
        layout = _bounded(bounded, slots, attention_mask, _on_one_axis(call.position_ids))
    return LayoutMask(layout.both_ways if sees_both_ways else layout, call.length, local_size)


def _over_all_slots(attention_mask: Tensor, slots: _Slots) -> Tensor:
    """The mask as long as a static cache is: one that grew with each token would be another graph for each."""
    empty = slots.kv_offset + slots.key - attention_mask.shape[-1]
    return torch.nn.functional.pad(attention_mask, (0, max(empty, 0)))


def _across(slots: _Slots, attention_mask: Tensor | None) -> Layout:
    """Every query sees every token of another text, which stand at no distance of each other."""
    queries = torch.zeros(slots.batch, slots.query, dtype=torch.long, device=slots.device)
    keys = torch.zeros(slots.batch, slots.key, dtype=torch.long, device=slots.device)
    compiling = torch.compiler.is_compiling()
    if attention_mask is None or (not compiling and _hides_nothing(attention_mask, slots.key)):
        everything = Span((0, slots.batch), (0, slots.query), (0, slots.key))
        return Layout(queries, keys, spans=(everything,), sees="both")
    return Layout(queries, keys, queries, _keep(attention_mask, slots.key, 0).long() - 1, sees="both")


def _on_one_axis(position_ids: Tensor | None) -> Tensor | None:
    """Positions as ``[rows, tokens]``, also where a model counts time, height and width apart."""
    if position_ids is None or position_ids.ndim == 2:
        return position_ids
    if not torch.compiler.is_compiling() and not bool((position_ids == position_ids[:1]).all()):
        raise IncompatibleError(
            f"position_ids {tuple(position_ids.shape)} count along {position_ids.shape[0]} axes that differ, as "
            f"they do where an image or a video stands between the words. ALiBi knows one distance between two "
            f"tokens, so this model reads text only while it is patched."
        )
    return position_ids[0]


def _require_causal(mask_function: Callable[..., Any], slots: _Slots) -> None:
    """Raise if a token may see the one that follows it, by another rule than that all see all.

    Prefixes, the blocks of images and windows to both sides let tokens see what comes later. Whoever sees further ahead
    sees the next token too, so neighbours are enough to ask about.
    """
    if mask_function is causal_mask_function or torch.compiler.is_compiling():
        return
    where = torch.device("cpu" if slots.device is None or torch.device(slots.device).type == "meta" else slots.device)
    at = torch.arange(slots.query, device=where) + int(slots.q_offset)
    at = at[(at + 1 >= slots.kv_offset) & (at + 1 < slots.kv_offset + slots.key)][None]
    rows = torch.arange(slots.batch, device=where)[:, None]
    if at.numel() and bool(mask_function(rows, torch.zeros_like(rows), at, at + 1).any()):
        raise IncompatibleError(
            "Its attention is not causal here, nor does every token see all others: tokens see some that come after "
            "them (a prefix, the block of an image, or a window to both sides). ctxext's attention is for tokens that "
            "see what came before them, or everything. Unpatch the model for such inputs."
        )


def _layout(slots: _Slots, attention_mask: Tensor | None, position_ids: Tensor | None) -> Layout:
    """Where the queries and keys of one call stand, from what transformers says of it.

    A slot is a place in the row of keys, padding included; a position counts the tokens of one document. transformers
    speaks of slots, ALiBi and the layout of positions. How they hang together depends on the call:

    1. A first pass with positions: they say everything, and where they restart a document begins (``_first_pass``).
    2. Every slot holds a token and the queries are the newest: positions are slots, cache or not.
    3. Slots after the newest query hold nothing yet, as in a static cache: positions are slots.
    4. A mask hides slots, which is padding: positions count the tokens that it leaves (``_padded``).

    In the last three a cache may hold what came before, and it does not say which document a key belongs to; so there
    is one document in each row, and positions that are given may only confirm what was counted. What needs a look at
    the values of a tensor is left out while torch.compile traces: a graph cannot branch on them.

    Args:
        slots: of the call.
        attention_mask: ``[batch, slots]``, true for tokens; None for tokens everywhere. May be shorter than the cache.
        position_ids: as the decoder was given them; None where it was not.

    Raises:
        InvalidParameterError: for a mask or positions with two meanings, or with none.
        IncompatibleError: for positions that do not go on where a cache ends.
    """
    compiling = torch.compiler.is_compiling()
    if not compiling:
        slots = replace(slots, q_offset=int(slots.q_offset))
    is_counted, stop = isinstance(slots.q_offset, int), slots.q_offset + slots.query
    if attention_mask is not None and is_counted:
        _require_covered(attention_mask, stop)
    if attention_mask is not None and not compiling and _hides_nothing(attention_mask, slots.kv_offset + slots.key):
        attention_mask = None  # the same as none, and those who see none have faster kernels
    if is_counted and slots.q_offset == slots.kv_offset == 0 and position_ids is not None:
        keep = None if attention_mask is None else _keep(attention_mask, slots.query, 0)
        return _first_pass(position_ids.expand(slots.batch, slots.query).to(slots.device), keep, slots.key)
    keys = torch.arange(slots.kv_offset, slots.kv_offset + slots.key, device=slots.device)
    keys = keys.expand(slots.batch, slots.key)
    places = torch.arange(slots.query, device=slots.device) + slots.q_offset - slots.kv_offset  # of queries among keys
    if attention_mask is None and is_counted and slots.kv_offset + slots.key == stop:
        if not compiling:
            _require_agreement(position_ids, keys[:, places], keys[:, places], None)
        return Layout.causal(slots.batch, slots.query, slots.key, device=keys.device)
    filled = keys < stop
    if attention_mask is None:
        return _one_document(keys, filled, keys, places, position_ids)
    return _padded(attention_mask, slots.kv_offset, keys, filled, places, position_ids)


def _bounded(bounded: BoundedLayer, slots: _Slots, attention_mask: Tensor | None, given: Tensor | None) -> Layout:
    """The layout of a call whose cache has dropped the keys between the first tokens and the newest.

    Raises:
        InvalidParameterError: for a mask that does not say which of all tokens so far are padding.
    """
    held = bounded.slots(slots.query).expand(slots.batch, -1).to(slots.device)
    places = torch.arange(slots.key - slots.query, slots.key, device=held.device)
    stop, compiling = bounded.cumulative_length + slots.query, torch.compiler.is_compiling()
    if attention_mask is not None:
        _require_covered(attention_mask, stop)
    if attention_mask is None or (not compiling and _hides_nothing(attention_mask, stop)):
        first = bounded.first_slots
        is_padded = first is not None and first != torch.arange(first.shape[1], device=first.device)
        if not compiling and bool(torch.as_tensor(is_padded).any()):
            raise InvalidParameterError(
                "attention_mask hides no token, but this cache was filled with padding in front of some rows. Give the "
                f"mask of all {stop} tokens so far, 1 for tokens and 0 for padding."
            )
        if compiling:
            return _one_document(held, held >= 0, held, places, given)
        _require_agreement(given, held[:, places], held[:, places], None)
        spans = (Span((0, slots.batch), (0, slots.query), (0, slots.key)),)
        return Layout(held[:, places], held, spans=spans, consecutive=first is None)
    if given is None and not compiling:
        require_no_hole("attention_mask", attention_mask[:, :stop].bool(), "Pad on the left only.")
    counted = (attention_mask[:, :stop].long().cumsum(1) - 1).clamp(min=0)
    real = attention_mask.bool().gather(1, held.clamp(min=0)) & (held >= 0)
    return _one_document(counted.gather(1, held.clamp(min=0)), real, held, places, given)


def _require_covered(attention_mask: Tensor, length: int | Tensor) -> None:
    """Raise unless a mask says of every token so far whether it is padding: what it leaves out has no meaning."""
    covered = attention_mask.shape[-1]
    if covered < length:
        raise InvalidParameterError(
            f"attention_mask covers {covered} tokens and the text has {length}, those in the cache included. Give one "
            f"of shape [batch, {length}], 1 for tokens and 0 for padding, or none where nothing is padded."
        )


def _hides_nothing(attention_mask: Tensor, stop: int) -> bool:
    """Whether a mask is true up to the slot ``stop``; one without data, as in a dry run, counts as the plain case."""
    if attention_mask.shape[-1] < stop:
        return False
    return isinstance(attention_mask, FakeTensor) or bool(attention_mask[:, :stop].all())


def _first_pass(positions: Tensor, keep: Tensor | None, key: int) -> Layout:
    """A first pass with positions of its own: packed documents restart them, padding has none.

    A static cache has more slots than there are tokens yet; they stay empty.
    """
    batch, query = positions.shape
    compiling = torch.compiler.is_compiling()
    plain = keep is None and key == query and not compiling
    if plain and bool((positions == torch.arange(query, device=positions.device)).all()):
        return Layout.causal(batch, query, device=positions.device)
    keep = torch.ones_like(positions, dtype=torch.bool) if keep is None else keep
    at = torch.arange(query, device=positions.device)
    # Padding may stand between two tokens, so each is compared with the newest token before it, not with its neighbour.
    last = torch.where(keep, at, -1).cummax(1).values
    before = torch.nn.functional.pad(last[:, :-1], (1, 0), value=-1)
    previous = positions.gather(1, before.clamp(min=0))
    starts = keep & (before >= 0) & (positions <= previous)
    odd = starts & (positions != 0)  # gaps inside a document are meant (PoSE); a step back to elsewhere than 0 is not
    if not compiling and bool(odd.any()):
        row, token = odd.nonzero()[0].tolist()
        raise InvalidParameterError(
            f"position_ids go from {int(previous[row, token])} to {int(positions[row, token])} in row {row}. They must "
            f"increase, or restart at 0 where a new document begins."
        )
    documents = starts.long().cumsum(1)
    places = torch.where(keep, positions, 0)
    documents = torch.where(keep, documents, -1)
    empty = (0, key - query)
    key_places = torch.nn.functional.pad(places, empty)
    return Layout.of(places, key_places, documents, torch.nn.functional.pad(documents, empty, value=-1))


def _padded(
    attention_mask: Tensor, kv_offset: int, keys: Tensor, filled: Tensor, places: Tensor, given: Tensor | None
) -> Layout:
    """A mask hides slots, some of which may lie before the first one that this call sees."""
    key = keys.shape[1]
    if given is None and not torch.compiler.is_compiling():
        remedy = "Pad on one side only, or say what you mean with position_ids."
        require_no_hole("attention_mask", attention_mask[:, : kv_offset + key].bool(), remedy)
    real = _keep(attention_mask, key, kv_offset) & filled
    before = attention_mask[:, :kv_offset].long().sum(1, keepdim=True)
    positions = (before + real.long().cumsum(1) - 1).clamp(min=0)
    return _one_document(positions, real, keys, places, given)


def _one_document(positions: Tensor, real: Tensor, slots: Tensor, places: Tensor, given: Tensor | None) -> Layout:
    """One document in each row: positions of its keys, and which of these are tokens at all."""
    compiling = torch.compiler.is_compiling()
    if not compiling:
        _require_agreement(given, positions[:, places], slots[:, places], real[:, places])
    documents = real.long() - 1
    analyse = not compiling and places.shape[0] > 1  # one query has no span to find, and decoding asks every time
    return Layout.of(positions[:, places], positions, documents[:, places], documents, analyse=analyse)


def _require_agreement(given: Tensor | None, counted: Tensor, slots: Tensor, real: Tensor | None) -> None:
    """Raise unless the positions of a cached call go on where the cache ends, padding counted or not.

    A cache does not say which document a key belongs to, so documents cannot restart in front of one.
    """
    if given is None:
        return
    given = given.to(counted.device).expand(counted.shape)
    fits = torch.stack([(given == counted), (given == slots)])
    if real is not None:
        fits = fits | ~real
    if not bool(fits.all(-1).any(0).all()):
        raise IncompatibleError(
            f"position_ids {given[0, :4].tolist()}... do not go on where the cache ends, at {counted[0, 0].item()}. A "
            f"cache holds one document per row: give a new one a cache of its own, or pack documents without a cache."
        )


def _keep(attention_mask: Tensor, key: int, kv_offset: int) -> Tensor:
    """The two-dimensional mask over this layer's key slots; slots beyond it are not filled yet."""
    keep = attention_mask[:, kv_offset : kv_offset + key].bool()
    return torch.nn.functional.pad(keep, (0, key - keep.shape[1]))


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,  # sixth, as in transformers' own functions: some programs pass it by position
    scaling: Any = None,  # a whole number in some
    sliding_window: int | None = None,
    ctxext_layout: LayoutMask | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention function of the name ``ctxext``, in the signature that transformers calls."""
    attend = module.__dict__.get("_ctxext_attend")
    if attend is None:
        raise PatchStateError(
            f"{type(module).__name__} was given the attention implementation {ATTENTION!r} without being patched. "
            f"Use ctxext.patch or ctxext.load."
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    mask = layout_of(attention_mask if ctxext_layout is None else ctxext_layout)
    if ctxext_layout is None and mask.window != sliding_window:
        raise IncompatibleError(
            f"A layer of {type(module).__name__} asks for attention over a window of {sliding_window} tokens under a "
            f"mask of {mask.window} (None is all), so ctxext's attention cannot tell what it may see."
        )
    out = attend(query, key, value, mask, scale=scale, window=sliding_window, dropout=dropout)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, _layout_mask)
