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
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ctxext.attention.attend import Backends, as_autocast_wants, attend_as_before
from ctxext.attention.remap import HeadPieces
from ctxext.caches.call import current, holder_of
from ctxext.caches.held import HeldLayer, Reach
from ctxext.caches.layout_mask import LayoutMask
from ctxext.caches.paged_batch import pads_little
from ctxext.caches.records import outside_graphs
from ctxext.errors import IncompatibleError
from ctxext.kernels import Call, Layout
from ctxext.kernels.groups import SplitGroups
from ctxext.kernels.pieces import RotationForm, TurnedPiece, attend_pieces, need_in_pieces
from ctxext.kernels.step import attend_split, attend_step, plan_split, plan_step, why_no_kernel, why_no_step
from ctxext.methods.remap import Piece, RemapMethod

NOT_ONE_GRAPH = (
    "ctxext: attention in pieces reads the values of position_ids, which one compiled, exported or traced graph cannot "
    "do; a step of up to 8 tokens on a static cache can. Compile with fullgraph=False: the rest of each layer is "
    "compiled. Use torch.export with fixed lengths only; torch.jit.trace does not work."
)


@dataclass(frozen=True, kw_only=True)
class RemapAttend:
    """Attention of a layer in the pieces of a method.

    Args:
        far: Pieces of the heads: of all, or of those that read far.
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
        """Numbers of tokens that a query of the heads with the smallest ones sees; None if there is no bound."""
        return (self.near or self.far).reach

    @functools.cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """Pieces of all heads."""
        return (*self.far.pieces, *self.far.ahead, *(self.near.pieces if self.near else ()))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: LayoutMask, **how: Any) -> Tensor:
        """Compute the attention of one layer; tensors are ``[batch, heads, seq, head_dim]``."""
        how.pop("window")
        reading = Reading(self, q, k, v, mask, **how)
        if torch.compiler.is_compiling() and STEP.why_not(reading) is None:
            return STEP.run(reading)
        return self._outside(reading)

    @outside_graphs(NOT_ONE_GRAPH)
    def _outside(self, reading: Reading) -> Tensor:
        """Compute the attention of one layer outside of graphs."""
        layout = reading.mask.layout
        traced: bool = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        if traced or any(isinstance(x.shape[2], torch.SymInt) for x in (reading.q, reading.k)):
            raise IncompatibleError(NOT_ONE_GRAPH)
        if layout.sees != self.far.sees:
            ways = {"past": "the past only", "both": "both ways"}
            raise IncompatibleError(
                f"Method {self.method.name!r} was applied to attention that sees {ways[self.far.sees]}, but in this "
                f"call it sees {ways[layout.sees]}. Call ctxext.unpatch(model), and patch the model as it is now."
            )
        if self.heads is not None:
            self.heads.far_groups(reading.q.device)  # before a graph, which may not keep what it makes
        reading = reading._replace(held=holder_of(reading.k))
        for engine in ENGINES:
            if engine.why_not(reading) is None:
                break
        else:
            raise IncompatibleError(
                f"Attention in pieces has no dropout, found {reading.dropout:g}. Set config.attention_dropout = 0."
            )
        out = engine.run(reading)
        if engine is not OWN and reading.held is not None and self.reach is not None and self.drops:
            reading.held.drop(layout, self.reach, self.heads)
        return out


class Reading(NamedTuple):
    """One call of a remapped layer, with queries and keys as the model rotated them.

    Args:
        held: the cache layer that holds the keys; None if these are in no growing cache.
        given: arguments of the layer's attention function.
    """

    by: RemapAttend
    q: Tensor
    k: Tensor
    v: Tensor
    mask: LayoutMask
    scale: float
    dropout: float
    module: nn.Module
    given: dict[str, Any]
    held: HeldLayer | None = None

    @property
    def precise(self) -> torch.dtype:
        """Dtype of rotations."""
        return torch.promote_types(self.k.dtype, torch.float32)

    @property
    def few(self) -> HeldLayer | None:
        """The cache layer of the heads that do not read far, once these have one of their own."""
        return None if self.held is None else self.held.near

    def turned(self, heads: HeadPieces, layout: Layout) -> tuple[TurnedPiece, ...]:
        """Return the pieces of some heads, with rotations on the layout of their keys."""
        return heads.turned(layout, self.precise, form=self.by.form)

    def settled(self, pieces: tuple[TurnedPiece, ...], layout: Layout, *, by_kernel: bool) -> tuple[Tensor, int]:
        """Return the cached keys of the heads that read far, and how many leading ones have their last rotation."""
        by, held = self.by, self.held
        if held is None or by.far.reach is not None or by.far.ahead or (by.heads is not None and held.near is None):
            return self.k, 0
        return held.settle(layout, pieces, by_kernel=by_kernel)

    def call(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Call:
        """Return the call of a kernel, with tensors as autocast wants them."""
        q, k, v = as_autocast_wants(q, k, v)
        return Call.of(q, k, v, layout, lse=True, scale=self.scale, softcap=self.given.get("softcap"))


class Engine(NamedTuple):
    """A way to compute a reading, and the reason why it cannot compute one; None if it can."""

    why_not: Callable[[Reading], str | None]
    run: Callable[[Reading], Tensor]


def _why_not_own(reading: Reading) -> str | None:
    if not reading.mask.is_plain_before(reading.by.exact_length):
        return f"the text has more than {reading.by.exact_length} tokens, or a row holds several texts"
    return None if reading.held is None or reading.held.is_whole else "the cache dropped or rotated keys"


def _own(reading: Reading) -> Tensor:
    """Compute attention by the model's own function."""
    by, q, k, v, mask, *_ = reading
    return attend_as_before(by.implementation, reading.module, q, k, v, mask, reading.given)


