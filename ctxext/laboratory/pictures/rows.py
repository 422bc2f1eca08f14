"""Vectors of positions that are added to tokens: the table, how alike its rows are, its waves, its shape in a plane."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from ctxext.core.patching import unpatch
from ctxext.evaluation.report.figures import INK, Panel, Strokes
from ctxext.laboratory.encodings.sinusoidal import Sinusoidal
from ctxext.laboratory.pictures.picture import (
    AFTER,
    DIVERGING,
    GRADED,
    Curve,
    Numbers,
    Picture,
    colour_bar,
    heat,
    lines,
    name_axes,
)
from ctxext.laboratory.pictures.request import SMALL, PictureRequest
from ctxext.measuring.readings import name_for
from ctxext.methods import BiasMethod, EncodingMethod, Method, RopeMethod, TableMethod
from ctxext.models.lookups import table_of
from ctxext.models.table_rows import twins_of

MOST = 320  # positions that a picture tells apart along one side
WAVES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")  # of Okabe and Ito
POSITIONS = 128  # rows of an example
CAPTION = (
    "Top: the vectors themselves, and how alike any two of them are (the cosine of their angle). Bottom: four of "
    "their numbers along the text, from one that changes fast to one that changes slowly, and all vectors in the "
    "plane in which the trained ones differ most. Everything beyond the line is what training has not seen."
)


def rows_asked(method: Method | None, request: PictureRequest) -> Picture | None:
    """Return the picture of vectors that are added; None where a method or its checkpoint has none."""
    if isinstance(method, EncodingMethod):
        return _of_added(method, request) if method.form == "input" else None
    has_other = isinstance(method, RopeMethod | BiasMethod) or not isinstance(method, TableMethod)
    if method is None or (has_other and request.positions != "table"):
        return None
    return _of_table(method, request)


def rows_picture(
    method: Method, rows: Float[Tensor, "target size"], trained: Float[Tensor, "trained size"], title: str = ""
) -> Picture:
    """Compute the picture of vectors for all positions and of the trained vectors.

    ``similarity`` is the cosine of the angle between each two of them; ``plane`` has the place of each position's
    vector in the plane in which the trained ones differ most, ``share`` the part of their variance that it shows.
    """
    rows, trained = rows.detach().cpu().double(), trained.detach().cpu().double()
    at, known = _places(len(rows)), _places(len(trained))
    centre = trained.mean(0)
    _, values, axes = torch.linalg.svd(trained - centre, full_matrices=False)
    axes = axes[:2] * torch.where(axes[:2].sum(1) < 0, -1.0, 1.0)[:, None]  # which way they point is arbitrary
    axes = torch.cat([axes, axes.new_zeros(2 - len(axes), axes.shape[1])])
    unit = rows[at] / rows[at].norm(dim=1, keepdim=True).clamp(min=1e-300)
    dimensions = _from_fast_to_slow(trained)
    numbers: Numbers = {
        "method": method.to_dict(),
        "trained_length": len(trained),
        "target_length": len(rows),
        "positions": at,
        "rows": rows[at],
        "similarity": unit @ unit.T,
        "dimensions": dimensions,
        "waves": rows[at][:, dimensions].T,
        "plane": (rows[at] - centre) @ axes.T,
        "trained_plane": (trained[known] - centre) @ axes.T,
        "trained_positions": known,
        "share": float((values[:2] ** 2).sum() / (values**2).sum().clamp(min=1e-300)),
    }
    panels = [*_tables_panels(numbers), _waves_panel(numbers), _plane_panel(numbers)]
    return Picture(kind="table", sentence=title, caption=CAPTION, values=numbers, panels=panels, across=2)


def _of_table(method: Method, request: PictureRequest) -> Picture:
    """Show what a method makes of a checkpoint's table, or of a table of sinusoids."""
    if request.checkpoint is None:
        assert isinstance(method, TableMethod)
        trained = _added(Sinusoidal().build(SMALL), request.trained_length or POSITIONS).double()
        indices, weights = method.rows(len(trained), method.target_length(len(trained)))
        rows = (weights[..., None] * trained[indices]).sum(1)
        title = f"What {name_for(method)} makes of a table of {len(trained)} rows (of sinusoids, as an example)"
        return rows_picture(method, rows, trained, title)
    model = request.load(method)
    name, rows = _longest_table(model)
    unpatch(model)
    trained = _longest_table(model)[1][: request.trained_length]
    title = f"{request.model}: what {name_for(method)} makes of the {len(trained)} rows of {name}"
    return rows_picture(method, rows, trained, title)


