"""Numbers of the picture of a table's rows."""

from __future__ import annotations

import math

import pytest
import torch

from ctxext.laboratory.encodings.sinusoidal import Sinusoidal
from ctxext.laboratory.pictures.request import SMALL
from ctxext.laboratory.pictures.rows import rows_picture
from ctxext.methods.tile import Tiling


def test_rows_of_sinusoids() -> None:
    """The cosine of two sinusoids is the mean of cos(distance x frequency), so the same along every diagonal."""
    rows = Sinusoidal().build(SMALL).added(torch.arange(96)[None])
    found = rows_picture(Sinusoidal(), rows[0], rows[0, :48]).values
    assert (found["trained_length"], found["target_length"]) == (48, 96)
    for one, other in ((0, 0), (3, 10), (80, 7)):
        expected = sum(math.cos((one - other) * 10000.0 ** (-2 * k / 64)) for k in range(32)) / 32
        assert float(found["similarity"][one, other]) == pytest.approx(expected, abs=1e-6)


def test_the_plane_is_that_of_the_trained_rows() -> None:
    """Rows on a circle among zeros lie on that circle, and tiled ones lie on them."""
    angles = 2 * math.pi * torch.arange(16, dtype=torch.float64) / 16
    trained = torch.zeros(16, 5, dtype=torch.float64)
    trained[:, 1], trained[:, 3] = angles.cos(), angles.sin()
    indices, weights = Tiling(factor=2.0).rows(16, 32)
    found = rows_picture(Tiling(factor=2.0), (weights[..., None] * trained[indices]).sum(1), trained).values
    assert found["share"] == pytest.approx(1.0)
    torch.testing.assert_close(found["plane"].norm(dim=1), torch.ones(32, dtype=torch.float64))
    torch.testing.assert_close(found["plane"][16:], found["trained_plane"])
    assert set(found["dimensions"].tolist()) >= {1, 3}
