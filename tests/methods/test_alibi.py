"""Attention with linear biases."""

from __future__ import annotations

import pytest

from ctxext.methods.alibi import ALiBi
from ctxext.spec import AlibiSpec


@pytest.mark.parametrize("heads", [1, 8, 32])
def test_the_papers_geometric_series(heads: int) -> None:
    slopes = ALiBi(factor=4).slopes(AlibiSpec(heads, 64), 256).tolist()
    assert slopes == pytest.approx([2 ** (-8 * (head + 1) / heads) for head in range(heads)], rel=1e-12)


def test_the_checkpoints_own_slopes_win() -> None:
    assert ALiBi(factor=4).slopes(AlibiSpec(2, 64, (0.75, 0.1)), 256).tolist() == [0.75, 0.1]
