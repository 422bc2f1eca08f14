"""Position Interpolation."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ctxext.methods.pi import PI
from ctxext.spec import RopeSpec


def test_authors_values(matches_golden: Callable[..., None]) -> None:
    matches_golden("pi", PI)


@pytest.mark.parametrize("factor", [1, 1.5, 4, 32])
def test_every_angle_is_that_of_the_squeezed_position(
    rope: RopeSpec, thetas: Callable[..., list], factor: float
) -> None:
    found = PI(factor=factor).frequencies(rope, 7)
    position = 3 * rope.trained_length
    squeezed = [position / factor * theta for theta in thetas(rope)]
    assert (found.inv_freq * position).tolist() == pytest.approx(squeezed, rel=1e-12)
    assert found.attention_scale == 1
