"""Position Interpolation."""

from __future__ import annotations

import numpy as np
import pytest

from ctxext.methods.pi import PI
from ctxext.spec import RopeSpec
from tests.methods._thetas import thetas


@pytest.mark.parametrize("factor", [1, 1.5, 4, 32])
def test_every_angle_is_that_of_the_squeezed_position(rope: RopeSpec, factor: float) -> None:
    found = PI(factor=factor).frequencies(rope, 7)
    position = 3 * rope.trained_length
    squeezed = [position / factor * theta for theta in thetas(rope)]
    assert (found.inv_freq * position).tolist() == pytest.approx(squeezed, rel=1e-12)
    assert found.attention_scale == 1


@pytest.mark.parametrize(("trained", "target"), [(8, 32), (5, 7), (1, 4), (512, 2048)])
def test_rows_of_a_table_are_those_of_the_squeezed_position(trained: int, target: int) -> None:
    """A table of the line ``p_k = k`` shows where each new position lies in the old ones."""
    indices, weights = PI(factor=target / trained).rows(trained, target)
    line = np.arange(trained, dtype=np.float64)
    found = (line[indices.numpy()] * weights.numpy()).sum(1)
    squeezed = np.interp(np.arange(target) / (target / trained), np.arange(trained), line)  # flat behind the last row
    np.testing.assert_allclose(found, squeezed, rtol=1e-12, atol=1e-12)
