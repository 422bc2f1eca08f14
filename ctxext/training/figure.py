"""Figure of a training run: loss, learning rate, and gain over truncation; needs matplotlib."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ctxext.evaluation.report.figures import Line, differences_panel, lines_panel, paneled
from ctxext.files import whole_file
from ctxext.measuring.labels import tokens_label
from ctxext.measuring.statistics import PairedDifference

# Loss minus the best truncation's, by positions (first, stop).
Gain = Sequence[tuple[tuple[int, int], PairedDifference]]
# Methods whose colours the figure takes: grey for single entries and for before, blue for the mean and for after.
GREY, BLUE = "streaming", "yarn"
# Entries over which the mean reaches back, as a share of all.
SHARE = 0.1


def smoothed(losses: Sequence[float], weights: Sequence[float] | None = None) -> list[float]:
    """Compute the exponentially weighted running mean, without the bias of a start value.

    Args:
        weights: weight of each entry, the number of steps that it averages; by default all equal.
    """
    decay = 1 - 1 / max(1.0, SHARE * len(losses))
    total, mass, means = 0.0, 0.0, []
    for loss, weight in zip(losses, weights or [1.0] * len(losses), strict=True):
        total, mass = decay * total + weight * loss, decay * mass + weight
        means.append(total / mass)
    return means


def save_training_figure(
    path: Path,
    entries: Sequence[Mapping[str, Any]],
    *,
    title: str,
    gains: Mapping[str, Gain],
    shares: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Draw a run: its loss, its learning rate, its heads, and the loss against its best truncation.

    Args:
        entries: each with ``step``, ``loss`` (nats per token) and ``learning_rate``.
        gains: before and after training; without any the right part is left out.
        shares: entries with ``step`` and ``retrieval_share``; without any this part is left out.

    Raises:
        InvalidParameterError: matplotlib is not installed.
    """
    steps, losses = [entry["step"] for entry in entries], [entry["loss"] for entry in entries]
    # An entry averages the steps since the entry before, so it weighs as many.
    means = smoothed(losses, [float(step - before) for before, step in zip([0, *steps], steps, strict=False)])
    # The smallest round distance with at most eight intervals: more labels would overlap.
    apart = next(n * 10**power for power in itertools.count() for n in (1, 2, 5) if steps[-1] <= 8 * n * 10**power)
    ticks = {step: f"{step:,}" for step in range(0, steps[-1] + 1, apart)}
    runs = [
        Line(GREY, f"last entry, {losses[-1]:.3f}", list(zip(steps, losses, strict=True))),
        Line(BLUE, f"running mean, {means[-1]:.3f}", list(zip(steps, means, strict=True))),
    ]
    rates = [
        Line(GREY, f"{entries[-1]['learning_rate']:.1e}", [(one["step"], one["learning_rate"]) for one in entries])
    ]
    by_step = functools.partial(lines_panel, x_label="step", ticks=ticks, log=False)
    panels = [by_step(runs, title="Training loss, nats per token"), by_step(rates, title="Learning rate")]
    if shares:
        points = [(one["step"], one["retrieval_share"]) for one in shares]
        lines = [Line(BLUE, f"{points[0][1]:.3f} to {points[-1][1]:.3f}", points)]
        panels.append(by_step(lines, title="Attention of far heads to what was said before"))
    gains = {name: gain for name, gain in gains.items() if gain}
    if gains:
        spans = [f"{tokens_label(start)}-{tokens_label(stop)}" for (start, stop), _ in next(iter(gains.values()))]
        groups = [
            (colour, f"{name} training", [change for _, change in gain])
            for colour, (name, gain) in zip((GREY, BLUE), gains.items(), strict=False)
        ]
        panels.append(differences_panel(spans, groups, title="Loss minus its own best truncation's, nats per token"))
    with whole_file(path) as half:
        paneled("training", title, panels).save(half)
