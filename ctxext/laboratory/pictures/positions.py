"""The matrix of relative positions that a method gives a text, as a picture: queries down, keys across."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ctxext.errors import IncompatibleError
from ctxext.evaluation.report.figures import INK, NOTE
from ctxext.laboratory.pictures.picture import Picture, as_numbers, colour_bar, number_cells
from ctxext.measuring.readings import name_for
from ctxext.methods import METHODS, Method
from ctxext.methods.remap import RemapMethod
from ctxext.spec import Band, Chunks, Piece, Region, RopeSpec

UNTRAINED, DROPPED = "#C0392B", "#E8E8E8"
CELLS = 480  # of a picture, along each side: more are not told apart
NUMBERED = 36  # tokens up to which cells are large enough to hold their number, as the papers print them
COLUMNS = 3
FEW = 128  # tokens of a text, evenly spaced, that numbers for programs are of

Panel = tuple[str, Sequence[Piece], int]
"""A name, pieces of attention, and the length of a text."""


@dataclass(frozen=True, eq=False, kw_only=True)
class PositionsPicture(Picture):
    """The relative positions of a model as it is, and of each method beside it."""

    kind = "positions"
    caption = "Queries down, keys across: the relative position that rotation sees, as it is and as the method has it."

    trained_length: int
    panels: tuple[Panel, ...]

    @classmethod
    def of(cls, methods: Sequence[Method], rope: RopeSpec) -> PositionsPicture:
        """Put a model's rotation and methods that remap its positions beside each other.

        Raises:
            IncompatibleError: for a method that gives all tokens their own positions.
            InvalidParameterError: for one that does not fit the trained length or cannot reach its target.
        """
        lengths = [method.target_length(rope.trained_length) for method in methods]
        panels: list[Panel] = [("as it is", (Piece(region=Band()),), max(lengths))]
        for method, length in zip(methods, lengths, strict=True):
            if not isinstance(method, RemapMethod):
                remaps = [name for name, cls in METHODS.items() if issubclass(cls, RemapMethod)]
                raise IncompatibleError(
                    f"Method {method.name!r} leaves every token at its own position and changes what a position means. "
                    f"See `ctxext plot frequencies`. Methods to draw here: {', '.join(remaps)}."
                )
            panels.append((name_for(method), method.pieces(rope, length), length))
        return cls(method=methods[0], trained_length=rope.trained_length, panels=tuple(panels))

    @property
    def numbers(self) -> dict[str, Any]:
        shown = []
        for name, pieces, length in self.panels:
            positions, places = relative_positions(pieces, length, cells=FEW)
            shown.append({"name": name, "length": length, "tokens": places, "positions": as_numbers(positions)})
        return {"kind": self.kind, "trained_length": self.trained_length, "panels": shown}

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of panels."""
        columns = min(COLUMNS, len(self.panels))
        return math.ceil(len(self.panels) / columns), columns

    @property
    def size(self) -> tuple[float, float]:
        return 3.7 * self.shape[1] + 0.9, 3.75 * self.shape[0] + 0.7

    @property
    def sentence(self) -> str:
        if len(self.panels) > 2:
            return "How far each key stands from each query"
        name, pieces, length = self.panels[1]
        most, trained = f"{farthest(pieces, length):,.6g}", f"{self.trained_length:,}"
        return f"{name}: at {length:,} tokens no key stands farther than {most} back; trained were {trained}"

    def draw(self, figure: Any) -> None:
        axes = figure.subplots(*self.shape, squeeze=False).flatten()
        for panel, (name, pieces, length) in zip(axes, self.panels, strict=False):
            image = _draw(panel, name, pieces, length, self.trained_length)
        for panel in axes[len(self.panels) :]:
            panel.set_axis_off()
        label = f"relative position, tokens; red: beyond the {self.trained_length:,} that were trained"
        colour_bar(figure, image, axes.tolist(), label, shrink=0.6, extend="max")


def relative_positions(
    pieces: Sequence[Piece], length: int, cells: int = CELLS
) -> tuple[Float[Tensor, "query key"], list[int]]:
    """Compute relative positions of a text of ``length`` tokens, of at most ``cells`` evenly spaced ones.

    Args:
        pieces: a method's. Where frequencies have positions of their own, that of the slowest one is given.
        cells: along each side, at least 2.

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


def _draw(panel: Any, name: str, pieces: Sequence[Piece], length: int, trained_length: int) -> Any:
    """Draw one panel; return what the colour bar is for."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap, Normalize

    positions, places = relative_positions(pieces, length)
    hidden = positions.isnan() & torch.ones_like(positions, dtype=torch.bool).tril()
    extent = (-0.5, length - 0.5, length - 0.5, -0.5)
    panel.imshow(
        hidden.numpy().astype(float), cmap=ListedColormap([(1, 1, 1, 0), DROPPED]), extent=extent, vmin=0, vmax=1
    )
    image = panel.imshow(
        positions.numpy(),
        # Light for near, dark for far, red for what was never trained, nothing for what is not seen.
        cmap=colormaps["YlGnBu"].with_extremes(over=UNTRAINED, bad=(0, 0, 0, 0)),
        norm=Normalize(0, trained_length - 1),
        extent=extent,
        interpolation="nearest",
    )
    if length <= NUMBERED:
        number_cells(
            panel,
            positions,
            places,
            text="{:.3g}".format,
            is_dark=lambda value: value > 0.55 * trained_length,
            size=4.2,
        )
    if bool(hidden.any()):
        panel.text(
            0.98, 0.97, "grey: not seen", transform=panel.transAxes, ha="right", va="top", fontsize=7, color=NOTE
        )
    panel.set_title(name, fontsize=9, fontweight="bold", loc="left", pad=4)
    panel.set_xlabel("key", fontsize=8, color=INK)
    panel.set_ylabel("query", fontsize=8, color=INK)
    panel.tick_params(labelsize=6.5, length=2, colors=NOTE)
    panel.spines[:].set_visible(False)
    return image
