"""Remap positions on a live model: rotate its queries and keys further, piece by piece, inside attention."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer

from ctxext.attention.attend import Backends, as_autocast_wants, attend_as_before
from ctxext.caches.bounded import SETTLED, BoundedLayer, Reach, SplitLayer, is_worth_dropping, reach_of
from ctxext.caches.call import cache_layer_of, change_later, current, replace_cache_layer
from ctxext.caches.layout_mask import LayoutMask
from ctxext.caches.paged_batch import pads_little
from ctxext.caches.records import outside_graphs
from ctxext.errors import IncompatibleError
from ctxext.kernels import Call, Layout
from ctxext.kernels.pieces import RotationForm, Turn, TurnedPiece, attend_pieces, need_in_pieces
from ctxext.kernels.step import StepPlan, attend_step, plan_step, takes_kernel, takes_step
from ctxext.methods.remap import Band, Piece, PositionMap, RemapMethod
from ctxext.spec import PIECE, RopeSpec

NOT_ONE_GRAPH = (
    "ctxext: attention in pieces reads the values of position_ids, which one compiled, exported or traced graph cannot "
    "do; a step of up to 8 tokens on a static cache can. Compile with fullgraph=False: the rest of each layer is "
    "compiled. Use torch.export with fixed lengths only; torch.jit.trace does not work."
)


@dataclass(frozen=True, eq=False)
class HeadPieces:
    """The pieces in which some heads attend; all layers of a model share the object.

    Args:
        pieces: the pieces of keys at or before their query, as the method has them.
        ahead: the pieces of keys after their query; none if tokens see the past only.
    """

    method: RemapMethod
    spec: RopeSpec
    pieces: tuple[Piece, ...]
    ahead: tuple[Piece, ...] = ()
    _inv_freq: dict[torch.device, Tensor] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, method: RemapMethod, spec: RopeSpec, *, both_ways: bool = False) -> HeadPieces:
        """Return the pieces of a method for texts of its target length, whose tokens may see ``both_ways``."""
        pieces = method.pieces(spec, method.target_length(spec.trained_length))
        ahead = (piece.ahead for piece in pieces if both_ways)
        return cls(method, spec, pieces, tuple(piece for piece in ahead if piece is not None))

    @property
    def sees(self) -> str:
        """``"past"``, or ``"both"`` if tokens see later tokens as well, as in ``Layout``."""
        return "both" if self.ahead else "past"

    @functools.cached_property
    def reach(self) -> Reach | None:
        """Numbers of tokens that a query sees; None if there is no bound, or later tokens are seen too."""
        return None if self.ahead else reach_of([piece.region for piece in self.pieces])

    def turned(self, layout: Layout, precise: torch.dtype, *, form: RotationForm) -> tuple[TurnedPiece, ...]:
        """Return the pieces with rotations in this precision, shared by all layers of a forward pass."""

        def turn(side: str, where: PositionMap) -> Turn | None:
            if where.changes_nothing:
                return None
            positions = layout.query_positions if side == "query" else layout.key_positions
            return layout.memo(
                ("turn", side, where, precise),
                lambda: Turn(
                    where,
                    positions[:1] if positions.stride(0) == 0 else positions,  # all rows are equal then
                    self.inv_freq(positions.device),
                    form=form,
                    dtype=precise,
                ),
            )

        def build() -> tuple[TurnedPiece, ...]:
            return tuple(
                TurnedPiece(piece.region, turn("query", piece.query), turn("key", piece.key), piece.weight)
                for piece in (*self.pieces, *self.ahead)
            )

        return layout.memo(("pieces", self, precise), build)

    def sharpened(self, q: Tensor, layout: Layout, precise: torch.dtype) -> Tensor:
        """Return queries with the temperature of the method; all tokens of an encoder's text have that of the last."""

        def positions() -> Tensor:
            return _last_positions(layout) if self.ahead else layout.query_positions

        sharpness = layout.memo(("sharpness", self), lambda: self.method.sharpness(self.spec, positions()))
        return q if sharpness is None else (q * sharpness[:, None, :, None].to(precise)).to(q.dtype)

    def notes(self, whose: str = "", *, drops: bool = True) -> tuple[str, ...]:
        """Return the notes for a user: the positions of each piece, and the bound of a cache that drops keys."""
        held = f"The cache{whose} holds {self.reach}; the paged cache of generate_batch() holds all tokens."
        bound = () if self.reach is None or not drops else (held,)
        ahead = ("Tokens see both ways: keys ahead of a query lie as far from it as they would behind.",)
        return (
            *(f"{PIECE}{whose}: {in_words(piece)}." for piece in self.pieces),
            *bound,
            *(ahead if self.ahead else ()),
        )

    def inv_freq(self, device: torch.device) -> Tensor:
        """Return the frequencies that the model rotates by, float64, in radians per token."""
        if device not in self._inv_freq:
            frequencies = self.method.frequencies(self.spec, self.spec.trained_length).inv_freq.to(device)
            if torch.compiler.is_compiling():
                return frequencies
            self._inv_freq[device] = frequencies
        return self._inv_freq[device]


