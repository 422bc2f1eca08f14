"""PaTH and PaTH-FoX against their formula, led back over the tokens one by one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ctxext.errors import IncompatibleError
from ctxext.kernels import Layout
from ctxext.laboratory import scores
from ctxext.laboratory.encodings.path import PaTH
from ctxext.methods import known_methods
from ctxext.methods.encoding import Encoding
from tests._encodings import LAYOUTS, SCALE, SPEC, attended, case, encoding_of, pairs_of

SHARED = SPEC.num_heads // SPEC.num_kv_heads


def transitions(weights: dict[str, Tensor], states: Tensor, kv: int) -> list[Tensor]:
    """The matrix of each token of one document."""
    size, found = SPEC.head_dim, []
    raw = [weights["outer"][kv * size : (kv + 1) * size] @ (weights["inner"] @ state) for state in states]
    for t, state in enumerate(states):
        mixed = sum(weights["mix"][kv, :, 2 - back] * raw[t - back] for back in range(3) if t >= back)
        direction = mixed * torch.sigmoid(mixed)
        direction = direction / direction.norm()
        beta = 2 / (1 + torch.exp(-(weights["strong"][kv] @ state) - weights["strong_bias"][kv]))
        found.append(torch.eye(size, dtype=torch.float64) - beta * torch.outer(direction, direction))
    return found


def by_definition(encoding: Encoding, tensors: list[Tensor], layout: Layout) -> Tensor:
    q, k, v, states = tensors
    weights, visible, rows = dict(encoding.named_parameters()), layout.visible(), []
    for b in range(layout.batch):
        seen = [row.nonzero()[:, 0] for row in visible[b]]
        # The last query of a document sees all of it; the matrices of its tokens are the same for all queries.
        whole = {int(slots[0]): slots for slots in seen if len(slots)}
        every = [(first, slots, kv) for first, slots in whole.items() for kv in range(SPEC.num_kv_heads)]
        turning = {(first, kv): transitions(weights, states[b, slots], kv) for first, slots, kv in every}
        for h in range(SPEC.num_heads):
            for i in range(layout.query_length):
                slots, kv = seen[i], h // SHARED
                if not len(slots):
                    rows.append(torch.zeros(SPEC.head_dim, dtype=torch.float64))
                    continue
                turns, way, scores = turning[int(slots[0]), kv], q[b, h, i], []
                forgotten = torch.zeros((), dtype=torch.float64)
                for place in range(len(slots) - 1, -1, -1):
                    scores.append(SCALE * (way @ k[b, kv, slots[place]] + forgotten))
                    way = way @ turns[place]
                    if "gate" in weights:
                        gate = torch.sigmoid(weights["gate"][h] @ states[b, slots[place]] + weights["gate_bias"][h])
                        forgotten = forgotten + torch.log(gate)
                rows.append(torch.stack(scores[::-1]).softmax(0) @ v[b, kv, slots])
    return torch.stack(rows).view(q.shape)


@pytest.mark.parametrize("name", ["path", "path_fox"])
@pytest.mark.parametrize("where", LAYOUTS)
def test_is_its_definition_forward_and_backward(name: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    encoding, layout = encoding_of(known_methods()[name].of({"rank": 5, "strength": 1.0})), LAYOUTS[where]
    tensors = case(layout, states=True)
    wanted = [*tensors, *encoding.parameters()]
    right = by_definition(encoding, tensors, layout)
    grad = torch.randn_like(right)
    exact = torch.autograd.grad(right, wanted, grad)
    q, k, v, states = tensors
    for backend, size in (("reference", None), ("sdpa", None), ("sdpa", 1)):
        monkeypatch.setattr(scores, "BIAS_BYTES", 64 * 2**20 if size is None else 4 * 32 * 16 * 3)
        score = encoding.score(pairs_of(q, k, layout, encoding.carried(states)))
        found = attended(backend, score, q, k, v, layout)
        torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-10)
        gradients = torch.autograd.grad(found, wanted, grad)
        torch.testing.assert_close(gradients, exact, rtol=1e-8, atol=1e-9)


def test_begins_almost_without_positions() -> None:
    """Strengths begin where they are told to, whatever the text is; and with none, scores are products alone."""
    torch.manual_seed(0)
    encoding = PaTH().build(SPEC).double()
    states = torch.randn(1, 9, SPEC.hidden_size, dtype=torch.float64)
    carried = encoding.carried(states)
    begins = torch.full((1, 2, 9), 0.01, dtype=torch.float64)
    torch.testing.assert_close(2 * torch.sigmoid(carried[..., SPEC.head_dim]), begins, rtol=1e-6, atol=0)
    encoding.strong_bias.data.fill_(-torch.inf)
    q = torch.randn(1, 4, 9, SPEC.head_dim, dtype=torch.float64)
    score = encoding.score(pairs_of(q, q[:, :2], Layout.causal(1, 9), encoding.carried(states)))
    assert not score.rows(slice(None)).any()


def test_numbers_of_tokens_are_asked_for() -> None:
    q = torch.randn(1, 4, 9, SPEC.head_dim)
    with pytest.raises(IncompatibleError, match="without the numbers of each token"):
        PaTH().build(SPEC).score(pairs_of(q, F.relu(q[:, :2]), Layout.causal(1, 9)))
