"""Panels of differences: which groups they show, and how they name those that they do not."""

from __future__ import annotations

from typing import Any

import pytest

from ctxext.evaluation.report.figures import differences_panel
from ctxext.measuring.statistics import PairedDifference


def drawn(groups: dict[str, list[float]], **settings: Any) -> tuple[list[float], str]:
    """Return the heights of the points that a panel shows, and what stands below its axis."""
    figures = pytest.importorskip("matplotlib.figure")
    axes = figures.Figure().subplots()
    given = [(name, name, [PairedDifference(mean, 0.01, 512, 8) for mean in means]) for name, means in groups.items()]
    differences_panel(["code", "play"], given, **settings).draw(axes)
    heights = [float(y) for container in axes.containers for y in container.lines[0].get_ydata()]
    return heights, axes.get_xlabel()


@pytest.mark.parametrize(
    "groups",
    [
        {"unpatched": [-0.04, 0.02], "self_extend": [-1.15, -0.02], "yarn": [-1.17, 0.02]},  # gains are the point
        {"pi": [0.0, 0.01], "yarn": [-0.9, 0.2]},
        {"pi": [0.7, 0.8], "yarn": [0.9, 1.0]},
        {"yarn": [-2.0, 3.0]},
    ],
)
def test_gains_are_shown_whatever_lies_near_zero(groups: dict[str, list[float]]) -> None:
    heights, below = drawn(groups)
    assert heights == [mean for means in groups.values() for mean in means]
    assert "off the scale" not in below


@pytest.mark.parametrize(
    ("groups", "named"),
    [
        ({"unpatched": [2.0, 5.0], "yarn": [0.01, -0.02]}, "unpatched +5.00"),
        ({"unpatched": [5.0, -0.01], "pi": [4.0, 4.5], "yarn": [-0.2, 0.1]}, "unpatched +5.00, pi +4.50"),
        ({"unpatched": [9.0, 5.0], "yarn": [-1.5, 0.1]}, "unpatched +9.00"),
    ],
)
def test_a_group_far_above_is_named_below_the_axis(groups: dict[str, list[float]], named: str) -> None:
    heights, below = drawn(groups)
    assert heights == groups["yarn"]
    assert below == f"positions, tokens; below the line the older text helps\noff the scale: {named}"


def test_an_axis_without_a_label() -> None:
    assert drawn({"yarn": [0.1, 0.1]}, x_label="")[1] == "below the line the older text helps"
