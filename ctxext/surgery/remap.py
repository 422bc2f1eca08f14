"""Position remapping on a live model: its own rotations are turned on, piece by piece, where attention is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer

from ctxext.attention import Call, Layout
from ctxext.attention.pieces import Turn, TurnedPiece, attend_pieces, need_in_pieces
from ctxext.errors import IncompatibleError
from ctxext.methods.remap import RemapMethod
from ctxext.spec import Band, Piece, PositionMap, RopeSpec
from ctxext.surgery.attend import (
    Backends,
    as_autocast_wants,
    attention_layers,
    decoder_of,
    install_attention,
    try_install,
    why_no_custom_attention,
)
from ctxext.surgery.bounded import BoundedLayer, Reach, reach_of
from ctxext.surgery.caches import outside_graphs
from ctxext.surgery.edits import Edits
from ctxext.surgery.generation import compile_nothing_in_generate
from ctxext.surgery.positions import LayoutMask, cache_layer_of, replace_cache_layer
from ctxext.surgery.probe import Layers
from ctxext.surgery.rebuild import FAILURES, Rebuild
from ctxext.surgery.replaced import original_code, replaced_in
from ctxext.surgery.rotary import RotaryPlace, RotarySite
from ctxext.surgery.texts import text_of

BOTH_WAYS = "its attention is not causal, and the pieces are for keys that come before their query only"

NOT_ONE_GRAPH = (
    "ctxext: attention in pieces is cut at positions that it reads from the values of position_ids, which one "
    "compiled, exported or traced graph cannot hold. Compile with fullgraph=False: the rest of each layer is compiled. "
    "torch.export with fixed lengths records a program for them alone; torch.jit.trace records none."
)

# On a layer of a cache: how many of its slots hold keys that are turned as the farthest piece has them.
SETTLED = "_ctxext_settled"


@dataclass
class RemapAttend:
    """Attention in the pieces of a method. One object serves all layers of a model.

    Args:
        method: says which pieces there are.
        spec: frequencies and trained length of the model.
        interleaved: whether neighbouring dimensions rotate together, see ``Turn``.
        backends: compute it.
    """

    method: RemapMethod
    spec: RopeSpec
    interleaved: bool
    backends: Backends

    @outside_graphs(NOT_ONE_GRAPH)
    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: LayoutMask, *, scale: float, window: int | None, dropout: float
    ) -> Tensor:
        """Attention of one layer; tensors are ``[batch, heads, seq, head_dim]``."""
        traced: bool = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        if traced or any(isinstance(size, torch.SymInt) for size in (q.shape[2], k.shape[2])):
            raise IncompatibleError(NOT_ONE_GRAPH)
        if dropout:
            raise IncompatibleError(
                f"Attention in pieces has no dropout, found {dropout:g}. Set config.attention_dropout = 0."
            )
        if mask.layout.sees != "past":
            raise IncompatibleError(
                f"Method {self.method.name!r} cannot serve this call: {BOTH_WAYS}. Unpatch the model for it."
            )
        layout = mask.layout.memo("analysed", lambda: _analysed(mask.layout))
        precise = torch.promote_types(k.dtype, torch.float32)
        pieces = layout.memo(("pieces", precise), lambda: self._pieces(layout, precise))
        # First of all: autocast gives attention a copy of what lies in the cache.
        cached = cache_layer_of(k)
        k, settled = _settle(cached, k, layout, pieces)
        q, k, v = as_autocast_wants(q, k, v)
        sharpness = layout.memo("sharpness", lambda: self.method.sharpness(self.spec, layout.query_positions))
        if sharpness is not None:
            q = (q * sharpness[:, None, :, None].to(precise)).to(q.dtype)
        call = Call.of(q, k, v, layout, scale=scale, lse=True)
        out = attend_pieces(self.backends.for_(need_in_pieces(call, pieces)), call, pieces, settled=settled)
        _drop_unseen(cached, layout, pieces)
        return out

    def notes(self) -> tuple[str, ...]:
        """What a user must know: where each distance of a text goes, and about a backend asked for by name."""
        pieces = self.method.pieces(self.spec, self.method.target_length(self.spec.trained_length))
        exact = self.method.exact_length(self.spec)
        first = (f"Texts of up to {exact:,} tokens are read as without the extension.",) if exact else ()
        reach = reach_of([piece.region for piece in pieces])
        bound = () if reach is None else (f"A cache that grows {reach}, whatever the length of the text.",)
        return (*first, *(f"Piece: {in_words(piece)}." for piece in pieces), *bound, *self.backends.notes())

    def _pieces(self, layout: Layout, precise: torch.dtype) -> tuple[TurnedPiece, ...]:
        """The method's pieces with their rotations in this precision, shared by all layers of a forward pass."""

        def turn(side: str, where: PositionMap) -> Turn | None:
            if where.changes_nothing:
                return None
            positions = layout.query_positions if side == "query" else layout.key_positions
            return layout.memo(
                ("turn", side, where, precise),
                lambda: Turn(
                    where,
                    _rows(positions),
                    layout.memo(("inv_freq", positions.device), lambda: self.inv_freq(positions.device)),
                    interleaved=self.interleaved,
                    dtype=precise,
                ),
            )

        pieces = self.method.pieces(self.spec, self.method.target_length(self.spec.trained_length))
        return tuple(
            TurnedPiece(piece.region, turn("query", piece.query), turn("key", piece.key), piece.weight)
            for piece in pieces
        )

    def inv_freq(self, device: torch.device) -> Tensor:
        """The frequencies that the model rotates by, float64, radians per token."""
        found = self.method.frequencies(self.spec, self.spec.trained_length).inv_freq
        return found.to(device)


