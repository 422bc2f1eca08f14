"""PaTH-FoX without any transition is a forgetting gate; ``test_path`` has the whole definition."""

from __future__ import annotations

import pytest
import torch

from ctxext.kernels import Layout
from ctxext.laboratory.encodings.path_fox import PaTHFoX
from tests._encodings import SCALE, SPEC, encoding_of, pairs_of


@pytest.mark.slow
def test_without_transitions_only_the_gates_are_left() -> None:
    encoding = encoding_of(PaTHFoX())
    weights = dict(encoding.named_parameters())
    weights["strong_bias"].data.fill_(-torch.inf)
    states = torch.randn(1, 9, SPEC.hidden_size, dtype=torch.float64)
    q = torch.randn(1, SPEC.num_heads, 9, SPEC.head_dim, dtype=torch.float64)
    score = encoding.score(pairs_of(q, q[:, : SPEC.num_kv_heads], Layout.causal(1, 9), encoding.carried(states)))
    found = score.rows(slice(None))
    for head in range(SPEC.num_heads):
        gates = torch.sigmoid(states[0] @ weights["gate"][head] + weights["gate_bias"][head])
        for i in range(9):
            for j in range(i + 1):
                expected = SCALE * torch.log(gates[j + 1 : i + 1]).sum()
                torch.testing.assert_close(found[0, head, i, j], expected, rtol=1e-9, atol=1e-12)
