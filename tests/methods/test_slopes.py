"""Slopes against the paper's wording and against transformers' BLOOM."""

from __future__ import annotations

import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from ctxext.errors import InvalidParameterError
from ctxext.methods.formulas import alibi_slopes


@pytest.mark.parametrize("heads", range(1, 131))
def test_slopes_are_those_of_bloom(heads: int) -> None:
    bias = build_alibi_tensor(torch.ones(1, 2, dtype=torch.long), heads, torch.float32)
    torch.testing.assert_close(alibi_slopes(heads).float(), bias[:, 0, 1], rtol=1e-6, atol=0)


def test_eight_heads_halve() -> None:
    assert alibi_slopes(8).tolist() == [2.0**-h for h in range(1, 9)]


def test_twelve_heads_interleave_two_series() -> None:
    assert alibi_slopes(12)[8:].tolist() == pytest.approx([2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5], rel=1e-15)


def test_no_heads_is_refused() -> None:
    with pytest.raises(InvalidParameterError, match="num_heads must be at least 1, found 0"):
        alibi_slopes(0)
