"""CoPE's contextual counts."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ctxext.laboratory.encodings.cope import CoPE
from tests._encodings import SPEC, check_score


def score(weights: dict[str, Tensor], h: int, i: int, j: int, query: Tensor, keys: Tensor, scale: float) -> Tensor:
    gates = [1 / (1 + torch.exp(-scale * (query * key).sum())) for key in keys]
    count = torch.stack(gates[j:]).sum().clamp(max=4)
    below, vectors = math.floor(count.item()), weights["weight"]
    share, above = count - below, math.ceil(count.item())
    mixed = (1 - share) * vectors[below] + share * vectors[above]
    return scale * (query * mixed).sum()


@pytest.mark.nightly
def test_is_its_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    check_score(CoPE(places=5), score, monkeypatch)


def test_begins_without_positions() -> None:
    assert not CoPE().build(SPEC).weight.any()