@dataclass(frozen=True, kw_only=True)
class RemapAttend:
    """Attention of a layer in the pieces of a method.

    Queries before ``exact_length`` are left to the model's own attention.

    Args:
        far: Pieces of the heads: of all, or in a ``SplitAttend`` of those that read far.
        drops: True if keys out of sight are dropped from the cache after a call; False where the layer calls again.
        kind: Name that the layers share whose heads attend alike.
    """

    method: RemapMethod
    far: HeadPieces
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

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: LayoutMask, **how: Any) -> Tensor:
        """Compute the attention of one layer; tensors are ``[batch, heads, seq, head_dim]``."""
        if torch.compiler.is_compiling() and takes_step(q, k):
            is_usual = not how["dropout"] and mask.layout.sees == self.far.sees  # else refused outside of the graph
            cache = None if current.call is None else current.call.cache
            if is_usual and getattr(cache, "is_compileable", True):  # a growing one turns and drops keys
                more = {"softcap": how["given"].get("softcap"), "sinks": how["given"].get("s_aux")}
                return self._step(q, k, v, mask.layout, scale=how["scale"], **more)
        return self._outside(q, k, v, mask, **how)

    def _step(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, *, sinks: Tensor | None, **how: Any) -> Tensor:
        """Compute a few queries of all heads under one softmax, from keys that the model rotated.

        No value is read on the host, so that a graph can hold it.
        """
        precise = torch.promote_types(k.dtype, torch.float32)
        plan = layout.memo(f"step {self.kind}", lambda: self._plan(q, layout, precise))
        q, k, v = as_autocast_wants(self._sharpened(q, layout, precise), k, v)
        call = Call.of(q, k, v, layout, lse=True, **how)
        return attend_step(call, plan, sinks=sinks)

    def _sharpened(self, q: Tensor, layout: Layout, precise: torch.dtype) -> Tensor:
        """Return the queries of all heads, with the temperature of the method."""
        return self.far.sharpened(q, layout, precise)

    def _takes_kernel(self, q: Tensor, k: Tensor) -> bool:
        """Return whether the kernel of a step computes a call, for which no key is rotated in the cache."""
        return takes_step(q, k) and takes_kernel(q, self._all_pieces)

    @property
    def _all_pieces(self) -> tuple[Piece, ...]:
        """Pieces of all heads."""
        return (*self.far.pieces, *self.far.ahead)

    @property
    def reach(self) -> Reach | None:
        """Numbers of tokens that a query of the heads with the smallest ones sees; None if there is no bound."""
        return self.far.reach

    def _plan(self, q: Tensor, layout: Layout, precise: torch.dtype) -> StepPlan:
        """Return the plan of a step of a layer."""
        return plan_step(layout, self.far.turned(layout, precise, form=self.form), q)

    @outside_graphs(NOT_ONE_GRAPH)
    def _outside(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: LayoutMask,
        *,
        scale: float,
        window: int | None,
        dropout: float,
        module: nn.Module,
        given: dict[str, Any],
    ) -> Tensor:
        """Compute the attention of one layer outside of graphs."""
        traced: bool = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        if traced or any(isinstance(size, torch.SymInt) for size in (q.shape[2], k.shape[2])):
            raise IncompatibleError(NOT_ONE_GRAPH)
        if mask.layout.sees != self.far.sees:
            ways = {"past": "the past only", "both": "both ways"}
            raise IncompatibleError(
                f"Method {self.method.name!r} was applied to attention that sees {ways[self.far.sees]}, but in this "
                f"call it sees {ways[mask.layout.sees]}. Call ctxext.unpatch(model), and patch the model as it is now."
            )
        cached = cache_layer_of(k)
        # Short texts take the model's own attention, bit for bit, unless a longer one left keys in the cache that were
        # dropped, or rotated further.
        is_plain = mask.is_plain_before(self.exact_length) and _holds_all(cached)
        if is_plain and not settled_before(cached, mask.layout):
            return attend_as_before(self.implementation, module, q, k, v, mask, given)
        if dropout:
            raise IncompatibleError(
                f"Attention in pieces has no dropout, found {dropout:g}. Set config.attention_dropout = 0."
            )
        how: dict[str, Any] = {"scale": scale, "softcap": given.get("softcap"), "sinks": given.get("s_aux")}
        by_kernel = self._takes_kernel(q, k)
        layout = mask.layout if by_kernel else mask.layout.memo("analysed", lambda: _analysed(mask.layout))
        out = self._all_heads(q, k, v, layout, cached, by_kernel=by_kernel, **how)
        if cached is None:
            # The keys are not in a known cache layer yet. If the decoder puts them into one, drop keys there after its
            # call.
            change_later(k, functools.partial(self._drop_unseen, layout=layout))
        self._drop_unseen(cached, layout)
        return out

    def _all_heads(
        self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, cached: Any, *, by_kernel: bool, **how: Any
    ) -> Tensor:
        """Compute all heads of a layer; ``cached`` is its cache layer, if it has one."""
        return self._attend(self.far, q, k, v, layout, cached, by_kernel=by_kernel, **how)

    def _attend(
        self,
        heads: HeadPieces,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: Layout,
        cached: Any,
        *,
        by_kernel: bool,
        sinks: Tensor | None,
        **how: Any,
    ) -> Tensor:
        """Compute heads that attend in the same pieces; ``layout`` is that of all keys of the text."""
        if isinstance(cached, BoundedLayer):
            layout = cached.held(layout)
        precise = torch.promote_types(k.dtype, torch.float32)
        pieces = heads.turned(layout, precise, form=self.form)
        if by_kernel:  # it rotates keys as it reads them
            k, settled = settled_for_kernel(cached, k, layout, pieces)
        else:  # settle before autocast, which hands a copy of the cached keys to attention; keys seen ahead never are
            k, settled = _settle(cached, k, layout, pieces) if heads.reach is None and not heads.ahead else (k, 0)
        q, k, v = as_autocast_wants(heads.sharpened(q, layout, precise), k, v)
        call = Call.of(q, k, v, layout, lse=True, **how)
        if by_kernel:
            plan = layout.memo(("step", heads), lambda: plan_step(layout, pieces, q))
            return attend_step(call, plan, settled=settled, sinks=sinks)
        backend = self.backends.for_(need_in_pieces(call, pieces))
        return attend_pieces(backend, call, pieces, settled=settled, sinks=sinks)

    def _drop_unseen(self, cached: Any, layout: Layout) -> None:
        """Drop keys of a growing cache layer that no query after those of ``layout`` can see."""
        reach = self.reach
        if reach is None or not self.drops or not isinstance(cached, DynamicLayer):
            return
        if not _holds_all(cached):
            cached.drop(layout)
        elif is_worth_dropping(reach, layout, layout.key_length):
            layer = self._dropping(reach, cached)
            layer.drop(layout)
            replace_cache_layer(cached, layer)

    def _dropping(self, reach: Reach, cached: DynamicLayer) -> BoundedLayer | SplitLayer:
        """Return the layer of a cache that takes the place of one with the keys of all tokens."""
        return BoundedLayer(reach, cached)


