"""Vectors of positions that are added to tokens: the table, how alike its rows are, its waves, its shape in a plane."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from ctxext.core.patching import unpatch
from ctxext.evaluation.report.figures import INK
from ctxext.laboratory.encodings.sinusoidal import Sinusoidal
from ctxext.laboratory.pictures.picture import AFTER, DIVERGING, GRADED, Picture, colour_bar, quiet
from ctxext.laboratory.pictures.request import SMALL, PictureRequest
from ctxext.measuring.readings import name_for
from ctxext.methods import EncodingMethod, Method, TableMethod
from ctxext.models.lookups import table_of
from ctxext.models.table_rows import PositionTable, twins_of

MOST = 320  # positions that a picture tells apart along one side
WAVES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")  # of Okabe and Ito
POSITIONS = 128  # rows of an example


@dataclass(frozen=True, eq=False, kw_only=True)
class RowsPicture(Picture):
    """Vectors of positions, with those that were trained.

    Args:
        target_length: positions that there are vectors for.
        similarity: the cosine of the angle between each two of them.
        dimensions: four of the vectors' numbers, from one that changes fast to one that changes slowly.
        waves: those numbers at each position.
        plane: where each position's vector lies in the plane in which the trained ones differ most.
        trained_plane: likewise the trained vectors, as they were before an extension.
        share: how much of the trained vectors' variance the plane shows, 0 to 1.
    """

    kind = "table"
    size = 9.6, 7.4
    caption = (
        "Top: the vectors themselves, and how alike any two of them are (the cosine of their angle). Bottom: four of "
        "their numbers along the text, from one that changes fast to one that changes slowly, and all vectors in the "
        "plane in which the trained ones differ most. Everything beyond the line is what training has not seen."
    )

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

    @classmethod
    def of(
        cls, method: Method, rows: Float[Tensor, "target size"], trained: Float[Tensor, "trained size"], title: str = ""
    ) -> RowsPicture:
        """Compute the picture of vectors for all positions and of those that were trained."""
        rows, trained = rows.detach().cpu().double(), trained.detach().cpu().double()
        at, known = _places(len(rows)), _places(len(trained))
        centre = trained.mean(0)
        _, values, axes = torch.linalg.svd(trained - centre, full_matrices=False)
        axes = axes[:2] * torch.where(axes[:2].sum(1) < 0, -1.0, 1.0)[:, None]  # which way they point is arbitrary
        axes = torch.cat([axes, axes.new_zeros(2 - len(axes), axes.shape[1])])
        unit = rows[at] / rows[at].norm(dim=1, keepdim=True).clamp(min=1e-300)
        dimensions = _from_fast_to_slow(trained)
        return cls(
            method=method,
            title=title,
            trained_length=len(trained),
            target_length=len(rows),
            positions=at,
            rows=rows[at],
            similarity=unit @ unit.T,
            dimensions=dimensions,
            waves=rows[at][:, dimensions].T,
            plane=(rows[at] - centre) @ axes.T,
            trained_plane=(trained[known] - centre) @ axes.T,
            trained_positions=known,
            share=float((values[:2] ** 2).sum() / (values**2).sum().clamp(min=1e-300)),
        )

    @classmethod
    def of_table(cls, method: Method, request: PictureRequest) -> RowsPicture:
        """Show what a method makes of a checkpoint's table, or of a table of sinusoids."""
        if request.checkpoint is None:
            assert isinstance(method, TableMethod)
            trained = _added(Sinusoidal().build(SMALL), request.trained_length or POSITIONS).double()
            indices, weights = method.rows(len(trained), method.target_length(len(trained)))
            rows = (weights[..., None] * trained[indices]).sum(1)
            title = f"What {name_for(method)} makes of a table of {len(trained)} rows (of sinusoids, as an example)"
            return cls.of(method, rows, trained, title)
        model = request.load(method)
        name = max(_tables(model), key=lambda table: table.positions).name
        rows = _values(model, name)
        unpatch(model)
        trained = _values(model, name)[: request.trained_length]
        title = f"{request.model}: what {name_for(method)} makes of the {len(trained)} rows of {name}"
        return cls.of(method, rows, trained, title)

    @classmethod
    def of_added(cls, method: EncodingMethod, request: PictureRequest) -> RowsPicture:
        """Show vectors that are added: a checkpoint's own table where it has one, else those of an encoding."""
        if request.positions == "table":
            model = request.load()
            name = max(_tables(model), key=lambda table: table.positions).name
            rows = _values(model, name)
            title = f"{request.model}: the {len(rows)} rows of {name}, as they were trained"
            return cls.of(method, rows, rows, title)
        method, encoding, spec, state, _ = request.encoding(method, POSITIONS)
        length, target = spec.trained_length, method.target_length(spec.trained_length)
        rows = _added(encoding, target)
        title = (
            f"{method.name}: {request.model or 'an example'}, a vector for each of {target:,} positions, "
            f"{length:,} trained{f', {state}' if state else ''}"
        )
        return cls.of(method, rows, rows[:length], title)

    def draw(self, figure: Any) -> None:
        (table, alike), (waves, plane) = figure.subplots(2, 2, width_ratios=(1.15, 1))
        last = self.target_length - 0.5
        largest = float(self.rows.abs().quantile(0.99)) or 1.0
        image = table.imshow(
            self.rows.T.numpy(),
            cmap=DIVERGING,
            vmin=-largest,
            vmax=largest,
            aspect="auto",
            extent=(-0.5, last, self.rows.shape[1] - 0.5, -0.5),
            interpolation="nearest",
        )
        colour_bar(figure, image, table, pad=0.02)
        quiet(table, "The vectors", x="position", y="number in the vector", grid="")
        image = alike.imshow(
            self.similarity.numpy(),
            cmap=GRADED,
            vmin=min(float(self.similarity.min()), 0.0),
            vmax=1,
            extent=(-0.5, last, last, -0.5),
            interpolation="nearest",
        )
        colour_bar(figure, image, alike, pad=0.02)
        quiet(alike, "How alike two vectors are", x="position", y="position", grid="")
        self._draw_waves(waves)
        if self.target_length != self.trained_length:
            for line in (table.axvline, alike.axvline, alike.axhline, waves.axvline):
                line(self.trained_length - 0.5, color=INK, lw=1.1, ls=(0, (3, 1.5)))
        self._draw_plane(figure, plane)

    def _draw_waves(self, axes: Any) -> None:
        """Draw each wave in a lane of its own, as high as it swings."""
        lanes = [-index for index in range(len(self.waves))]
        for lane, wave, colour in zip(lanes, self.waves, WAVES, strict=False):
            middle, swing = (wave.max() + wave.min()) / 2, float(wave.max() - wave.min()) or 1.0
            axes.plot(self.positions.tolist(), (lane + 0.82 * (wave - middle) / swing).tolist(), color=colour, lw=1.2)
        axes.set_xlim(-0.5, self.target_length - 0.5)
        quiet(axes, "Four of their numbers along the text", x="position", y="number in the vector", grid="")
        axes.set_yticks(lanes, [str(dimension) for dimension in self.dimensions.tolist()])

    def _draw_plane(self, figure: Any, axes: Any) -> None:
        trained = self.trained_plane
        image = axes.scatter(*self.plane.T.tolist(), c=self.positions.tolist(), cmap=GRADED, s=9, lw=0, zorder=3)
        steps, spread = trained.diff(dim=0).norm(dim=1).mean(), (trained - trained.mean(0)).norm(dim=1).mean()
        if steps < 0.7 * spread:  # neighbours lie near each other; noise has no line through it
            axes.plot(*trained.T.tolist(), color=INK, lw=0.7, alpha=0.55, zorder=2)
        axes.scatter(*trained.T.tolist(), s=26, facecolors="none", edgecolors=INK, lw=0.5, zorder=4)
        bar = colour_bar(figure, image, axes, "position", pad=0.02)
        if self.target_length != self.trained_length:
            bar.ax.axhline(self.trained_length, color=AFTER, lw=1.2)
        quiet(axes, f"In a plane ({self.share:.0%} of the variance); rings: trained", x="", y="", grid="both")
        axes.set_aspect("equal", adjustable="datalim")
        axes.locator_params(nbins=5)