def in_words(piece: Piece) -> str:
    """Which keys a piece is for, and where they and their queries stand."""
    if piece.query.changes_nothing and piece.key.changes_nothing:
        return f"{piece.region}, at their own positions"
    counted = "" if piece.weight == 1 else f", each key counting as {piece.weight:.4g} of one"
    return f"{piece.region}: queries at {_place('i', piece.query)}, keys at {_place('j', piece.key)}{counted}"


def _place(token: str, where: PositionMap) -> str:
    """A position map as a formula."""
    if where.scale == 0:
        return f"{where.offset:g}" if isinstance(where.offset, float | int) else "a constant"
    found = token if where.period is None else f"({token} mod {where.period})"
    if isinstance(where.group, tuple):
        return f"{found} // a group of {min(where.group)} to {max(where.group)} by frequency"
    found = found if where.group == 1 else f"{found} // {where.group}"
    found = found if where.scale == 1 else f"{where.scale:.6g} {found}"
    offset = where.offset if isinstance(where.offset, float | int) else 0
    found = found if offset == 0 else f"{found} {'+' if offset > 0 else '-'} {abs(offset):.10g}"
    return found if where.ceiling is None else f"min({found}, {where.ceiling:g})"


def _rows(positions: Tensor) -> Tensor:
    """Positions of all rows, or of one where they are known to be the same."""
    return positions[:1] if positions.stride(0) == 0 else positions


def _analysed(layout: Layout) -> Layout:
    """The layout with its blocks of consecutive positions, where it was built in a hurry."""
    if layout.spans is not None or layout.external_causality:
        return layout
    return Layout.of(layout.query_positions, layout.key_positions, layout.query_documents, layout.key_documents)


def _settle(cached: Any, k: Tensor, layout: Layout, pieces: Sequence[TurnedPiece]) -> tuple[Tensor, int]:
    """Turn keys in the cache that only the farthest piece will read from now on, once instead of at every step.

    A key begins as the model rotated it and, some steps later, is far from every query that is still to come. Then it
    is turned where it lies. The layer of the cache remembers up to which slot, whatever becomes of the keys of this
    call: a number that is left too high would count slots as turned that are filled anew. A cache that is cropped
    (assisted decoding) has near keys again among those, and they are turned back. A cache that drops keys moves slots,
    and holds few keys: there, nothing is turned in place.

    Returns:
        The keys to attend to, and how many slots of them are turned as the last piece has them.
    """
    turn = pieces[-1].key
    if turn is None or cached is None or _reach(layout, pieces) is not None:
        return k, 0
    before = int(cached.get_seq_length()) - layout.query_length  # slots that were filled before this call
    done = min(getattr(cached, SETTLED, 0), before)
    lowest = layout.memo("lowest query", lambda: _lowest_query(layout))
    wanted = _far_for_good(pieces, before, before + layout.query_length, lowest)
    if torch.is_grad_enabled() or (k.is_inference() and not torch.is_inference_mode_enabled()):
        if done:  # what lies there must stay: turn a copy back
            near = turn(k[:, :, :done], (0, k.shape[0]), (0, done), back=True)
            k = torch.cat([near, k[:, :, done:]], 2)
        setattr(cached, SETTLED, done)
        return k, 0
    start, stop = sorted((done, wanted))
    if start < stop:
        k[:, :, start:stop] = turn(k[:, :, start:stop], (0, k.shape[0]), (start, stop), back=wanted < done)
    setattr(cached, SETTLED, wanted)
    return k, wanted


