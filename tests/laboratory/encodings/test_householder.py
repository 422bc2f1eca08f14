"""The chunked products of transitions against their definition, step by step, and against the authors' values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ctxext.laboratory.encodings.householder import Transitions


def step_by_step(q: Tensor, k: Tensor, w: Tensor, beta: Tensor) -> Tensor:
    """Every query is led back over the tokens one by one; ``[batch, heads, query, key]``, 0 for keys behind it."""
    shared = q.shape[1] // k.shape[1]
    k, w, beta = (x.repeat_interleave(shared, 1) for x in (k, w, beta))
    length = q.shape[2]
    columns, moving = [], torch.zeros_like(q)
    for j in range(length - 1, -1, -1):
        # Row i of ``moving`` is the query at i, once it has passed the transitions of i, i - 1, ... j + 1.
        moving = torch.cat([moving[:, :, :j], q[:, :, j : j + 1], moving[:, :, j + 1 :]], 2)
        columns.append((moving * k[:, :, j : j + 1]).sum(-1))
        along = (moving * w[:, :, j : j + 1]).sum(-1, keepdim=True)
        moving = moving - beta[:, :, j, None, None] * along * w[:, :, j : j + 1]
    return torch.stack(columns[::-1], -1).tril()


def drawn(length: int, heads: int = 4, kv_heads: int = 2, head_dim: int = 6) -> list[Tensor]:
    torch.manual_seed(length)
    q, k, w = (torch.randn(2, count, length, head_dim, dtype=torch.float64) for count in (heads, kv_heads, kv_heads))
    beta = 2 * torch.rand(2, kv_heads, length, dtype=torch.float64)
    return [x.requires_grad_() for x in (q, k, F.normalize(w, dim=-1), beta)]


def scores(q: Tensor, k: Tensor, w: Tensor, beta: Tensor, size: int) -> Tensor:
    length, shared = q.shape[2], q.shape[1] // k.shape[1]
    change = Transitions(k, w, beta, size).change(q, torch.arange(length)[None], length)
    return (q @ k.repeat_interleave(shared, 1).transpose(-1, -2) + change).tril()


@pytest.mark.parametrize(("length", "size"), [(1, 64), (2, 64), (17, 4), (64, 64), (65, 64), (200, 64), (64, 16)])
def test_is_its_definition_forward_and_backward(length: int, size: int) -> None:
    given = drawn(length)
    right, found = step_by_step(*given), scores(*given, size)
    torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-11)
    torch.manual_seed(0)
    grad = torch.randn_like(right)
    exact, gradients = (torch.autograd.grad(one, given, grad, materialize_grads=True) for one in (right, found))
    torch.testing.assert_close(gradients, exact, rtol=1e-9, atol=1e-10)


def test_some_queries_are_computed_as_all_are() -> None:
    """Wherever they stand, in any order, and with more keys behind them than there are queries."""
    q, k, w, beta = (x.detach() for x in drawn(50))
    whole, transitions = scores(q, k, w, beta, 16), Transitions(k, w, beta, 16)
    places = torch.tensor([[31, 7, 8], [0, 15, 16]])
    asking = torch.stack([q[row][:, at] for row, at in enumerate(places)])
    found = transitions.change(asking, places, 32) + asking @ k.repeat_interleave(2, 1).transpose(-1, -2)
    for row, at in enumerate(places):
        for query, place in enumerate(at):
            torch.testing.assert_close(found[row, :, query, : place + 1], whole[row, :, place, : place + 1])


def test_the_change_is_none_where_no_transition_is_between() -> None:
    """A query passes its own transition on the way to every key but its own; and strength 0 changes nothing."""
    q, k, w, beta = (x.detach() for x in drawn(20))
    change = Transitions(k, w, beta, 8).change(q, torch.arange(20)[None], 20)
    assert not change.diagonal(dim1=-2, dim2=-1).any()
    assert change.tril(-1).any()
    assert not Transitions(k, w, 0 * beta, 8).change(q, torch.arange(20)[None], 20).any()


def golden(name: str) -> list[dict[str, Any]]:
    path = Path(__file__).parents[2] / "golden" / f"{name}.json"
    cases: list[dict[str, Any]] = json.loads(path.read_text())["cases"]
    assert cases
    return cases


def test_attention_is_what_the_authors_code_computes() -> None:
    """Their naive form computes in float32; gates are added before the scale, as they do it."""
    for case in golden("path"):
        tensors = [torch.tensor(case[name], dtype=torch.float64) for name in ("q", "k", "v", "w", "beta", "g")]
        q, k, v, w, beta, g = (tensor.transpose(1, 2) for tensor in tensors)
        passed = g.cumsum(-1)
        found = scores(q, k, w, beta, 4) + passed[..., :, None] - passed[..., None, :]
        ahead = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
        weights = (found * case["scale"]).masked_fill(ahead, -torch.inf).softmax(-1)
        out = weights @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)
        right = torch.tensor(case["out"], dtype=torch.float64).transpose(1, 2)
        torch.testing.assert_close(out, right, rtol=2e-6, atol=1e-6)
