"""The engines that compute the attention of a remapped layer: the first that admits a call serves it.

====== ==================================================================================================
own    Short texts: the model's own attention, bit for bit.
step   A few queries, all pieces under one softmax: by a Triton kernel, or in a graph on a static cache.
pieces Everything else: a kernel for each piece, merged by their log-sum-exp.
====== ==================================================================================================
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ctxext.attention.attend import Backends, LayerCall, as_autocast_wants, attend_as_before, require_float64
from ctxext.attention.remap import HeadPieces
from ctxext.caches.call import current, holder_of
from ctxext.caches.held import HeldLayer, Reach
from ctxext.caches.paged_batch import pads_little
from ctxext.caches.records import attends_of, outside_graphs
from ctxext.core.steps import ExtendedPart, register_description
from ctxext.errors import IncompatibleError
from ctxext.kernels import Layout
from ctxext.kernels.groups import SplitGroups
from ctxext.kernels.pieces import RotationForm, TurnedPiece, attend_pieces, need_in_pieces
from ctxext.kernels.step import attend_split, attend_step, plan_split, plan_step, why_no_kernel, why_no_step
from ctxext.methods.remap import Piece, RemapMethod
from ctxext.spec import Description

NOT_ONE_GRAPH = (
    "ctxext: attention in pieces reads the values of position_ids, which one compiled, exported or traced graph cannot "
    "do; a step of up to 8 tokens on a static cache can. Compile with fullgraph=False: the rest of each layer is "
    "compiled. Use torch.export with fixed lengths only; torch.jit.trace does not work."
)


@dataclass(frozen=True, kw_only=True)
class RemapAttend:
    """Attention of a layer in the pieces of a method.

    Args:
        far: Pieces of all heads, or of the heads that read far.
        near: Pieces of the heads that do not read far, if there are both kinds.
        heads: Groups of both kinds.
        drops: True if keys out of sight are dropped from the cache after a call; False where the layer calls again.
        kind: Name that the layers share whose heads attend alike.
    """

    method: RemapMethod
    far: HeadPieces
    near: HeadPieces | None = None
    heads: SplitGroups | None = None
    form: RotationForm
    backends: Backends
    implementation: str
    drops: bool = True
    kind: str = "all"
    reads_pages: ClassVar[bool] = True

    @functools.cached_property
    def exact_length(self) -> int:
        """Length in tokens up to which the method changes no score of the model, by a temperature neither."""
        exact = self.method.exact_length(self.far.spec)
        sharpness = self.method.sharpness(self.far.spec, torch.arange(exact, device="cpu"))
        return exact if sharpness is None or bool((sharpness == 1).all()) else 0

    @property
    def reach(self) -> Reach | None:
        """Numbers of tokens that a query sees in the heads that see the fewest; None without a bound."""
        return (self.near or self.far).reach

    @functools.cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """Pieces of all heads."""
        return (*self.far.pieces, *self.far.ahead, *(self.near.pieces if self.near else ()))

    def __call__(self, layer: LayerCall) -> Tensor:
        """Compute the attention of one layer, ``[batch, heads, seq, head_dim]``."""
        require_float64(layer.q.device)
        if torch.compiler.is_compiling() and STEP.why_not(self, layer, None) is None:
            return STEP.run(self, layer, None)
        return self._outside(layer)

    @outside_graphs(NOT_ONE_GRAPH)
    def _outside(self, layer: LayerCall) -> Tensor:
        """Compute the attention of one layer outside of graphs."""
        layout, held = layer.mask.layout, holder_of(layer.k)
        traced: bool = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        if traced or any(isinstance(x.shape[2], torch.SymInt) for x in (layer.q, layer.k)):
            raise IncompatibleError(NOT_ONE_GRAPH)
        if layout.sees != self.far.sees:
            ways = {"past": "the past only", "both": "both ways"}
            raise IncompatibleError(
                f"Method {self.method.name!r} was applied to attention that sees {ways[self.far.sees]}, but in this "
                f"call it sees {ways[layout.sees]}. Call ctxext.unpatch(model), and patch the model as it is now."
            )
        if self.heads is not None:
            self.heads.far_groups(layer.q.device)  # before a graph, which may not keep a tensor that it makes
        engine = next((engine for engine in ENGINES if engine.why_not(self, layer, held) is None), None)
        if engine is None:
            raise IncompatibleError(PIECES.why_not(self, layer, held))
        out = engine.run(self, layer, held)
        if engine is not OWN and held is not None and self.reach is not None and self.drops:
            held.drop(layout, self.reach, self.heads)
        return out

    def turned(self, heads: HeadPieces, layer: LayerCall, layout: Layout) -> tuple[TurnedPiece, ...]:
        """Return the pieces of some heads, with rotations on the layout of their keys."""
        return heads.turned(layout, _precise(layer), form=self.form)

    def settled(
        self, pieces: tuple[TurnedPiece, ...], k: Tensor, held: HeldLayer | None, layout: Layout, *, by_kernel: bool
    ) -> tuple[Tensor, int]:
        """Return the keys of the heads that read far, and how many leading ones have their last rotation."""
        if held is None or self.far.reach is not None or self.far.ahead or (self.heads is not None and not held.near):
            return k, 0
        return held.settle(layout, pieces, by_kernel=by_kernel)


class Engine(NamedTuple):
    """A way to compute a layer, and the reason why it cannot compute one; None if it can.

    Both take the cache layer that holds the keys, or None if they are in no growing cache.
    """

    why_not: Callable[[RemapAttend, LayerCall, HeldLayer | None], str | None]
    run: Callable[[RemapAttend, LayerCall, HeldLayer | None], Tensor]


def _precise(layer: LayerCall) -> torch.dtype:
    """Return the dtype of rotations."""
    return torch.promote_types(layer.k.dtype, torch.float32)


def _why_not_own(by: RemapAttend, layer: LayerCall, held: HeldLayer | None) -> str | None:
    if not layer.mask.is_plain_before(by.exact_length):
        return f"the text has more than {by.exact_length} tokens, or a row holds several texts"
    return None if held is None or held.is_whole else "the cache dropped or rotated keys"


def _why_not_step(by: RemapAttend, layer: LayerCall, held: HeldLayer | None) -> str | None:
    if (reason := why_no_step(layer.q, layer.k)) is not None:
        return reason
    if layer.dropout or layer.mask.layout.sees != by.far.sees:
        return "attention in pieces refuses it"
    if not torch.compiler.is_compiling():
        return why_no_kernel(layer.q, by.pieces)
    cache = None if current.call is None else current.call.cache
    return None if getattr(cache, "is_compileable", True) else "a growing cache rotates and drops keys"


def _step(by: RemapAttend, layer: LayerCall, held: HeldLayer | None) -> Tensor:
    """Compute a few queries of all heads; no value is read on the host, so that a graph can hold it."""
    layout, k, few = layer.mask.layout, layer.k, None if held is None else held.near
    sinks, softcap = (layer.given.get(name) for name in ("s_aux", "softcap"))
    q = by.far.sharpened(layer.q, layout, _precise(layer))
    if by.heads is not None and q is not layer.q:
        q = torch.where(by.heads.far_heads(q), q, layer.q)
    if held is not None and few is None:
        layout = held.layout(layout)
    far = by.turned(by.far, layer, layout)
    k, settled = by.settled(far, k, held, layout, by_kernel=True)
    if by.heads is None or by.near is None:
        plan = layout.memo(f"step {by.kind}", lambda: plan_step(layout, far, q))
    elif few is None:  # all heads read the same keys
        near, many = by.turned(by.near, layer, layout), by.heads.far_groups(q.device)
        plan = layout.memo(f"step {by.kind}", lambda: plan_step(layout, far, q, few=near, many=many))
    else:
        at = few.layout(layout)
        near = by.turned(by.near, layer, at)
        plan = layout.memo(f"step of two {by.kind}", lambda: plan_split(layout, far, at, near, q))
        q, k, v, *others = as_autocast_wants(q, k, layer.v, few.keys, few.values)
        theirs = (others[0], others[1], by.heads.places(q.device))
        return attend_split(q, (k, v), theirs, plan, scale=layer.scale, softcap=softcap, settled=settled, sinks=sinks)
    call = layer.call(layout, q=q, k=k, lse=True, softcap=softcap, window=None)
    return attend_step(call, plan, settled=settled, sinks=sinks)


def _why_not_pieces(by: RemapAttend, layer: LayerCall, held: HeldLayer | None) -> str | None:
    if not layer.dropout:
        return None
    return f"Attention in pieces has no dropout, found {layer.dropout:g}. Load the model with attention_dropout=0.0."


def _in_pieces(by: RemapAttend, layer: LayerCall, held: HeldLayer | None) -> Tensor:
    """Compute the heads together that attend in the same pieces: heads that read far, then the others."""
    (q, k, v, mask), few = layer[:4], None if held is None else held.near
    layout, sinks = mask.layout.memo("analysed", lambda: _analysed(mask.layout)), layer.given.get("s_aux")
    if by.heads is None or by.near is None:
        at = layout if held is None else held.layout(layout)
        return _of_heads(by, layer, by.far, held, at, sinks)
    sides = by.heads.far, by.heads.near
    kv = [(kind.of(k), kind.of(v)) for kind in sides] if few is None else [(k, v), (few.keys, few.values)]
    at = layout if few is None else few.layout(layout)
    far, near = (
        (
            layer._replace(q=kind.of(q), k=keys, v=values),
            None if sinks is None else kind.of(sinks[None, :, None, None]).flatten(),
        )
        for kind, (keys, values) in zip(sides, kv, strict=True)
    )
    return by.heads.joined(
        _of_heads(by, far[0], by.far, held, layout, far[1]), _of_heads(by, near[0], by.near, None, at, near[1])
    )


def _of_heads(
    by: RemapAttend, layer: LayerCall, heads: HeadPieces, held: HeldLayer | None, layout: Layout, sinks: Tensor | None
) -> Tensor:
    """Compute heads that attend in the same pieces, with the layout of their keys."""
    pieces = by.turned(heads, layer, layout)
    k, settled = by.settled(pieces, layer.k, held, layout, by_kernel=False)  # before autocast, which copies keys
    q, softcap = heads.sharpened(layer.q, layout, _precise(layer)), layer.given.get("softcap")
    call = layer.call(layout, q=q, k=k, lse=True, softcap=softcap, window=None)
    backend = by.backends.for_(need_in_pieces(call, pieces))
    return attend_pieces(backend, call, pieces, settled=settled, sinks=sinks)


def _analysed(layout: Layout) -> Layout:
    """Return the layout with its spans of consecutive positions, which cheap constructors leave out.

    On a CPU, single queries of rows with little padding do without: one masked call is faster than one for each row.
    """
    if layout.spans is not None or layout.external_causality:
        return layout
    documents, rows = layout.key_documents, layout.batch
    tokens = 0 if documents is None or documents.device.type != "cpu" else int((documents >= 0).sum())
    if layout.query_length == 1 < rows and pads_little(rows, layout.key_length, tokens, layout.key_positions.device):
        return layout
    return Layout.of(layout.query_positions, layout.key_positions, layout.query_documents, documents, sees=layout.sees)


OWN = Engine(_why_not_own, lambda by, layer, held: attend_as_before(by.implementation, layer))
STEP = Engine(_why_not_step, _step)
PIECES = Engine(_why_not_pieces, _in_pieces)
ENGINES = (OWN, STEP, PIECES)


@torch.no_grad()
def _name_step(part: ExtendedPart, description: Description) -> Description:
    """Tell by which engine a step in a growing cache is computed on this model now."""
    model = part.subject.model
    by = next((attend for attend in attends_of(model).values() if isinstance(attend, RemapAttend)), None)
    if by is None:
        return description
    reason = why_no_kernel(torch.empty(1, dtype=model.dtype, device=model.device), by.pieces)
    way = "by their kernel" if reason is None else f"in pieces: {reason}"
    return replace(description, attention=f"{description.attention} (steps {way})")


register_description(_name_step)
