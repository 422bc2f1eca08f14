"""Dual Chunk Attention against the paper's three cases."""

from __future__ import annotations

import pytest
import torch

from ctxext.methods.dual_chunk import DualChunk
from ctxext.spec import RopeSpec
from tests._remap import ROPE, by_formula, relative_positions


@pytest.mark.parametrize(("chunk", "local"), [(48, 8), (63, 8), (40, 15), (20, 1)])
def test_positions_are_the_papers(chunk: int, local: int) -> None:
    """Section 3: intra-chunk, successive-chunk and inter-chunk attention, with the pieces of the authors' code."""
    size = chunk - local
    found = relative_positions(DualChunk(factor=4, chunk=chunk, local=local), ROPE, 230)

    def paper(i: int, j: int) -> float:
        apart = i // size - j // size
        if apart == 0:
            return i - j
        return (min(i % size + size, chunk) if apart == 1 else chunk) - j % size

    assert torch.equal(found[..., 0].nan_to_num(-1), by_formula(paper, 230).nan_to_num(-1))
    assert found.nan_to_num(0).max() == chunk
    near = [found[i, j, 0] == i - j for i in range(230) for j in range(max(0, i - local), i + 1)]
    assert all(near), "the nearest tokens stand as they are, across the border of a chunk too"


def test_by_default_texts_of_the_trained_length_are_exact() -> None:
    method = DualChunk(factor=4)
    assert method.exact_length(ROPE) == 64
    found = relative_positions(method, ROPE, 130)
    assert torch.equal(found[:64, :64, 0].nan_to_num(-1), by_formula(lambda i, j: i - j, 64).nan_to_num(-1))
    assert found[64, 0, 0] != 64


def test_shares_are_of_the_trained_length() -> None:
    rope = RopeSpec(8, 1e4, 8192)
    regions = DualChunk(factor=2, chunk=0.75, local=0.125).pieces(rope, 16384)
    assert regions[0].key.period == 6144 - 1024
