"""Sandwich's product of sinusoids."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ctxext.kernels import Layout
from ctxext.laboratory.encodings.sandwich import Sandwich
from tests._encodings import SCALE, attended, check_score, encoding_of, pairs_of


def score(_: dict[str, Tensor], h: int, i: int, j: int, *__: object) -> Tensor:
    def vector(position: int) -> list[float]:
        angles = [position / 10000 ** (2 * k / 20) for k in range(10)]
        return [math.sin(x) for x in angles] + [math.cos(x) for x in angles]

    product = sum(one * other for one, other in zip(vector(i), vector(j), strict=True))
    return torch.tensor(product / ((h + 1) * 8 / 4), dtype=torch.float64)


@pytest.mark.slow
def test_is_its_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    check_score(Sandwich(dimensions=20), score, monkeypatch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_columns_and_rows_are_as_exact_as_scores_written_out(dtype: torch.dtype) -> None:
    """Far out, where a position rounded to the dtype would be another one."""
    layout, length = Layout.causal(1, 40), 40
    far = Layout(layout.query_positions + 100_000, layout.key_positions + 100_000, spans=layout.spans, consecutive=True)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 4, length, 16, dtype=torch.float64) for _ in range(3))
    encoding = encoding_of(Sandwich())
    truth = attended("reference", encoding.score(pairs_of(q, k, far)), q, k, v, far)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    score = encoding.score(pairs_of(q, k, far))
    assert score.form(dtype) == ("columns" if dtype is torch.float32 else "rows")
    found, plain = (attended(name, score, q, k, v, far).double() for name in ("sdpa", "reference"))
    if dtype is torch.float32:  # rows leave out what all keys have in common; a product of vectors cannot
        plain = _as_published(q, k, v).double()
    assert (found - truth).norm() <= 2 * (plain - truth).norm()


def _as_published(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """In the dtype of q, but for the sinusoids' angles, whose differences are those of any 40 positions in a row."""
    angles = torch.arange(40, dtype=torch.float64)[:, None] / 10000 ** (torch.arange(64) / 64)
    vectors = torch.cat([angles.sin(), angles.cos()], -1).to(q.dtype)
    product = (vectors @ vectors.T) / (torch.arange(1, 5).to(q.dtype) * 8 / 4)[:, None, None]
    scores = q @ k.mT * SCALE + product
    return scores.masked_fill(torch.ones(40, 40, dtype=torch.bool).triu(1), -math.inf).softmax(-1) @ v
