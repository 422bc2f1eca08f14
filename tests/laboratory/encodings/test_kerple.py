"""KERPLE's logarithm of distance."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ctxext.laboratory.encodings.kerple import KERPLE
from tests._encodings import LAYOUTS, SPEC, check_score, encoding_of, pairs_of


def score(weights: dict[str, Tensor], h: int, i: int, j: int, *_: object) -> Tensor:
    p, a = (weights[name][h].clamp(min=0.01) for name in ("p", "a"))
    return -p * torch.log(1 + a * (i - j))


@pytest.mark.slow
def test_is_its_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    check_score(KERPLE(), score, monkeypatch)


def test_begins_as_the_authors_does() -> None:
    torch.manual_seed(0)
    found = [KERPLE().build(SPEC) for _ in range(200)]
    p, a = (torch.stack([getattr(one, name).detach() for one in found]) for name in ("p", "a"))
    assert (p.min() >= 0, p.max() <= 2, a.min() >= 0, a.max() <= 1) == (True,) * 4
    assert (p.mean().item(), a.mean().item()) == (pytest.approx(1, abs=0.1), pytest.approx(0.5, abs=0.05))


def test_a_weight_that_sank_too_low_counts_for_the_least_and_finds_back() -> None:
    encoding, layout = encoding_of(KERPLE()), LAYOUTS["causal"]
    for weight in encoding.parameters():
        weight.data.fill_(-0.5)
    q = torch.zeros(2, 4, 14, 6, dtype=torch.float64)
    rows = encoding.score(pairs_of(q, q[:, :2], layout)).rows(slice(None))
    assert rows[0, 0, 13, 0].item() == pytest.approx(-0.01 * torch.tensor(1 + 0.01 * 13).log().item(), rel=1e-6)
    rows.sum().backward()
    assert (encoding.p.grad < 0).all()