def _why_not_step(reading: Reading) -> str | None:
    if (reason := why_no_step(reading.q, reading.k)) is not None:
        return reason
    if not torch.compiler.is_compiling():
        return why_no_kernel(reading.q, reading.by.pieces)
    if reading.dropout or reading.mask.layout.sees != reading.by.far.sees:
        return "it is refused, outside of the graph"
    cache = None if current.call is None else current.call.cache
    return None if getattr(cache, "is_compileable", True) else "a growing cache rotates and drops keys"


def _step(reading: Reading) -> Tensor:
    """Compute a few queries of all heads; no value is read on the host, so that a graph can hold it."""
    by, layout, few, v = reading.by, reading.mask.layout, reading.few, reading.v
    sinks, q = reading.given.get("s_aux"), by.far.sharpened(reading.q, layout, reading.precise)
    if by.heads is not None and q is not reading.q:
        q = torch.where(by.heads.far_heads(q), q, reading.q)
    if reading.held is not None and few is None:
        layout = reading.held.layout(layout)
    far = reading.turned(by.far, layout)
    k, settled = reading.settled(far, layout, by_kernel=True)
    if by.heads is None or by.near is None:
        plan = layout.memo(f"step {by.kind}", lambda: plan_step(layout, far, q))
    elif few is None:  # all heads read the same keys
        near, many = reading.turned(by.near, layout), by.heads.far_groups(q.device)
        plan = layout.memo(f"step {by.kind}", lambda: plan_step(layout, far, q, few=near, many=many))
    else:
        at = few.layout(layout)
        near = reading.turned(by.near, at)
        plan = layout.memo(f"step of two {by.kind}", lambda: plan_split(layout, far, at, near, q))
        q, k, v, *others = as_autocast_wants(q, k, v, few.keys, few.values)
        theirs = (others[0], others[1], by.heads.places(q.device))
        how: dict[str, Any] = {"scale": reading.scale, "softcap": reading.given.get("softcap"), "sinks": sinks}
        return attend_split(q, (k, v), theirs, plan, settled=settled, **how)
    return attend_step(reading.call(q, k, v, layout), plan, settled=settled, sinks=sinks)


def _in_pieces(reading: Reading) -> Tensor:
    """Compute heads that attend in the same pieces together, and those that read far and the others apart."""
    by, (q, k, v), few = reading.by, reading[1:4], reading.few
    layout = reading.mask.layout.memo("analysed", lambda: _analysed(reading.mask.layout))
    sinks = reading.given.get("s_aux")
    if by.heads is None or by.near is None:
        at = layout if reading.held is None else reading.held.layout(layout)
        return _of_heads(reading, by.far, (q, k, v), at, sinks)
    sides = by.heads.far, by.heads.near
    if few is None:
        kv, at = [(kind.of(k), kind.of(v)) for kind in sides], layout
    else:
        kv, at = [(k, v), (few.keys, few.values)], few.layout(layout)
    own = [None if sinks is None else kind.of(sinks[None, :, None, None]).flatten() for kind in sides]
    return by.heads.joined(
        _of_heads(reading, by.far, (sides[0].of(q), *kv[0]), layout, own[0]),
        _of_heads(reading, by.near, (sides[1].of(q), *kv[1]), at, own[1]),
    )


def _of_heads(
    reading: Reading, heads: HeadPieces, qkv: tuple[Tensor, Tensor, Tensor], layout: Layout, sinks: Tensor | None
) -> Tensor:
    """Compute heads that attend in the same pieces, with the layout of their keys."""
    (q, k, v), pieces, settled = qkv, reading.turned(heads, layout), 0
    if heads is reading.by.far and k is reading.k:  # before autocast, which copies keys
        k, settled = reading.settled(pieces, layout, by_kernel=False)
    call = reading.call(heads.sharpened(q, layout, reading.precise), k, v, layout)
    backend = reading.by.backends.for_(need_in_pieces(call, pieces))
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
    analysed = Layout.of(layout.query_positions, layout.key_positions, layout.query_documents, layout.key_documents)
    return replace(analysed, sees=layout.sees)


OWN = Engine(_why_not_own, _own)
STEP = Engine(_why_not_step, _step)
PIECES = Engine(lambda reading: "it has no dropout" if reading.dropout else None, _in_pieces)
ENGINES = (OWN, STEP, PIECES)