def _reach(layout: Layout, pieces: Sequence[TurnedPiece]) -> Reach | None:
    """How far back queries see; None where that has no bound."""
    return layout.memo("reach", lambda: reach_of([piece.region for piece in pieces]))


def _drop_unseen(cached: Any, layout: Layout, pieces: Sequence[TurnedPiece]) -> None:
    """Let a layer of a cache that grows hold no more than what queries after those of ``layout`` can see."""
    if not isinstance(cached, DynamicLayer):
        return
    reach = _reach(layout, pieces)
    if reach is None:
        return
    if not isinstance(cached, BoundedLayer):
        whole, cached = cached, BoundedLayer(reach, cached)
        replace_cache_layer(whole, cached)
    cached.drop(layout)


def _lowest_query(layout: Layout) -> int:
    """The lowest position at which a query of any row stands; what is no token counts as position 0."""
    if layout.from_zero and layout.consecutive and layout.spans:
        return min((key[1] - key[0]) - (query[1] - query[0]) for _, query, key in layout.spans)
    positions = layout.query_positions
    if layout.query_documents is not None:
        positions = torch.where(layout.query_documents >= 0, positions, 0)
    return int(positions.min())


def _far_for_good(pieces: Sequence[TurnedPiece], first: int, stop: int, first_position: int) -> int:
    """How many slots hold keys that queries from slot ``first`` on read as the last piece turns them, or not at all.

    Args:
        pieces: of the method.
        first: slot of the first query.
        stop: slot after the last one.
        first_position: the lowest position of a query in any row; lower than ``first`` where a row is padded.
    """
    others = [piece.region for piece in pieces if piece.key is not pieces[-1].key]
    if not others:
        return stop
    bands = [region for region in others if isinstance(region, Band) and region.stop is not None]
    if len(bands) < len(others) or first_position < max(band.plain_before for band in bands):
        return 0
    # Distances are the same in slots and in positions, whatever padding a row has.
    return max(0, first - max(band.stop or 0 for band in bands) + 1)


def as_it_rotates(model: PreTrainedModel, site: RotarySite) -> RotarySite:
    """The site with the very frequencies that its module rotates by: what stays must stay to the last bit.

    A spec without frequencies stands for the powers of its base, which stock code computes in float32.
    """
    if site.spec.inv_freq is not None:
        return site
    inv_freq = getattr(Rebuild(model).rotary(site.path), f"{site.prefix}inv_freq")
    return replace(site, spec=replace(site.spec, inv_freq=tuple(inv_freq.double().tolist())))


def require_remappable(
    model: PreTrainedModel,
    method: RemapMethod,
    site: RotarySite,
    places: list[RotaryPlace],
    layers: Layers,
    *,
    is_lifted: bool,
) -> tuple[Piece, ...]:
    """The method's pieces for a model whose attention they can take the place of.

    Raises:
        IncompatibleError: if they cannot, saying why.
        InvalidParameterError: if the method's parameters do not fit the model.
    """
    text = text_of(model.config)
    refusal = f"Method {method.name!r} cannot take the place of the attention of this {text.model_type}"
    if reason := why_no_custom_attention(model, places, layers):
        raise IncompatibleError(f"{refusal}: {reason}.")
    if layers.windowed and not is_lifted:
        raise IncompatibleError(
            f"{refusal}: {len(layers.windowed)} of its {len(layers.attending)} layers look back over a sliding window, "
            f"which pieces of attention do not know. Where all layers have one, sliding_window='lift' takes it off."
        )
    return method.pieces(site.spec, method.target_length(site.spec.trained_length))


def install_pieces(
    model: PreTrainedModel, method: RemapMethod, site: RotarySite, rebuild: Rebuild, backend: str, edits: Edits
) -> RemapAttend:
    """Let every attention layer of an extended model attend in the pieces of ``method``.

    Raises:
        IncompatibleError: if its layers do not ask for attention as ctxext gives it, or rotate in an unknown way.
    """
    refusal = f"Method {method.name!r} cannot take the place of the attention of this {rebuild.text.model_type}"
    tried = try_install(rebuild, site)
    if tried.failure or tried.sees_both_ways:
        raise IncompatibleError(f"{refusal}: {tried.failure or BOTH_WAYS}.")
    if tried.crossing:
        raise IncompatibleError(f"{refusal}: its layers attend to an encoder's text too, where no distance is.")
    attend = RemapAttend(method, site.spec, False, Backends(backend))
    attend.interleaved = _is_interleaved(model, site, attend, refusal)
    install_attention(model, site, attend, edits)
    compile_nothing_in_generate(model, edits)
    return attend


