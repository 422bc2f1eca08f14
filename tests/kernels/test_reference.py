"""The oracle itself, against the formula written out in plain Python: one query, one key and one number at a time."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ctxext.kernels import Call, Layout
from ctxext.kernels.blocks import PartRule
from ctxext.kernels.reference import Reference
from tests.kernels import cases

HEADS, KV_HEADS, KEYS, WIDTH, VALUES = 4, 2, 7, 3, 5
KEEP = torch.tensor([[False, False, True, True, True, True, True], [True, True, True, True, False, False, False]])

LAYOUTS: dict[str, Callable[[], Layout]] = {
    "causal": lambda: Layout.causal(2, KEYS),
    "decode": lambda: Layout.causal(2, 1, KEYS),
    "padded": lambda: Layout.padded(KEEP),
    "packed": lambda: Layout.packed([3, 1, 3]),
    "static cache": lambda: Layout.cached(2, 2, KEYS, filled=5),
    "jumping": lambda: Layout.of(torch.tensor([[0, 4, 5, 9, 10, 2, 3]]), torch.tensor([[0, 4, 5, 9, 10, 2, 3]])),
}


def written_out(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, slopes: list[float] | None, window: int, softcap: float | None
) -> Tensor:
    """Softmax over the keys that a query sees, of scaled products less slope times distance; nothing seen is zero."""
    out = torch.zeros(*q.shape[:3], VALUES, dtype=torch.float64)
    q_at, k_at = layout.query_positions.tolist(), layout.key_positions.tolist()
    q_of = [[0] * q.shape[2]] * q.shape[0] if layout.query_documents is None else layout.query_documents.tolist()
    k_of = [[0] * k.shape[2]] * q.shape[0] if layout.key_documents is None else layout.key_documents.tolist()
    for row in range(q.shape[0]):
        for head in range(HEADS):
            shared = head // (HEADS // KV_HEADS)
            keys, values = k[row, shared].tolist(), v[row, shared].tolist()
            for i, query in enumerate(q[row, head].tolist()):
                weights = {}
                for j, key in enumerate(keys):
                    distance = q_at[row][i] - k_at[row][j]
                    if k_of[row][j] < 0 or k_of[row][j] != q_of[row][i] or not 0 <= distance < window:
                        continue
                    score = sum(a * b for a, b in zip(query, key, strict=True)) / math.sqrt(WIDTH)
                    if softcap is not None:
                        score = softcap * math.tanh(score / softcap)
                    weights[j] = math.exp(score - (slopes[head] * distance if slopes else 0.0))
                for column in range(VALUES):
                    total = sum(weight * values[j][column] for j, weight in weights.items())
                    out[row, head, i, column] = total / sum(weights.values()) if weights else 0.0
    return out


@pytest.mark.parametrize("window", [None, 2], ids=["no window", "window"])
@pytest.mark.parametrize("slopes", [None, [0.5, 0.25, 0.125, 0.0625]], ids=["plain", "biased"])
@pytest.mark.parametrize("softcap", [None, 0.5], ids=["no cap", "cap"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_is_the_formula(name: str, softcap: float | None, slopes: list[float] | None, window: int | None) -> None:
    layout = LAYOUTS[name]()
    generator = torch.Generator().manual_seed(0)
    shapes = [(HEADS, layout.query_length, WIDTH), *[(KV_HEADS, layout.key_length, wide) for wide in (WIDTH, VALUES)]]
    q, k, v = (torch.randn(layout.batch, *shape, generator=generator, dtype=torch.float64) for shape in shapes)
    bias = None if slopes is None else torch.tensor(slopes, dtype=torch.float64)
    found = Reference()(q, k, v, layout, scale=1 / math.sqrt(WIDTH), slopes=bias, window=window, softcap=softcap)
    expected = written_out(q, k, v, layout, slopes, 10**9 if window is None else window, softcap)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_some_queries_at_a_time_are_the_whole(dropout: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Output and gradients; the backward pass draws the same dropout again."""
    generator = torch.Generator().manual_seed(0)
    layout, slopes = Layout.packed([9, 4]), torch.rand(HEADS, generator=generator)
    shapes = [(1, HEADS, 13, WIDTH), (1, KV_HEADS, 13, WIDTH), (1, KV_HEADS, 13, VALUES)]
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]
    grad = torch.randn(1, HEADS, 13, VALUES, generator=generator, dtype=torch.float64)

    def run() -> tuple[Tensor, list[Tensor]]:
        torch.manual_seed(0)
        out = Reference()(*inputs, layout, scale=0.5, slopes=slopes, softcap=1.0, dropout=dropout)
        return out, [out.detach(), *torch.autograd.grad(out, inputs, grad, retain_graph=True)]

    _, whole = run()
    monkeypatch.setattr("ctxext.kernels.reference.BYTES", 4 * HEADS * 13 * 5)  # five queries
    out, parts = run()
    again = torch.autograd.grad(out, inputs, grad)
    for mine, theirs in zip(parts[1:], again, strict=True):
        assert torch.equal(mine, theirs)
    if not dropout:  # other numbers are drawn for parts
        for mine, theirs in zip(parts, whole, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)


@pytest.mark.slow
@pytest.mark.parametrize("softcap", [None, 1.0])
def test_no_tensor_is_quadratic(softcap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctxext.kernels.reference.BYTES", 1)
    monkeypatch.setattr("ctxext.kernels.blocks.CPU_BYTES", 1)
    length = 300
    inputs = [torch.randn(1, heads, length, WIDTH, requires_grad=True) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    rule = PartRule(0.5, causal=True, softcap=softcap)
    with cases.Largest() as largest:
        call = Call.of(*inputs, scale=0.5, softcap=softcap)
        Reference().run(call).sum().backward()
        q, k, v = (x.detach() for x in inputs)
        out, lse = Reference().with_lse(q, k, v, rule)
        Reference().gradients(q, k, v, out, lse, out, rule)
    assert largest.numbers <= 64 * length  # a block of 64 rows of the scores of a key head


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("layout", cases.LAYOUTS)
def test_torchs_own_kernel_computes_the_same(layout: str, biased: bool) -> None:
    """So that its error, by which that of others is judged on a GPU, is rounding."""
    one = cases.case(layout, torch.float32, biased=biased, window=20)
    for found, right in zip(cases.torchs_own(one), cases.truth(one), strict=True):
        assert cases.error(found, right) < 1e-6
