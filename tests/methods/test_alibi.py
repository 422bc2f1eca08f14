"""Attention with linear biases: slopes against the paper's wording and against transformers' BLOOM."""

from __future__ import annotations

import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from ctxext.methods.alibi import ALiBi
from ctxext.spec import AlibiSpec


@pytest.mark.parametrize("heads", range(1, 131))
def test_slopes_are_those_of_bloom(heads: int) -> None:
    bias = build_alibi_tensor(torch.ones(1, 2, dtype=torch.long), heads, torch.float32)
    found = ALiBi(factor=4).slopes(AlibiSpec(heads, 64), 256)
    torch.testing.assert_close(found.float(), bias[:, 0, 1], rtol=1e-6, atol=0)


@pytest.mark.parametrize("heads", [1, 8, 32])
def test_the_papers_geometric_series(heads: int) -> None:
    slopes = ALiBi(factor=4).slopes(AlibiSpec(heads, 64), 256).tolist()
    assert slopes == pytest.approx([2 ** (-8 * (head + 1) / heads) for head in range(heads)], rel=1e-12)


def test_the_checkpoints_own_slopes_win() -> None:
    assert ALiBi(factor=4).slopes(AlibiSpec(2, 64, (0.75, 0.1)), 256).tolist() == [0.75, 0.1]
