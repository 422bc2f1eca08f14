"""Record the running call of a decoder: its positions, its cache, its requests and the length that it declares.

transformers makes masks and caches inside the call of the decoder. So the forward of a patched model's decoder is
replaced by one that records the call, and the mask function, the layers and the caches read the record.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.generation.continuous_batching import PagedAttentionCache

from ctxext.caches.held import HeldLayer, held_layers
from ctxext.caches.layout_mask import LayoutMask
from ctxext.caches.paged_batch import PagedBatch
from ctxext.caches.records import ATTENTION, Given, cache_in, cached_tokens
from ctxext.core.override import ForwardOverride
from ctxext.errors import IncompatibleError, InvalidParameterError, PatchStateError
from ctxext.kernels import Layout

Declared = int | Sequence[int]
"""A declared length in tokens, or one for each row."""


@dataclass(frozen=True)
class DecoderCall:
    """Arguments of the running decoder call, for the mask function that runs inside it."""

    position_ids: Tensor | None
    length: Declared | None
    shard: LayoutMask | None = None
    cache: Any = None
    has_encoder: bool = False
    batch: PagedBatch | None = None


class _CurrentCall(threading.local):
    """The running decoder call of a thread; not a context variable, which torch.compile cannot trace.

    No class-level default: torch 2.11 would bake it into the graph.
    """

    def __init__(self) -> None:
        self.call: DecoderCall | None = None


current = _CurrentCall()


@dataclass
class PositionedForward(ForwardOverride):
    """Replacement of a decoder's ``forward`` that records the positions of the call, then runs the earlier forward."""

    @classmethod
    def around(cls, decoder: nn.Module) -> PositionedForward:
        """Return the replacement for ``decoder.forward``."""
        return cls(decoder, decoder.__dict__.get("forward"))

    def __call__(
        self,
        *args: Any,
        ctxext_length: Any = None,  # numbers of torch and numpy too
        ctxext_sharded: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Run the decoder.

        ``ctxext_length`` is for dynamic methods. It counts the tokens of the whole text, where this call holds a part
        of the text: under sequence parallelism, the whole sequence. With ``growth="request"`` it counts the tokens that
        the text may reach, as one number for each row, or one for all. ``ctxext_sharded`` says that this call holds a
        shard, and context parallelism replaced torch's attention by one over the whole sequence. It needs
        ``ctxext_length``, and ``position_ids`` counted from the start of the sequence.
        """
        given = self.given(args, kwargs)
        _require_restarts(given)
        by_layout = getattr(self.module.config, "_attn_implementation", None) == ATTENTION
        if by_layout:
            kwargs = kwargs | _checked(self.module.config, given)
        outer = current.call
        call = outer or DecoderCall(None, None)
        if cache_in(given) is not None:
            call = replace(call, cache=cache_in(given))
        if isinstance(call.cache, PagedAttentionCache) and call.batch is None:
            call = replace(call, batch=PagedBatch.of(call.cache, given, by_layout=by_layout))
        if given.get("position_ids") is not None:
            call = replace(call, position_ids=given["position_ids"])
        if given.get("encoder_hidden_states") is not None:
            call = replace(call, has_encoder=True)
        if ctxext_length is not None:
            call = replace(call, length=_tokens(ctxext_length))
        if ctxext_sharded:
            call = replace(call, shard=_shard(given, call))
        current.call = call
        try:
            return self.run(*args, **kwargs)
        finally:
            current.call = outer


def _require_restarts(given: Given) -> None:
    """Refuse borders of packed documents that positions do not tell: positions are all that ctxext goes by.

    Continuous batches have such borders too, and positions that go on from a cache.
    """
    borders, positions = given.get("cu_seq_lens_q"), given.get("position_ids")
    if borders is None or len(borders) <= 2 or isinstance(cache_in(given), PagedAttentionCache):
        return
    if torch.compiler.is_compiling():
        starts, is_told = borders, positions is not None  # a graph reads no values
    else:
        starts = borders[borders % tokens_in(given).shape[1] != 0].long()  # rows do not see each other
        is_told = positions is not None and not bool(
            positions.flatten()[starts.to(positions.device) % positions.numel()].any()
        )
    if len(starts) and not is_told:
        raise IncompatibleError(
            "cu_seq_lens_q tells where documents begin, but position_ids do not begin at 0 there. ctxext goes by "
            "positions: pass position_ids that restart in each document."
        )


def tokens_in(given: Given) -> Any:
    """Return the tokens among the arguments of a call, or their embeddings; None without either."""
    tokens = given.get("input_ids")
    return given.get("inputs_embeds") if tokens is None else tokens


def _tokens(declared: Any) -> Declared:
    """Return a declared length, or one length for each row, in Python's numbers."""
    found: Any = declared.tolist() if hasattr(declared, "tolist") else declared  # of torch and numpy
    if isinstance(found, str) or not isinstance(found, int | Sequence):
        raise InvalidParameterError(f"ctxext_length must be a number of tokens, or one for each row; found {found!r}.")
    return found


@dataclass
class SharedForward(PositionedForward):
    """Replacement of the ``forward`` of a decoder whose layers pass keyword arguments on to their attention.

    A shard's layout is one of these arguments: engines drop the mask, because theirs would have to be dense.
    """

    def run(self, *args: Any, **kwargs: Any) -> Any:
        config: Any = self.module.config
        implementation = config._attn_implementation
        if implementation != ATTENTION:
            raise PatchStateError(
                f"The attention implementation of this {type(self.module).__name__} is now {implementation!r}, under "
                f"which its positions would be wrong. Go back with model.set_attn_implementation({ATTENTION!r}). To "
                f"choose a kernel, pass it to ctxext.patch(..., attention='sdpa'). To remove the extension, call "
                f"ctxext.unpatch."
            )
        shard = None if current.call is None else current.call.shard
        return super().run(*args, **(kwargs if shard is None else kwargs | {"ctxext_layout": shard}))


def _shard(given: Given, call: DecoderCall) -> LayoutMask:
    """Return the layout of a shard, from the arguments of its call."""
    mask = given.get("attention_mask")
    if call.position_ids is None or call.length is None:
        raise InvalidParameterError(
            "A shard of a sequence (ctxext_sharded=True) needs ctxext_length, the whole length in tokens, and "
            "position_ids, counted from the start of the whole sequence."
        )
    if isinstance(mask, Tensor) and not bool(mask.all()):
        raise IncompatibleError("A shard of a sequence cannot be padded: its engine takes no mask. Cut or fill texts.")
    rows = tokens_in(given).shape[0]
    return LayoutMask(Layout.shard(call.position_ids.expand(rows, -1)), call.length)


def _checked(config: Any, given: Given) -> Given:
    """Refuse arguments that attention by positions cannot serve; return a replacement of the mask, if any."""
    if given.get("output_attentions") or getattr(config, "output_attentions", False):
        raise IncompatibleError(
            "output_attentions: a fused kernel has no attention weights. Call ctxext.unpatch first."
        )
    mask = given.get("attention_mask")
    masks = mask.values() if isinstance(mask, dict) else (mask,)
    shapes = (tuple(getattr(each, "shape", ())) for each in masks)  # of tensors, or of a BlockMask
    if found := next((shape for shape in shapes if len(shape) > 2), None):
        raise IncompatibleError(
            f"attention_mask must be [batch, keys] with 1 for tokens, found {found}: this model computes attention "
            f"from positions. Pass a two-dimensional mask, or position_ids that restart."
        )
    return {"attention_mask": _padding_among(mask, given)} if isinstance(mask, dict) else {}


def _padding_among(masks: dict[str, Any], given: Given) -> Tensor | None:
    """Return the padding mask out of the masks that generate() prepared for each layer type.

    Under the name ctxext, the mask of attention layers is the padding mask, over all slots of a static cache. Recurrent
    layers want the padding mask of the tokens so far, and get no mask where nothing is padded.
    """
    padding = (mask for mask in masks.values() if mask is not None)
    longest: Tensor | None = max(padding, key=lambda mask: mask.shape[-1], default=None)
    tokens = tokens_in(given)
    if longest is None or tokens is None or tokens.shape[1] == 1 or torch.compiler.is_compiling():
        return longest
    return longest[:, : cached_tokens(cache_in(given)) + tokens.shape[1]]


def holder_of(keys: Tensor) -> HeldLayer | None:
    """Return the layer of the running call's cache that holds ``keys``; None if the keys are a copy, or new."""
    layers = () if current.call is None else held_layers(current.call.cache)
    return next((layer for layer in layers if layer.keys is keys), None)


def paged_batch() -> PagedBatch | None:
    """Return the requests of the running pass under continuous batching; None outside of it."""
    return None if current.call is None else current.call.batch


def declared_length() -> Declared | None:
    """Return what the caller of the decoder passed as ``ctxext_length``, None without it."""
    return None if current.call is None else current.call.length
