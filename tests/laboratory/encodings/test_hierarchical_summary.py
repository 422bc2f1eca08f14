"""Window and summaries against their definition, query by query."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ctxext.errors import InvalidParameterError
from ctxext.kernels import Layout
from ctxext.laboratory.encodings import hierarchical_summary
from ctxext.laboratory.encodings.hierarchical_summary import HierarchicalSummary
from ctxext.methods.encoding import Encoding
from tests._encodings import LAYOUTS, SCALE, SPEC, attended, case, encoding_of, pairs_of

WINDOW = 3


def with_holes(queries: int) -> Layout:
    """Rows whose tokens have padding between them, read by the last slots."""
    positions, documents = (HOLES.long().cumsum(1) - 1).clamp(min=0), torch.where(HOLES, 0, -1)
    return Layout.of(positions[:, -queries:], positions, documents[:, -queries:], documents)


HOLES = torch.tensor([[True] * 3 + [False] * 2 + [True] * 6, [False, True, False] * 3 + [True] * 2])
LONGER = {
    "longer than a block of queries": Layout.causal(1, 37),
    "one query": Layout.causal(1, 1, 33),
    "padding between tokens": with_holes(11),
    "behind padding between tokens": with_holes(2),
}


def blocks_of(tokens: int) -> list[tuple[int, int]]:
    """The largest block that fits comes first, then the largest that fits behind it, and so on."""
    found, start = [], 0
    while start < tokens:
        size = 1
        while 2 * size <= tokens - start:
            size *= 2
        found.append((start, start + size))
        start += size
    return found


def one_query(weights: dict[str, Tensor], h: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """The output for a query that is the last of these tokens."""
    early = max(0, len(keys) - WINDOW)
    near = (SCALE * (keys[early:] @ query)).softmax(0) @ values[early:]
    if not early:
        return near
    scores, means = [], []
    for start, stop in blocks_of(early):
        level = min((stop - start).bit_length() - 1, weights["level"].shape[1] - 1)
        scores.append(SCALE * (keys[start:stop].mean(0) @ query) + weights["level"][h, level])
        means.append(values[start:stop].mean(0))
    far = torch.stack(scores).softmax(0) @ torch.stack(means)
    gate = torch.sigmoid(SCALE * (weights["gate"][h] @ query) + weights["gate_bias"][h])
    return gate * near + (1 - gate) * far


def by_definition(encoding: Encoding, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
    weights, visible, rows = dict(encoding.named_parameters()), layout.visible(), []
    for b in range(layout.batch):
        for h in range(q.shape[1]):
            for i in range(layout.query_length):
                slots = visible[b, i].nonzero()[:, 0]
                kv = h * k.shape[1] // q.shape[1]
                empty = torch.zeros(q.shape[3], dtype=q.dtype)
                given = (q[b, h, i], k[b, kv, slots], v[b, kv, slots])
                rows.append(one_query(weights, h, *given) if len(slots) else empty)
    return torch.stack(rows).view(q.shape)


@pytest.mark.parametrize("where", [*LAYOUTS, *LONGER])
def test_is_its_definition_forward_and_backward(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hierarchical_summary, "BLOCK", 5)
    layout, encoding = (LAYOUTS | LONGER)[where], encoding_of(HierarchicalSummary(window=WINDOW))
    q, k, v = case(layout)
    wanted = [q, k, v, *encoding.parameters()]
    right = by_definition(encoding, q, k, v, layout)
    grad = torch.randn_like(right)
    exact = torch.autograd.grad(right, wanted, grad, materialize_grads=True)
    for backend in ("reference", "sdpa"):
        found = attended(backend, encoding.score(pairs_of(q, k, layout)), q, k, v, layout)
        torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-10)
        gradients = torch.autograd.grad(found, wanted, grad, materialize_grads=True)
        torch.testing.assert_close(gradients, exact, rtol=1e-8, atol=1e-9)


def test_larger_blocks_than_the_target_length_has_share_a_score() -> None:
    assert HierarchicalSummary(factor=2).build(SPEC).level.shape == (SPEC.num_heads, (2 * 12).bit_length())


@pytest.mark.parametrize("bad", [-1, 2.5, 25])
def test_bad_windows_are_refused(bad: Any) -> None:
    says = r"window must be (a whole number of|at most the target length of 24)"
    with pytest.raises(InvalidParameterError, match=says):
        HierarchicalSummary(factor=2, window=bad).build(SPEC)
