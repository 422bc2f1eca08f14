"""Encodings held against their definitions: attention written out pair by pair, in float64, gradients included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ctxext.kernels import Call, Layout, named
from ctxext.laboratory import scores
from ctxext.methods.encoding import Encoding, EncodingMethod, EncodingSpec, Pairs, Weighting

SPEC = EncodingSpec(hidden_size=24, num_heads=4, num_kv_heads=2, head_dim=6, num_layers=2, trained_length=12)
SCALE = 0.3

# The score of one pair: the encoding's weights by name, the head, the positions of query and key, the query, the keys
# of its document up to the query's own, and the scale.
Definition = Callable[[dict[str, Tensor], int, int, int, Tensor, Tensor, float], Tensor]

KEEP = torch.tensor([[True] * 9, [False] * 4 + [True] * 5])
LAYOUTS = {
    "causal": Layout.causal(2, 14),
    "chunk behind a cache": Layout.causal(1, 3, 21),
    "packed": Layout.packed([8, 1, 6]),
    "left padded": Layout.padded(KEEP),
    "static cache": Layout.cached(1, 2, 12, filled=9),
}


def encoding_of(method: EncodingMethod, spec: EncodingSpec = SPEC) -> Encoding:
    """A new encoding in float64, none of whose weights is still what it begins with."""
    torch.manual_seed(0)
    encoding = method.build(spec).double()
    for weight in encoding.parameters():
        weight.data += 0.5 * torch.rand_like(weight) + 0.02
    return encoding


def pairs_of(q: Tensor, k: Tensor, layout: Layout, carried: Tensor | None = None) -> Pairs:
    """As attention on a model makes them; ``carried`` is what the encoding has for every key."""

    def visible(queries: slice) -> Tensor:
        return layout.visible(queries=queries)

    where = layout.query_positions, layout.key_positions
    return Pairs(q, k, *where, SCALE, visible, layout.places(), carried, layout.key_documents)


def carried_by(encoding: Encoding, batch: int, length: int, hidden: int) -> Tensor | None:
    """What an encoding has for each token of a text whose states are random; None where it has nothing."""
    weight = next(encoding.parameters(), None)
    return None if weight is None else encoding.carried(torch.randn(batch, length, hidden, dtype=weight.dtype))


def case(layout: Layout, dtype: torch.dtype = torch.float64, *, states: bool = False) -> list[Tensor]:
    """q, k and v, and the states of every key if they are asked for."""
    torch.manual_seed(1)
    heads = (SPEC.num_heads, SPEC.num_kv_heads, SPEC.num_kv_heads)
    lengths = (layout.query_length, layout.key_length, layout.key_length)
    shapes = [(layout.batch, count, length, SPEC.head_dim) for count, length in zip(heads, lengths, strict=True)]
    shapes += [(layout.batch, layout.key_length, SPEC.hidden_size)] * states
    return [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def _pair_by_pair(definition: Definition, encoding: Encoding, tensors: list[Tensor], layout: Layout) -> Tensor:
    q, k, v = tensors
    weights, visible, shared = dict(encoding.named_parameters()), layout.visible(), SPEC.num_heads // SPEC.num_kv_heads
    rows = []
    for b in range(layout.batch):
        for h in range(SPEC.num_heads):
            for i in range(layout.query_length):
                slots = visible[b, i].nonzero()[:, 0]
                if not len(slots):
                    rows.append(torch.zeros(SPEC.head_dim, dtype=torch.float64))
                    continue
                query, keys, values = q[b, h, i], k[b, h // shared, slots], v[b, h // shared, slots]
                at = int(layout.query_positions[b, i])
                scores = [
                    SCALE * (query * key).sum() + definition(weights, h, at, int(where), query, keys, SCALE)
                    for key, where in zip(keys, layout.key_positions[b, slots], strict=True)
                ]
                rows.append((torch.stack(scores).softmax(0)[:, None] * values).sum(0))
    return torch.stack(rows).view(q.shape)


def _gradients(out: Tensor, wanted: list[Tensor]) -> list[Tensor]:
    torch.manual_seed(2)
    found = torch.autograd.grad(out, wanted, torch.randn_like(out), allow_unused=True)
    return [torch.zeros_like(x) if x_grad is None else x_grad for x, x_grad in zip(wanted, found, strict=True)]


def check_score(method: EncodingMethod, definition: Definition, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every backend that serves the method gives what its definition says, forward and backward, on every layout."""
    encoding = encoding_of(method)
    for where, layout in LAYOUTS.items():
        tensors = case(layout)
        wanted = [*tensors, *encoding.parameters()]
        right = _pair_by_pair(definition, encoding, tensors, layout)
        exact = _gradients(right, wanted)
        for name, size in (("reference", None), ("sdpa", None), ("sdpa", 1)):
            monkeypatch.setattr(scores, "BIAS_BYTES", 64 * 2**20 if size is None else 4 * 8 * 4 * 16 * 2)
            found = _attend(name, encoding, tensors, layout)
            torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-10, msg=lambda said, at=where: f"{at}: {said}")
            torch.testing.assert_close(_gradients(found, wanted), exact, rtol=1e-8, atol=1e-9)
            with torch.no_grad():
                torch.testing.assert_close(_attend(name, encoding, tensors, layout), right, rtol=1e-9, atol=1e-10)


def _attend(name: str, encoding: Any, tensors: list[Tensor], layout: Layout) -> Tensor:
    return attended(name, encoding.score(pairs_of(*tensors[:2], layout)), *tensors, layout)


def attended(name: str, score: Weighting | None, *tensors: Any, scale: float = SCALE, **how: Any) -> Tensor:
    """Attention with a score by the backend of this name; ``tensors`` are q, k, v, and a layout behind them."""
    assert score is not None
    return score.attend(Call.of(*tensors, scale=scale, **how), named(name))