def _places(count: int) -> Int[Tensor, " position"]:
    return torch.linspace(0, count - 1, min(count, MOST), dtype=torch.float64).round().long()


def _from_fast_to_slow(rows: Float[Tensor, "trained size"], count: int = 4) -> Int[Tensor, " wave"]:
    """Choose some of the larger half of the numbers of a vector, from one that changes fast to one that does slowly."""
    spread = rows.var(0, correction=0)
    large = spread.argsort(descending=True, stable=True)[: max(count, len(spread) // 2)]
    speed = rows[:, large].diff(dim=0).square().mean(0) / spread[large].clamp(min=1e-300)
    order = large[speed.argsort(descending=True, stable=True)]
    if len(order) < 2 * count:
        return order[-count:]
    # The very fastest is a blur in a picture.
    return order[torch.linspace(0.25, 0.95, count).mul(len(order) - 1).round().long()]


@torch.no_grad()
def _added(encoding: Any, length: int) -> Float[Tensor, "length size"]:
    rows: Tensor = encoding.added(torch.arange(length)[None])[0]
    return rows


def _tables(model: PreTrainedModel) -> list[PositionTable]:
    twins = twins_of(model)
    return twins.tables if twins.has_learned else twins.sinusoids


def _values(model: PreTrainedModel, name: str) -> Float[Tensor, "rows size"]:
    """Return the rows of a table that stand for positions."""
    table = next(table for table in _tables(model) if table.name == name)
    return table_of(model, name).detach()[table.first :].double().cpu()