class _Seen(Exception):
    """Ends a forward pass whose first queries have been seen."""

    def __init__(self, queries: Tensor) -> None:
        super().__init__()
        self.queries = queries


def _show_queries(q: Tensor, k: Tensor, v: Tensor, mask: LayoutMask, **_: Any) -> Tensor:
    """Stands in for the attention of the first layer: hands its queries out."""
    raise _Seen(q.detach())


FAR = 5  # a token at which even the slow frequencies have begun to turn, and the fast ones have turned more than half


def _is_interleaved(model: PreTrainedModel, site: RotarySite, attend: RemapAttend, refusal: str) -> bool:
    """Which dimensions rotate together, seen on the queries of one token at two positions, in the model's first layer.

    Raises:
        IncompatibleError: if they are no rotation by the model's frequencies of each other.
    """
    decoder = decoder_of(model, site)
    # Offloaded, sharded, a dry run; or not yet moved to the device that another program's kernels are for.
    out_of_reach = any(weight.is_meta or not weight.numel() for weight in decoder.parameters())
    if out_of_reach or replaced_in(type(attention_layers(decoder)[0]).__module__):
        queries = _rotated_by_code(model, site, refusal)
    else:
        with Edits() as trial:
            install_attention(model, site, _show_queries, trial)
            queries = _queries_of(decoder, next(decoder.parameters()).device)
            trial.undo()
    queries = queries.double().cpu()
    still, moved = queries[:, :, :1], queries[:, :, 1:]
    start = torch.zeros(1, 1, dtype=torch.long)
    errors = {}
    for interleaved in (False, True):
        inv_freq = attend.inv_freq(still.device)
        moving = Turn(PositionMap(offset=float(FAR)), start, inv_freq, interleaved=interleaved, dtype=torch.float64)
        errors[interleaved] = float((moving(still, (0, 1), (0, 1)) - moved).norm() / still.norm())
    best = min(errors, key=lambda way: errors[way])
    if not errors[best] < ROTATION_ERROR:
        raise IncompatibleError(
            f"{refusal}: the queries of one token at two positions are not rotated into each other, neither in halves "
            f"nor in pairs (they differ by {errors[best]:.2g} of their size), so its positions cannot be changed where "
            f"attention is computed."
        )
    return best


def _rotated_by_code(model: PreTrainedModel, site: RotarySite, refusal: str) -> Tensor:
    """What the function by which nearly all of transformers rotates makes of one vector at positions 0 and ``FAR``.

    For models whose weights are not at hand, or whose code another program replaced by kernels.

    Raises:
        IncompatibleError: if the model's code has no such function.
    """
    layer = attention_layers(decoder_of(model, site))[0]
    rotate = original_code(type(layer).__module__).get("apply_rotary_pos_emb")
    vector = torch.randn(site.spec.rotary_dim, generator=torch.Generator().manual_seed(0)).expand(1, 1, 2, -1)
    try:
        with torch.device("cpu"), torch.no_grad():
            cos, sin = Rebuild(model).rotary(site.path)(torch.zeros(1, 2, 1), torch.tensor([[0, FAR]]))
            found: Tensor = rotate(vector, vector, cos, sin)[0]  # type: ignore[misc]
    except FAILURES as error:
        raise IncompatibleError(
            f"{refusal}: how it rotates can only be seen with its weights at hand, and some of them are offloaded, "
            f"sharded or not loaded. Patch the model before that. ({type(error).__name__}: {error})"
        ) from error
    return found


ROTATION_ERROR = 0.05  # bfloat16 rounds by less than 0.01; a wrong layout is off by about 1


def _queries_of(decoder: nn.Module, device: torch.device) -> Tensor:
    """Queries of the first layer for one token at positions 0 and ``FAR``: ``[1, heads, 2, head_dim]``."""
    tokens = torch.ones(1, 2, dtype=torch.long, device=device)
    places = torch.tensor([[0, FAR]], device=device)
    try:
        with torch.no_grad():
            decoder(input_ids=tokens, position_ids=places, use_cache=False)
    except _Seen as seen:
        return seen.queries
    raise IncompatibleError(f"{type(decoder).__name__} ran without asking for attention.")
