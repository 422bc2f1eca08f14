"""The first transformer's waves."""

from __future__ import annotations

import math

import pytest
import torch

from ctxext.laboratory.encodings.sinusoidal import Sinusoidal
from tests._encodings import SPEC


def test_is_its_definition() -> None:
    positions = torch.tensor([[0, 1, 7, 5000]])
    found = Sinusoidal(amplitude=0.5).build(SPEC).added(positions)
    for column, position in enumerate(positions[0].tolist()):
        for k in range(SPEC.hidden_size):
            angle = position / 10000 ** (2 * (k // 2) / SPEC.hidden_size)
            expected = 0.5 * (math.cos(angle) if k % 2 else math.sin(angle))
            assert found[0, column, k].item() == pytest.approx(expected, abs=1e-7)


def test_is_as_large_as_new_embeddings() -> None:
    found = Sinusoidal().build(SPEC).added(torch.arange(100_000)[None])
    assert found.pow(2).mean().sqrt().item() == pytest.approx(SPEC.embedding_std, rel=0.01)