def in_words(piece: Piece) -> str:
    """Describe the keys of a piece, and the positions of these keys and their queries."""
    if piece.query.changes_nothing and piece.key.changes_nothing:
        return f"{piece.region}, at their own positions"
    counted = "" if piece.weight == 1 else f", each key counting as {piece.weight:.4g} of one"
    return f"{piece.region}: queries at {_place('i', piece.query)}, keys at {_place('j', piece.key)}{counted}"


def _place(token: str, where: PositionMap) -> str:
    """Write a position map as a formula."""
    if where.scale == 0:
        return f"{where.offset:g}" if isinstance(where.offset, float | int) else "a constant"
    formula = token if where.period is None else f"({token} mod {where.period})"
    if isinstance(where.group, tuple):
        return f"{formula} // a group of {min(where.group)} to {max(where.group)} by frequency"
    formula = formula if where.group == 1 else f"{formula} // {where.group}"
    formula = formula if where.scale == 1 else f"{where.scale:.6g} {formula}"
    offset = where.offset if isinstance(where.offset, float | int) else 0
    formula = formula if offset == 0 else f"{formula} {'+' if offset > 0 else '-'} {abs(offset):.10g}"
    return formula if where.ceiling is None else f"min({formula}, {where.ceiling:g})"


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


def _last_positions(layout: Layout) -> Tensor:
    """Return the position of the last token of each query's document, ``[batch, query]``."""
    if layout.query_documents is None or layout.key_documents is None:
        return layout.key_positions.amax(1, keepdim=True).expand_as(layout.query_positions)
    documents = layout.key_documents.clamp(min=0)
    tokens = torch.where(layout.key_documents >= 0, layout.key_positions, 0)
    last = tokens.new_zeros(layout.batch, int(documents.max()) + 1).scatter_reduce(1, documents, tokens, "amax")
    return last.gather(1, layout.query_documents.clamp(min=0))


