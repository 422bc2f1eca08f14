"""Shares of attention by distance."""

from __future__ import annotations

import pytest
import torch

from ctxext.laboratory.pictures.attention import by_distance, edges_of


def test_attention_by_distance() -> None:
    weights = torch.tensor([[0.5, 0.0, 0.25, 0.25, 0.0], [0.1, 0.2, 0.3, 0.0, 0.4]])  # queries at 3 and 4 of 5
    edges = edges_of(5)
    assert edges == (0, 1, 2, 3, 4, 5)
    shares = by_distance(weights, edges)
    torch.testing.assert_close(shares, torch.tensor([0.65, 0.25, 0.3, 0.2, 0.0, 0.6]) / 2)
    assert edges_of(100) == (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 100)
    assert float(by_distance(torch.softmax(torch.randn(3, 2, 7, 40), -1), edges_of(40)).sum()) == pytest.approx(6.0)
