"""Run by test_sdpa in its own process: the SDPA path compiles in one graph, and a new length compiles no new one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ctxext.kernels import Layout
from ctxext.kernels.sdpa import Sdpa

SLOPES = torch.tensor([0.5, 0.25])


def causal(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return Sdpa()(q, k, v, scale=0.25, slopes=SLOPES)


def padded(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return Sdpa()(q, k, v, Layout.padded(keep), scale=0.25, slopes=SLOPES)


def decode(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return Sdpa()(q[:, :, -1:], k, v, scale=0.25, slopes=SLOPES)


def check(attend: Callable[..., Tensor]) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    counter = torch._dynamo.utils.counters["stats"]
    graphs = []
    for length in (24, 32, 40, 48):
        q, k, v = (torch.randn(1, heads, length, 16, requires_grad=True) for heads in (2, 1, 1))
        keep = torch.arange(length)[None] >= 5
        out = compiled(q, k, v, keep)
        torch.testing.assert_close(out, attend(q, k, v, keep), rtol=1e-5, atol=1e-6)
        out.sum().backward()
        assert k.grad.isfinite().all()
        graphs.append(counter["unique_graphs"])
    assert graphs[1] == graphs[-1], f"a new length compiled a new graph: {graphs}"


if __name__ == "__main__":
    for function in (causal, padded, decode):
        check(function)
        print(function.__name__)
