"""FIRE's function of relative distance."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ctxext.laboratory.encodings.fire import FIRE
from tests._encodings import SPEC, check_score


def score(weights: dict[str, Tensor], h: int, i: int, j: int, *_: object) -> Tensor:
    c = weights["c"].abs()
    most = torch.maximum(torch.tensor(float(i), dtype=torch.float64), (weights["multiplier"] * 5).abs())
    asked = torch.log(c * (i - j) + 1) / (torch.log(c * most + 1) + 1e-6)
    total = weights["outer_bias"][h]
    for unit in range(7):
        seen = weights["inner"][unit] * asked + weights["inner_bias"][unit]
        total = total + weights["outer"][h, unit] * seen.clamp(min=0)
    return total


@pytest.mark.nightly
def test_is_its_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    check_score(FIRE(width=7, threshold=5), score, monkeypatch)


def test_begins_as_linear_layers_do_and_with_a_quarter_of_the_trained_length() -> None:
    torch.manual_seed(0)
    found = FIRE(width=4096).build(SPEC)
    assert (found.c.item(), found.multiplier.item()) == (pytest.approx(0.1), 1)
    assert found.threshold == SPEC.trained_length / 4
    assert found.inner.abs().max().item() == pytest.approx(1, abs=0.01)
    assert found.outer.abs().max().item() == pytest.approx(1 / 64, rel=0.01)
