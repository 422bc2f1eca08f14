"""Vectors of positions that are added to tokens: the table, how alike its rows are, its waves, its shape in a plane."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ctxext.evaluation.report.style import INK, NOTE
from ctxext.laboratory.pictures.picture import AFTER, GRADED, Picture, quiet

MOST = 320  # positions that a picture tells apart along one side
WAVES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")  # of Okabe and Ito
DIVERGING = "PuOr"  # orange below zero, violet above, told apart under every common colour blindness
CAPTION = (
    "Top: the vectors themselves, and how alike any two of them are (the cosine of their angle). Bottom: four of their "
    "numbers along the text, from one that changes fast to one that changes slowly, and all vectors in the plane in "
    "which the trained ones differ most. Everything beyond the line is what training has not seen."
)


@dataclass(frozen=True, eq=False)
class RowsSeen:
    """Vectors of positions in numbers.

    Args:
        trained_length: positions that were trained.
        target_length: positions that there are vectors for.
        positions: those looked at, evenly spaced.
        rows: their vectors.
        similarity: the cosine of the angle between each two of them.
        dimensions: four of the vectors' numbers, from one that changes fast to one that changes slowly.
        waves: those of each position.
        plane: where each position's vector lies in the plane in which the trained ones differ most.
        trained_plane: likewise the trained vectors, as they were before an extension.
        trained_positions: which positions these are.
        share: how much of the trained vectors' variance the plane shows, 0 to 1.
    """

    trained_length: int
    target_length: int
    positions: Int[Tensor, " position"]
    rows: Float[Tensor, "position size"]
    similarity: Float[Tensor, "position position"]
    dimensions: Int[Tensor, " wave"]
    waves: Float[Tensor, "wave position"]
    plane: Float[Tensor, "position 2"]
    trained_plane: Float[Tensor, "trained 2"]
    trained_positions: Int[Tensor, " trained"]
    share: float


def rows_seen(rows: Float[Tensor, "target size"], trained: Float[Tensor, "trained size"]) -> RowsSeen:
    """Vectors for all positions in numbers, with those that were trained."""
    rows, trained = rows.detach().cpu().double(), trained.detach().cpu().double()
    at, known = _places(len(rows)), _places(len(trained))
    centre = trained.mean(0)
    _, values, axes = torch.linalg.svd(trained - centre, full_matrices=False)
    axes = axes[:2] * torch.where(axes[:2].sum(1) < 0, -1.0, 1.0)[:, None]  # which way they point is arbitrary
    axes = torch.cat([axes, axes.new_zeros(2 - len(axes), axes.shape[1])])
    dimensions = _from_fast_to_slow(trained)
    return RowsSeen(
        trained_length=len(trained),
        target_length=len(rows),
        positions=at,
        rows=rows[at],
        similarity=similarity(rows[at]),
        dimensions=dimensions,
        waves=rows[at][:, dimensions].T,
        plane=(rows[at] - centre) @ axes.T,
        trained_plane=(trained[known] - centre) @ axes.T,
        trained_positions=known,
        share=float((values[:2] ** 2).sum() / (values**2).sum().clamp(min=1e-300)),
    )


def _places(count: int) -> Int[Tensor, " position"]:
    return torch.linspace(0, count - 1, min(count, MOST), dtype=torch.float64).round().long()


def similarity(rows: Float[Tensor, "position size"]) -> Float[Tensor, "position position"]:
    """The cosine of the angle between each two vectors."""
    unit = rows / rows.norm(dim=1, keepdim=True).clamp(min=1e-300)
    found: Float[Tensor, "position position"] = unit @ unit.T
    return found


def _from_fast_to_slow(rows: Float[Tensor, "trained size"], count: int = 4) -> Int[Tensor, " wave"]:
    """Some of the larger half of the numbers of a vector, from one that changes fast to one that changes slowly."""
    spread = rows.var(0, correction=0)
    large = spread.argsort(descending=True, stable=True)[: max(count, len(spread) // 2)]
    speed = rows[:, large].diff(dim=0).square().mean(0) / spread[large].clamp(min=1e-300)
    order = large[speed.argsort(descending=True, stable=True)]
    if len(order) < 2 * count:
        return order[-count:]
    # The very fastest is a blur in a picture.
    return order[torch.linspace(0.25, 0.95, count).mul(len(order) - 1).round().long()]


def picture_of_rows(found: RowsSeen, *, title: str, kind: str, saved: dict[str, Any]) -> Picture:
    """The table, its similarities, its waves and its plane."""
    size = (9.6, 7.4)
    return Picture.of(
        found,
        kind,
        saved=saved,
        said=title,
        caption=CAPTION,
        size=size,
        draw=lambda figure: _draw(figure, found),
    )


def _draw(figure: Any, found: RowsSeen) -> None:
    (table, alike), (waves, plane) = figure.subplots(2, 2, width_ratios=(1.15, 1))
    last = found.target_length - 0.5
    extent = (-0.5, last)
    largest = float(found.rows.abs().quantile(0.99)) or 1.0
    image = table.imshow(
        found.rows.T.numpy(),
        cmap=DIVERGING,
        vmin=-largest,
        vmax=largest,
        aspect="auto",
        extent=(*extent, found.rows.shape[1] - 0.5, -0.5),
        interpolation="nearest",
    )
    _bar(figure, image, table)
    quiet(table, "The vectors", x="position", y="number in the vector", grid="")
    least = min(float(found.similarity.min()), 0.0)
    image = alike.imshow(
        found.similarity.numpy(), cmap=GRADED, vmin=least, vmax=1, extent=(*extent, last, -0.5), interpolation="nearest"
    )
    _bar(figure, image, alike)
    quiet(alike, "How alike two vectors are", x="position", y="position", grid="")
    _draw_waves(waves, found)
    for axes in (table, alike, waves):
        _line(axes, found, both=axes is alike)
    _draw_plane(figure, plane, found)


def _draw_waves(axes: Any, found: RowsSeen) -> None:
    """Each in a lane of its own, as high as it swings."""
    lanes = [-index for index in range(len(found.waves))]
    for lane, wave, colour in zip(lanes, found.waves, WAVES, strict=False):
        middle, swing = (wave.max() + wave.min()) / 2, float(wave.max() - wave.min()) or 1.0
        axes.plot(found.positions.tolist(), (lane + 0.82 * (wave - middle) / swing).tolist(), color=colour, lw=1.2)
    axes.set_xlim(-0.5, found.target_length - 0.5)
    quiet(axes, "Four of their numbers along the text", x="position", y="number in the vector", grid="")
    axes.set_yticks(lanes, [str(dimension) for dimension in found.dimensions.tolist()])


def _line(axes: Any, found: RowsSeen, *, both: bool) -> None:
    """Where the trained positions end."""
    if found.target_length == found.trained_length:
        return
    for draw in (axes.axvline, axes.axhline)[: 1 + both]:
        draw(found.trained_length - 0.5, color=INK, lw=1.1, ls=(0, (3, 1.5)))


def _draw_plane(figure: Any, axes: Any, found: RowsSeen) -> None:
    image = axes.scatter(
        *found.plane.T.tolist(), c=found.positions.tolist(), cmap=GRADED, s=9, lw=0, zorder=3, label="all positions"
    )
    if _is_a_line(found.trained_plane):
        axes.plot(*found.trained_plane.T.tolist(), color=INK, lw=0.7, alpha=0.55, zorder=2)
    axes.scatter(
        *found.trained_plane.T.tolist(), s=26, facecolors="none", edgecolors=INK, lw=0.5, zorder=4, label="trained"
    )
    bar = _bar(figure, image, axes)
    bar.set_label("position", fontsize=8, color=NOTE)
    if found.target_length != found.trained_length:
        bar.ax.axhline(found.trained_length, color=AFTER, lw=1.2)
    quiet(axes, f"In a plane ({found.share:.0%} of the variance); rings: trained", x="", y="", grid="both")
    axes.set_aspect("equal", adjustable="datalim")
    axes.locator_params(nbins=5)


def _is_a_line(plane: Float[Tensor, "trained 2"]) -> bool:
    """Whether neighbours lie near each other; noise has no line through it."""
    steps, spread = plane.diff(dim=0).norm(dim=1).mean(), (plane - plane.mean(0)).norm(dim=1).mean()
    return bool(steps < 0.7 * spread)


def _bar(figure: Any, image: Any, axes: Any) -> Any:
    bar = figure.colorbar(image, ax=axes, pad=0.02, aspect=28)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=7, length=2, colors=NOTE)
    return bar
