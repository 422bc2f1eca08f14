"""Remap positions on a live model: rotate its queries and keys further, piece by piece, inside attention."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ctxext.caches.held import Reach, reach_of
from ctxext.kernels import Layout
from ctxext.kernels.pieces import RotationForm, Turn, TurnedPiece
from ctxext.methods.remap import Piece, PositionMap, RemapMethod
from ctxext.spec import PIECE, RopeSpec


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
        """Numbers of tokens that a query sees; None without a bound, or if later tokens are seen too."""
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
        """Return queries with the temperature of the method; all tokens of an encoder's text share the last one's."""

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


def _last_positions(layout: Layout) -> Tensor:
    """Return the position of the last token of each query's document, ``[batch, query]``."""
    if layout.query_documents is None or layout.key_documents is None:
        return layout.key_positions.amax(1, keepdim=True).expand_as(layout.query_positions)
    documents = layout.key_documents.clamp(min=0)
    tokens = torch.where(layout.key_documents >= 0, layout.key_positions, 0)
    last = tokens.new_zeros(layout.batch, int(documents.max()) + 1).scatter_reduce(1, documents, tokens, "amax")
    return last.gather(1, layout.query_documents.clamp(min=0))
