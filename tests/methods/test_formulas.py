"""Formulas that several methods share."""

from __future__ import annotations

import pytest

from ctxext.errors import InvalidParameterError
from ctxext.methods.formulas import alibi_slopes


def test_twelve_heads_interleave_two_series() -> None:
    assert alibi_slopes(12)[8:].tolist() == pytest.approx([2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5], rel=1e-15)


def test_no_heads_is_refused() -> None:
    with pytest.raises(InvalidParameterError, match="num_heads must be at least 1, found 0"):
        alibi_slopes(0)
