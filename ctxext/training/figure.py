"""Figure of a training run: loss, learning rate, and gain over truncation; needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ctxext.evaluation.labels import tokens_label
from ctxext.evaluation.report.figures import COLOURS, NOTE, differences_panel, draw_grid, saved_figure
from ctxext.evaluation.statistics import PairedDifference
from ctxext.files import whole_file

# Loss minus the best truncation's, by positions (first, stop).
Gain = Sequence[tuple[tuple[int, int], PairedDifference]]
BEFORE, AFTER = "#999999", COLOURS["yarn"]
# Entries over which the mean reaches back, as a share of all.
SHARE = 0.1


def smoothed(losses: Sequence[float], weights: Sequence[float] | None = None) -> list[float]:
    """Compute the exponentially weighted running mean, without the bias of a start value.

    Args:
        losses: losses in order.
        weights: weight of each entry, the number of steps that it averages; by default all equal.
    """
    decay = 1 - 1 / max(1.0, SHARE * len(losses))
    total, mass, means = 0.0, 0.0, []
    for loss, weight in zip(losses, weights or [1.0] * len(losses), strict=True):
        total, mass = decay * total + weight * loss, decay * mass + weight
        means.append(total / mass)
    return means


def save_training_figure(
    path: Path, entries: Sequence[Mapping[str, Any]], *, title: str, gains: Mapping[str, Gain] | None = None
) -> None:
    """Draw a run: its loss above, its learning rate below, and on the right the loss against its best truncation.

    Args:
        path: path of the PNG, which appears whole or not at all.
        entries: entries of the log, each with ``step``, ``loss`` (nats per token) and ``learning_rate``.
        title: one line.
        gains: before and after training; without any the right part is left out.

    Raises:
        InvalidParameterError: matplotlib is not installed.
    """
    measured = {name: gain for name, gain in (gains or {}).items() if gain}
    size = (10.0 if measured else 7.0, 4.5)
    with whole_file(path) as half, saved_figure(half, size, title) as figure:
        _draw(figure, entries, measured)


def _draw(figure: Any, entries: Sequence[Mapping[str, Any]], gains: Mapping[str, Gain]) -> None:
    from matplotlib.ticker import MaxNLocator

    widths = (1.65, 1) if gains else (1,)
    grid = figure.add_gridspec(2, len(widths), height_ratios=(4, 1), width_ratios=widths)
    above, below = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[1, 0])
    below.sharex(above)
    _draw_loss(above, entries)
    rates = [entry["learning_rate"] for entry in entries]
    below.plot([entry["step"] for entry in entries], rates, color=NOTE, lw=1.2)
    below.set_ylim(0, max(rates) * 1.25 or 1.0)
    below.set_yticks([0, max(rates)], ["0", f"{max(rates):.0e}".replace("e-0", "e-")])
    below.text(0.995, 0.9, "learning rate", transform=below.transAxes, ha="right", va="top", fontsize=8.5, color=NOTE)
    below.set_xlabel("step")
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    if gains:
        columns = [f"{tokens_label(start)}-{tokens_label(stop)}" for (start, stop), _ in next(iter(gains.values()))]
        groups = [
            ("truncated" if place == 0 else "yarn", f"{name} training", [change for _, change in gain])
            for place, (name, gain) in enumerate(gains.items())
        ]
        panel = differences_panel(columns, groups, title="Loss minus its own best truncation's")
        panel.draw(figure.add_subplot(grid[:, 1]))


def _draw_loss(axes: Any, entries: Sequence[Mapping[str, Any]]) -> None:
    steps, losses = [entry["step"] for entry in entries], [entry["loss"] for entry in entries]
    weights = [float(step - before) for before, step in zip([0, *steps], steps, strict=False)]
    axes.plot(steps, losses, color=BEFORE, lw=0.8, marker="o" if len(steps) < 40 else None, ms=2.5, alpha=0.7)
    means = smoothed(losses, weights)
    axes.plot(steps, means, color=AFTER, lw=1.8, solid_capstyle="round")
    beside = {"transform": axes.get_yaxis_transform(), "va": "center"}
    axes.text(1.01, means[-1], f"{means[-1]:.3f}", color=AFTER, fontsize=9.5, **beside)
    axes.tick_params(labelbottom=False)
    draw_grid(axes, "Training loss, nats per token; its running mean")