def _of_added(method: EncodingMethod, request: PictureRequest) -> Picture:
    """Show vectors that are added: a checkpoint's own table where it has one, else an encoding's vectors."""
    if request.positions == "table":
        name, rows = _longest_table(request.load())
        return rows_picture(
            method, rows, rows, f"{request.model}: the {len(rows)} rows of {name}, as they were trained"
        )
    method, encoding, spec, state, _ = request.encoding(method, POSITIONS)
    length, target = spec.trained_length, method.target_length(spec.trained_length)
    rows = _added(encoding, target)
    title = (
        f"{method.name}: {request.model or 'an example'}, a vector for each of {target:,} positions, "
        f"{length:,} trained{f', {state}' if state else ''}"
    )
    return rows_picture(method, rows, rows[:length], title)


def _end_of_training(numbers: Numbers, *directions: str) -> Strokes:
    """Return what draws a line where the trained positions end, if there are others."""

    def then(axes: Any) -> None:
        if numbers["target_length"] != numbers["trained_length"]:
            for direction in directions:
                getattr(axes, direction)(numbers["trained_length"] - 0.5, color=INK, lw=1.1, ls=(0, (3, 1.5)))

    return then


def _tables_panels(numbers: Numbers) -> list[Panel]:
    """Return the vectors, and how alike any two of them are."""
    rows, alike, last = numbers["rows"], numbers["similarity"], numbers["target_length"] - 0.5
    # A few large numbers would turn all others pale: the scale ends where 1 % of them lie beyond.
    largest = float(rows.abs().quantile(0.99)) or 1.0
    return [
        heat(
            "The vectors",
            rows.T,
            size=(5.1, 3.7),
            shades=DIVERGING,
            scale=(-largest, largest),
            x="position",
            y="number in the vector",
            bar={},
            then=_end_of_training(numbers, "axvline"),
            aspect="auto",
            extent=(-0.5, last, rows.shape[1] - 0.5, -0.5),
        ),
        heat(
            "How alike two vectors are",
            alike,
            size=(4.5, 3.7),
            shades=GRADED,
            scale=(min(float(alike.min()), 0.0), 1.0),
            x="position",
            y="position",
            bar={},
            then=_end_of_training(numbers, "axvline", "axhline"),
            extent=(-0.5, last, last, -0.5),
        ),
    ]


def _waves_panel(numbers: Numbers) -> Panel:
    """Return each wave in a separate lane, scaled to the same height."""
    curves, end = [], _end_of_training(numbers, "axvline")
    for lane, (wave, colour) in enumerate(zip(numbers["waves"], WAVES, strict=False)):
        middle, swing = (wave.max() + wave.min()) / 2, float(wave.max() - wave.min()) or 1.0
        curves.append(Curve(numbers["positions"], 0.82 * (wave - middle) / swing - lane, colour, {"lw": 1.2}))

    def then(axes: Any) -> None:
        axes.set_xlim(-0.5, numbers["target_length"] - 0.5)
        axes.set_yticks([-lane for lane in range(len(curves))], [str(each) for each in numbers["dimensions"].tolist()])
        end(axes)

    return lines(
        "Four of their numbers along the text",
        curves,
        size=(5.1, 3.7),
        x="position",
        y="number in the vector",
        grid="",
        then=then,
    )


def _plane_panel(numbers: Numbers) -> Panel:
    """Return the vectors in the plane in which the trained ones differ most."""
    trained: Tensor = numbers["trained_plane"]

    def draw(axes: Any) -> None:
        colours = numbers["positions"].tolist()
        image = axes.scatter(*numbers["plane"].T.tolist(), c=colours, cmap=GRADED, s=9, lw=0, zorder=3)
        steps, spread = trained.diff(dim=0).norm(dim=1).mean(), (trained - trained.mean(0)).norm(dim=1).mean()
        if steps < 0.7 * spread:  # neighbours lie near each other; noise has no line through it
            axes.plot(*trained.T.tolist(), color=INK, lw=0.7, alpha=0.55, zorder=2)
        axes.scatter(*trained.T.tolist(), s=26, facecolors="none", edgecolors=INK, lw=0.5, zorder=4)
        bar = colour_bar([axes], image, "position")
        if numbers["target_length"] != numbers["trained_length"]:
            bar.ax.axhline(numbers["trained_length"], color=AFTER, lw=1.2)
        name_axes(axes, f"In a plane ({numbers['share']:.0%} of the variance); rings: trained", x="", y="", grid="both")
        axes.set_aspect("equal", adjustable="datalim")
        axes.locator_params(nbins=5)

    return Panel(draw, size=(4.5, 3.7))


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


def _longest_table(model: PreTrainedModel) -> tuple[str, Float[Tensor, "rows size"]]:
    """Return the name of a model's longest table, and its rows for positions."""
    twins = twins_of(model)
    table = max(twins.tables if twins.has_learned else twins.sinusoids, key=lambda table: table.positions)
    return table.name, table_of(model, table.name).detach()[table.first :].double().cpu()
