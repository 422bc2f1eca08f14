"""How positions reach the attention of a patched model.

Stock transformers turns masks, caches and positions into a mask tensor, once per forward pass. Under the attention
name ``ctxext`` that step yields a ``LayoutMask`` instead: an object that says where every query and key stands. It
travels to each layer as the ``attention_mask`` argument, so gradient checkpointing replays exactly what was seen.
"""

from __future__ import annotations

import functools
import inspect
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from ctxext.attention import Layout
from ctxext.errors import IncompatibleError, PatchStateError

__all__ = ["ATTENTION", "LayoutMask", "PositionedForward", "declared_length", "layout_of"]

ATTENTION = "ctxext"


@dataclass(frozen=True)
class _Call:
    """What the decoder was called with, for the mask function that runs inside it."""

    position_ids: Tensor | None
    length: int | None


_current: ContextVar[_Call | None] = ContextVar("ctxext_call", default=None)


@dataclass(frozen=True, eq=False)
class LayoutMask:
    """A layout in the place of an attention mask.

    Args:
        layout: where queries and keys stand.
        length: the sequence's global length in tokens, where a caller that holds only a shard of it said so.
    """

    layout: Layout
    length: int | None = None

    ndim = 2

    def to(self, *args: Any, **kwargs: Any) -> LayoutMask:
        """Models and device hooks move masks like tensors; a dtype means nothing here."""
        target = next((a for a in (*args, kwargs.get("device")) if isinstance(a, torch.device | str | int)), None)
        if target is None or torch.empty(0, device=target).device == self.layout.query_positions.device:
            return self
        return LayoutMask(
            self.layout.memo(("to", str(target)), lambda: self.layout.to(torch.device(target))), self.length
        )


@dataclass
class PositionedForward:
    """Stands in for a decoder's ``forward``: notes the positions it is called with, then calls the class's own."""

    decoder: nn.Module

    @property
    def __signature__(self) -> inspect.Signature:
        """The class's own, for those who look which arguments a model takes."""
        full = _signature(type(self.decoder).forward)
        return full.replace(parameters=list(full.parameters.values())[1:])

    def __call__(self, *args: Any, ctxext_length: int | None = None, **kwargs: Any) -> Any:
        """Run the decoder.

        Args:
            *args: the decoder's own.
            ctxext_length: global length in tokens of a sequence of which this process holds a shard; needed by
                dynamic methods under sequence parallelism.
            **kwargs: the decoder's own.
        """
        forward = type(self.decoder).forward
        given = _signature(forward).bind_partial(self.decoder, *args, **kwargs).arguments
        given = given | given.pop("kwargs", {})
        mask = given.get("attention_mask")
        ours = getattr(self.decoder.config, "_attn_implementation", None) == ATTENTION
        if ours and isinstance(mask, Tensor) and mask.ndim > 2:
            raise IncompatibleError(
                f"attention_mask must be [batch, keys] with 1 for tokens, found {tuple(mask.shape)}: this model "
                f"computes attention from positions. Give a two-dimensional one, or position_ids that restart."
            )
        outer = _current.get() or _Call(None, None)
        position_ids = given.get("position_ids")
        token = _current.set(
            _Call(
                outer.position_ids if position_ids is None else position_ids,
                outer.length if ctxext_length is None else ctxext_length,
            )
        )
        try:
            return forward(self.decoder, *args, **kwargs)
        finally:
            _current.reset(token)


def declared_length() -> int | None:
    """The global length that the caller of the decoder named with ``ctxext_length``."""
    call = _current.get()
    return None if call is None else call.length


@functools.cache
def _signature(forward: Any) -> inspect.Signature:
    return inspect.signature(forward)


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


def _layout_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    device: torch.device | str | None = None,
    **_: Any,
) -> LayoutMask | Tensor | None:
    """Mask function of the name ``ctxext``, in the signature that transformers calls."""
    call = _current.get()
    if call is None:  # generate() prepares masks ahead of the decoder: leave the padding as it is for then
        return attention_mask
    device = attention_mask.device if attention_mask is not None and device is None else device
    layout = _layout(batch_size, q_length, kv_length, q_offset, kv_offset, attention_mask, call.position_ids, device)
    return LayoutMask(layout, call.length)


def _layout(
    batch: int,
    query: int,
    key: int,
    q_offset: int | Tensor,
    kv_offset: int,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    device: torch.device | str | None,
) -> Layout:
    compiling = torch.compiler.is_compiling()
    if not compiling and isinstance(q_offset, Tensor):
        q_offset = int(q_offset)
    if attention_mask is not None:
        keep = _keep(attention_mask, key, kv_offset)
        if not compiling and attention_mask.shape[-1] >= kv_offset + key and bool(keep.all()):
            attention_mask = None
    uncached = isinstance(q_offset, int) and q_offset == 0 and query == key
    if uncached and position_ids is not None and not compiling:
        positions = position_ids.expand(batch, query).to(device)
        return _explicit(positions, None if attention_mask is None else keep)
    if attention_mask is None and isinstance(q_offset, int) and kv_offset + key == q_offset + query:
        return Layout.causal(batch, query, key, device=device)
    slots = torch.arange(kv_offset, kv_offset + key, device=device)
    filled = slots < q_offset + query
    real = filled.expand(batch, key) if attention_mask is None else keep & filled
    positions = slots.expand(batch, key) if attention_mask is None else (real.long().cumsum(1) - 1).clamp(min=0)
    places = torch.arange(query, device=device) + q_offset - kv_offset
    documents = real.long() - 1
    analyse = not compiling and query > 1
    return Layout.of(positions[:, places], positions, documents[:, places], documents, analyse=analyse)


def _keep(attention_mask: Tensor, key: int, kv_offset: int) -> Tensor:
    """The two-dimensional mask over this layer's key slots; slots beyond it are not filled yet."""
    keep = attention_mask[:, kv_offset : kv_offset + key].bool()
    return torch.nn.functional.pad(keep, (0, key - keep.shape[1]))


def _explicit(positions: Tensor, keep: Tensor | None) -> Layout:
    """A full pass with positions of its own: packed documents restart them, padding has none."""
    if keep is None:
        if bool((positions == torch.arange(positions.shape[1], device=positions.device)).all()):
            return Layout.causal(*positions.shape, device=positions.device)
        return Layout.resets(positions)
    documents = torch.nn.functional.pad((positions.diff(dim=1) <= 0).long().cumsum(1), (1, 0))
    places = torch.where(keep, positions, 0)
    documents = torch.where(keep, documents, -1)
    return Layout.of(places, places, documents, documents)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention function of the name ``ctxext``, in the signature that transformers calls."""
    attend = module.__dict__.get("_ctxext_attend")
    if attend is None:
        raise PatchStateError(
            f"{type(module).__name__} was given the attention implementation {ATTENTION!r} without being patched. "
            f"Use ctxext.patch or ctxext.load."
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = attend(query, key, value, layout_of(attention_mask), scale=scale, window=sliding_window, dropout=dropout)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, _layout_mask)
