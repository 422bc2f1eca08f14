"""Shaw's vectors of clipped distances, on keys."""

from __future__ import annotations

import pytest
from torch import Tensor

from ctxext.laboratory.encodings.shaw import Shaw
from tests._encodings import SPEC, check_score


def score(weights: dict[str, Tensor], h: int, i: int, j: int, query: Tensor, keys: Tensor, scale: float) -> Tensor:
    return scale * (query * weights["weight"][min(i - j, 4)]).sum()


@pytest.mark.slow
def test_is_its_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    check_score(Shaw(clip=4), score, monkeypatch)


def test_begins_as_glorot_and_bengio_say() -> None:
    weight = Shaw(clip=400).build(SPEC).weight
    limit = (6 / (401 + SPEC.head_dim)) ** 0.5
    assert weight.abs().max().item() == pytest.approx(limit, rel=0.01)
