"""The matrix of relative positions that a method gives a text, as a picture: queries down, keys across."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ctxext.errors import IncompatibleError
from ctxext.evaluation.report.figures import NOTE, Panel
from ctxext.laboratory.pictures.picture import DEEPER, Picture, heat
from ctxext.laboratory.pictures.request import PictureRequest
from ctxext.measuring.readings import name_for
from ctxext.methods import METHODS, Method
from ctxext.methods.remap import Band, Chunks, Piece, Region, RemapMethod
from ctxext.spec import RopeSpec

UNTRAINED, DROPPED = "#C0392B", "#E8E8E8"
TOKENS = 16  # trained length of an example: the cells of its matrix hold their numbers
CELLS = 480  # of a picture, along each side: more are not told apart
NUMBERED = 36  # tokens up to which cells are large enough to hold their number, as the papers print them
COLUMNS = 3
FEW = 128  # tokens of a text, evenly spaced, that numbers for programs are of


def positions_asked(method: Method | None, request: PictureRequest) -> Picture | None:
    """Return the picture of a method that remaps positions; None for another method."""
    return positions_picture([method], request.rope(TOKENS)) if isinstance(method, RemapMethod) else None


def positions_picture(methods: Sequence[Method], rope: RopeSpec) -> Picture:
    """Draw the relative positions of a model as it is, and of methods that remap its positions.

    Raises:
        IncompatibleError: for a method that leaves every token at its position.
        InvalidParameterError: for one that does not fit the trained length or cannot reach its target.
    """
    lengths, trained = [method.target_length(rope.trained_length) for method in methods], rope.trained_length
    # The plain panel is as long as the longest text, so that it compares with every method's.
    shown: list[tuple[str, Sequence[Piece], int]] = [("as it is", (Piece(region=Band()),), max(lengths))]
    for method, length in zip(methods, lengths, strict=True):
        if not isinstance(method, RemapMethod):
            remaps = [name for name, cls in METHODS.items() if issubclass(cls, RemapMethod)]
            raise IncompatibleError(
                f"Method {method.name!r} leaves every token at its own position and changes what a position means. "
                f"See `ctxext plot frequencies`. Methods to draw here: {', '.join(remaps)}."
            )
        shown.append((name_for(method), method.pieces(rope, length), length))
    numbers = []
    for name, pieces, length in shown:
        positions, places = relative_positions(pieces, length, cells=FEW)
        numbers.append({"name": name, "length": length, "tokens": places, "positions": positions})
    sentence = "How far each key stands from each query"
    if len(shown) == 2:
        name, pieces, length = shown[1]
        most = f"{farthest(pieces, length):,.6g}"
        sentence = f"{name}: at {length:,} tokens no key stands farther than {most} back; trained were {trained:,}"
    return Picture(
        kind="positions",
        sentence=sentence,
        caption="Queries down, keys across: the relative position that rotation sees, as it is and as the method has "
        "it.",
        values={"trained_length": trained, "panels": numbers},
        panels=[_panel(*one, trained, panels=len(shown) if one is shown[-1] else 0) for one in shown],
        across=min(COLUMNS, len(shown)),
    )


def relative_positions(
    pieces: Sequence[Piece], length: int, cells: int = CELLS
) -> tuple[Float[Tensor, "query key"], list[int]]:
    """Compute relative positions of a text of ``length`` tokens, of at most ``cells`` evenly spaced ones.

    Where frequencies have different positions, the slowest frequency's is given.

    Returns:
        ``[query, key]``, not a number where a query does not see a key, and which tokens these are.
    """
    count = min(cells, length)
    places = torch.linspace(0, length - 1, count, dtype=torch.float64).round().long()
    positions = torch.full((count, count), torch.nan, dtype=torch.float64)
    for piece in pieces:
        query, key = (side(places).reshape(count, -1)[:, -1] for side in (piece.query, piece.key))
        here = piece.region.holds(places[:, None], places[None])
        positions = torch.where(here, query[:, None] - key[None], positions)
    return positions, places.tolist()


def farthest(pieces: Sequence[Piece], length: int) -> float:
    """Return the largest relative position in a text of ``length`` tokens, of all pairs and not of some.

    Positions of keys rise inside each part of a region, so a query's farthest key is the first one of a part.
    """
    queries = torch.arange(length)
    largest = 0.0
    for piece in pieces:
        at = piece.query(queries).reshape(length, -1)[:, -1]
        for first in _first_keys(piece.region, queries):
            keys = first.clamp(min=0)
            seen = piece.region.holds(queries, keys) & (keys <= queries)
            if bool(seen.any()):
                apart = at - piece.key(keys).reshape(length, -1)[:, -1]
                largest = max(largest, float(apart[seen].max()))
    return largest


def _first_keys(region: Region, queries: Int[Tensor, " query"]) -> list[Int[Tensor, " query"]]:
    """Return the first key of each part of a region, for each query; some of them may lie outside."""
    start = torch.zeros_like(queries)
    if isinstance(region, Chunks):
        return [start, (torch.div(queries, region.size, rounding_mode="floor") - region.back) * region.size]
    if isinstance(region, Band):
        lowest = start if region.stop is None else queries - region.stop + 1
        return [start, start + region.skip, lowest.clamp(min=region.skip)]
    return [start]


def _panel(name: str, pieces: Sequence[Piece], length: int, trained_length: int, *, panels: int) -> Panel:
    """Return the matrix of one method; the last panel draws the scale of colours for all."""
    positions, _ = relative_positions(pieces, length)
    hidden = positions.isnan() & torch.ones_like(positions, dtype=torch.bool).tril()
    extent = (-0.5, length - 0.5, length - 0.5, -0.5)

    def grey(axes: Any) -> None:
        from matplotlib.colors import ListedColormap

        if bool(hidden.any()):
            shades = ListedColormap([(1, 1, 1, 0), DROPPED])
            axes.imshow(hidden.numpy().astype(float), cmap=shades, extent=extent, vmin=0, vmax=1)
            axes.text(
                0.98,
                0.97,
                "grey: not seen",
                transform=axes.transAxes,
                ha="right",
                va="top",
                fontsize=7,
                color=NOTE,
            )

    label = f"relative position, tokens; red: beyond the {trained_length:,} that were trained"
    return heat(
        name,
        positions,
        size=(3.9, 3.8),
        # Light for near, dark for far, red for distances that were never trained, nothing for keys out of sight.
        shades=DEEPER,
        scale=(0.0, trained_length - 1.0),
        beyond=UNTRAINED,
        x="key",
        y="query",
        bar={"label": label, "shrink": 0.6, "extend": "max"} if panels else None,
        panels=panels,
        cells=(".3g", 0.55 * trained_length, 4.2) if length <= NUMBERED else None,
        then=grey,
        extent=extent,
    )
