"""The matrix of relative positions that a method gives a text, as a picture: queries down, keys across."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ctxext.errors import IncompatibleError
from ctxext.evaluation.readings import name_for
from ctxext.evaluation.report.style import Drawing
from ctxext.laboratory.pictures.picture import Picture, as_numbers, wrapped
from ctxext.methods import METHODS, Method
from ctxext.methods.remap import RemapMethod
from ctxext.spec import Band, Chunks, Piece, Region, RopeSpec

GREY, UNTRAINED, DROPPED = "#555555", "#C0392B", "#E8E8E8"
CELLS = 480  # of a picture, along each side: more are not told apart
NUMBERED = 36  # tokens up to which cells are large enough to hold their number, as the papers print them
COLUMNS = 3
FEW = 128  # tokens of a text, evenly spaced, that numbers for programs are of
CAPTION = "Queries down, keys across: the relative position that rotation sees, as it is and as the method has it."

Panel = tuple[str, Sequence[Piece], int]
"""A name, pieces of attention, and the length of a text."""


def relative_positions(
    pieces: Sequence[Piece], length: int, cells: int = CELLS
) -> tuple[Float[Tensor, "query key"], list[int]]:
    """Relative positions of a text of ``length`` tokens, of at most ``cells`` evenly spaced ones.

    Args:
        pieces: a method's. Where frequencies have positions of their own, that of the slowest one is given.
        length: tokens.
        cells: along each side, at least 2.

    Returns:
        ``[query, key]``, not a number where a query does not see a key, and which tokens these are.
    """
    count = min(cells, length)
    places = torch.linspace(0, length - 1, count, dtype=torch.float64).round().long()
    found = torch.full((count, count), torch.nan, dtype=torch.float64)
    for piece in pieces:
        query, key = (side(places).reshape(count, -1)[:, -1] for side in (piece.query, piece.key))
        here = piece.region.holds(places[:, None], places[None])
        found = torch.where(here, query[:, None] - key[None], found)
    return found, places.tolist()


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
    """The first key of each part of a region, for each query; some of them may lie outside."""
    start = torch.zeros_like(queries)
    if isinstance(region, Chunks):
        return [start, (torch.div(queries, region.size, rounding_mode="floor") - region.back) * region.size]
    if isinstance(region, Band):
        lowest = start if region.stop is None else queries - region.stop + 1
        return [start, start + region.skip, lowest.clamp(min=region.skip)]
    return [start]


def picture_of_positions(methods: Sequence[Method], rope: RopeSpec) -> Picture:
    """The model as it is and each method beside it, one panel each.

    Args:
        methods: what to draw, in order.
        rope: the model's rotation.

    Raises:
        IncompatibleError: for a method that gives all tokens their own positions.
        InvalidParameterError: for one that does not fit the trained length or cannot reach its target.
    """
    whole: tuple[Piece, ...] = (Piece(region=Band()),)
    panels = [("as it is", whole, max(_length(method, rope) for method in methods))]
    panels += [(name_for(method), _pieces(method, rope), _length(method, rope)) for method in methods]
    columns = min(COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
    width = 3.7 * columns + 0.9
    drawing = Drawing(
        name=f"show-{methods[0].name}",
        title=wrapped(_said(panels, rope.trained_length), width),
        caption=CAPTION,
        alternative=f"relative positions of {', '.join(name for name, *_ in panels)}",
        size=(width, 3.75 * rows + 0.7),
        draw=lambda figure: _draw_panels(figure, panels, (rows, columns), rope.trained_length),
    )
    return Picture({"kind": "positions", "trained_length": rope.trained_length, "panels": _numbers(panels)}, drawing)


def _said(panels: Sequence[Panel], trained_length: int) -> str:
    """Of one method, how far its farthest key stands."""
    if len(panels) > 2:
        return "How far each key stands from each query"
    name, pieces, length = panels[1]
    most = farthest(pieces, length)
    return f"{name}: at {length:,} tokens no key stands farther than {most:,.6g} back; trained were {trained_length:,}"


def _numbers(panels: Sequence[Panel]) -> list[dict[str, Any]]:
    """What each panel shows, in values that JSON has; None where a query does not see a key."""
    found = []
    for name, pieces, length in panels:
        positions, places = relative_positions(pieces, length, cells=FEW)
        found.append({"name": name, "length": length, "tokens": places, "positions": as_numbers(positions)})
    return found


def _draw_panels(figure: Any, panels: Sequence[Panel], shape: tuple[int, int], trained_length: int) -> None:
    axes = figure.subplots(*shape, squeeze=False).flatten()
    for panel, (name, pieces, length) in zip(axes, panels, strict=False):
        image = _draw(panel, name, pieces, length, trained_length)
    for panel in axes[len(panels) :]:
        panel.set_axis_off()
    bar = figure.colorbar(image, ax=axes.tolist(), shrink=0.6, aspect=28, pad=0.015, extend="max")
    bar.set_label(f"relative position, tokens; red: beyond the {trained_length:,} that were trained", fontsize=8)
    bar.ax.tick_params(labelsize=7, colors=GREY)
    bar.outline.set_visible(False)


def _length(method: Method, rope: RopeSpec) -> int:
    return method.target_length(rope.trained_length)


def _pieces(method: Method, rope: RopeSpec) -> tuple[Piece, ...]:
    if not isinstance(method, RemapMethod):
        remaps = [name for name, cls in METHODS.items() if issubclass(cls, RemapMethod)]
        raise IncompatibleError(
            f"Method {method.name!r} leaves every token at its own position and changes what a position means: see "
            f"`ctxext plot frequencies`. Methods to draw here: {', '.join(remaps)}."
        )
    return method.pieces(rope, _length(method, rope))


def _draw(panel: Any, name: str, pieces: Sequence[Piece], length: int, trained_length: int) -> Any:
    """One panel; returns what the colour bar is for."""
    from matplotlib.colors import Normalize

    found, places = relative_positions(pieces, length)
    edges = (-0.5, length - 0.5)
    hidden = found.isnan() & torch.ones_like(found, dtype=torch.bool).tril()
    panel.imshow(
        hidden.masked_fill(~hidden, False).numpy().astype(float),
        cmap=_one_colour(DROPPED),
        extent=(*edges, *reversed(edges)),
        vmin=0,
        vmax=1,
    )
    image = panel.imshow(
        found.numpy(),
        cmap=_colours(),
        norm=Normalize(0, trained_length - 1),
        extent=(*edges, *reversed(edges)),
        interpolation="nearest",
    )
    if length <= NUMBERED:
        for row, query in enumerate(places):
            for column, key in enumerate(places[: row + 1]):
                value = float(found[row, column])
                if not math.isnan(value):
                    ink = "white" if value > 0.55 * trained_length else "#222222"
                    panel.text(key, query, f"{value:.3g}", ha="center", va="center", fontsize=4.2, color=ink)
    if bool(hidden.any()):
        panel.text(
            0.98, 0.97, "grey: not seen", transform=panel.transAxes, ha="right", va="top", fontsize=7, color=GREY
        )
    panel.set_title(name, fontsize=9, fontweight="bold", loc="left", pad=4)
    panel.set_xlabel("key", fontsize=8, color=GREY)
    panel.set_ylabel("query", fontsize=8, color=GREY)
    panel.tick_params(labelsize=6.5, length=2, colors=GREY)
    for spine in panel.spines.values():
        spine.set_visible(False)
    return image


def _colours() -> Any:
    """Light for near, dark for far, red for what was never trained, nothing for what is not seen."""
    from matplotlib import colormaps

    return colormaps["YlGnBu"].with_extremes(over=UNTRAINED, bad=(0, 0, 0, 0))


def _one_colour(colour: str) -> Any:
    from matplotlib.colors import ListedColormap

    return ListedColormap([(1, 1, 1, 0), colour])