def _settle(cached: Any, k: Tensor, layout: Layout, pieces: Sequence[TurnedPiece]) -> tuple[Tensor, int]:
    """Rotate cached keys in place, once, when only the farthest piece will read them from now on.

    The model caches a key with its own rotation. After some steps the key is far from every query that is still to
    come; it is settled then: its rotation for the last piece is written into the cache. Without that, every step
    would rotate all far keys again. The cache layer records the number of settled slots, and the record is updated even
    if a later part of the call fails: a number that is too high would count slots as settled that are filled again.
    A cropped cache (assisted decoding) brings near keys back, and these are rotated back. A cache that drops keys moves
    slots and holds few of them, so nothing is settled there.

    Returns:
        The keys to attend to, and the number of settled slots among them.
    """
    turn = pieces[-1].key
    if turn is None or not isinstance(cached, DynamicLayer):  # a graph may go on with a static one
        return k, 0
    done, now = settled_before(cached, layout), int(cached.get_seq_length()) - layout.query_length
    first = layout.memo("first query", lambda: _first_query(layout))
    wanted = _far_for_good(pieces, int(cached.get_seq_length()), *first)
    if torch.is_grad_enabled() or (k.is_inference() and not torch.is_inference_mode_enabled()):
        if done:  # the cached keys must not change: rotate a copy back
            near = turn(k[:, :, :done], (0, k.shape[0]), (0, done), back=True)
            k = torch.cat([near, k[:, :, done:]], 2)
        return k, 0
    start, stop = sorted((done, wanted))
    if start < stop:
        k[:, :, start:stop] = turn(k[:, :, start:stop], (0, k.shape[0]), (start, stop), back=wanted < done)
    setattr(cached, SETTLED, (wanted, now))
    return k, wanted


def settled_for_kernel(cached: Any, k: Tensor, layout: Layout, pieces: Sequence[TurnedPiece]) -> tuple[Tensor, int]:
    """Return the keys for the kernel of a step, and the number of settled slots among them.

    The kernel settles nothing, but a cache that was cropped past the call that did may have settled near keys.
    """
    settled = 0 if cached is None else settled_before(cached, layout)
    if settled and int(cached.get_seq_length()) - layout.query_length < getattr(cached, SETTLED)[1]:
        return _settle(cached, k, layout, pieces)
    return k, settled


def _holds_all(cached: Any) -> bool:
    """Return whether a cache layer, or None, gave attention the keys of all heads and of all tokens."""
    if isinstance(cached, SplitLayer):
        return cached.near is None
    return not isinstance(cached, BoundedLayer) or cached.first_slots is None


def settled_before(cached: Any, layout: Layout) -> int:
    """Return the number of settled slots that were filled before this call, and record it: the cache may be cropped."""
    settled, first = getattr(cached, SETTLED, (0, 0))
    if settled:
        settled = min(settled, int(cached.get_seq_length()) - layout.query_length)
        setattr(cached, SETTLED, (settled, first))
    return settled


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
