"""Layouts that every backend must get right, and what "right" costs in a given precision."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ctxext.kernels import Layout, flex
from ctxext.kernels.pieces import RotationForm, Turn, TurnedPiece
from ctxext.kernels.reference import Reference
from ctxext.methods.remap import Piece, PositionMap

N = 96
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64


def leave_flex_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run FlexAttention with dynamo's settings as in use, but without the compiler, which takes 10 s for each shape."""
    with monkeypatch.context() as making:
        making.setattr(torch, "compile", lambda function, **_: function)
        kernel = flex._compiled.__wrapped__("cpu")
    monkeypatch.setattr(flex, "_compiled", lambda _: kernel)


def _keep(*rows: tuple[int, int]) -> Tensor:
    index = torch.arange(N)
    return torch.stack([(index >= start) & (index < stop) for start, stop in rows])


def _permuted() -> Layout:
    order = torch.randperm(N, generator=torch.Generator().manual_seed(1))
    return Layout.of(order[None], order[None])


def _packed_cache() -> Layout:
    positions = torch.cat([torch.arange(40), torch.arange(N - 40)])[None]
    documents = (torch.arange(N) >= 40).long()[None]
    return Layout.of(positions[:, -20:], positions, documents[:, -20:], documents)


def _packed_skipping() -> Layout:
    positions = torch.cat([torch.arange(40), torch.arange(0, 2 * (N - 40), 2)])[None]
    documents = (torch.arange(N) >= 40).long()[None]
    return Layout.of(positions, positions, documents, documents)


LAYOUTS: dict[str, Callable[[], Layout]] = {
    "causal": lambda: Layout.causal(2, N),
    "left padded": lambda: Layout.padded(_keep((0, N), (N // 2, N), (7, N))),
    "right padded": lambda: Layout.padded(_keep((0, N), (0, N // 2), (0, 1))),
    "an empty row": lambda: Layout.padded(_keep((0, N), (0, 0))),
    "nothing but padding": lambda: Layout.padded(_keep((0, 0))),
    "packed": lambda: Layout.packed([30, 1, 50, N - 81]),
    "packed, skipping positions": _packed_skipping,
    "skipping positions": lambda: Layout.of(torch.arange(N)[None] * 7 + 3, torch.arange(N)[None] * 7 + 3),
    "permuted": _permuted,
    "decode": lambda: Layout.causal(2, 1, N),
    "padded decode": lambda: Layout.padded(_keep((0, N), (N // 2, N)), query=1),
    "speculative decode": lambda: Layout.causal(2, 5, N),
    "chunked prefill": lambda: Layout.causal(2, 32, N),
    "padded chunk": lambda: Layout.padded(_keep((0, N), (N // 2, N)), query=32),
    "static cache": lambda: Layout.cached(2, 32, N, filled=70),
    "static cache decode": lambda: Layout.cached(2, 1, N, filled=70),
    "packed cache": _packed_cache,
    "both ways": lambda: Layout.causal(2, N).both_ways,
    "both ways, left padded": lambda: Layout.padded(_keep((0, N), (N // 2, N), (7, N))).both_ways,
    "both ways, right padded": lambda: Layout.padded(_keep((0, N), (0, N // 2), (0, 1))).both_ways,
    "both ways, an empty row": lambda: Layout.padded(_keep((0, N), (0, 0))).both_ways,
    "both ways, packed": lambda: Layout.packed([30, 1, 50, N - 81]).both_ways,
    "both ways, permuted": lambda: _permuted().both_ways,
    "both ways, skipping": lambda: Layout.of(torch.arange(N)[None] * 7 + 3, torch.arange(N)[None] * 7 + 3).both_ways,
    "both ways, static cache": lambda: Layout.cached(2, 32, N, filled=70).both_ways,
    "both ways, decode": lambda: Layout.causal(2, 1, N).both_ways,
}


@dataclass(frozen=True)
class Case:
    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    layout: Layout
    slopes: Tensor | None
    window: int | None = None
    scale: float = HEAD_DIM**-0.5
    softcap: float | None = None

    def tensors(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        return [x.detach().to(dtype or x.dtype).requires_grad_() for x in (self.q, self.k, self.v)]


def case(
    name: str,
    dtype: torch.dtype,
    *,
    biased: bool,
    window: int | None = None,
    kv_heads: int = KV_HEADS,
    value_dim: int = HEAD_DIM,
    softcap: float | None = None,
) -> Case:
    layout = LAYOUTS[name]()
    generator = torch.Generator().manual_seed(0)

    def random(heads: int, length: int, width: int = HEAD_DIM) -> Tensor:
        return torch.randn(layout.batch, heads, length, width, generator=generator).to(dtype)

    q, grad = random(HEADS, layout.query_length), random(HEADS, layout.query_length, value_dim)
    k, v = random(kv_heads, layout.key_length), random(kv_heads, layout.key_length, value_dim)
    slopes = 2.0 ** -torch.arange(1, HEADS + 1).double() if biased else None
    return Case(q, k, v, grad, layout, slopes, window, softcap=softcap)


def turned(pieces: Iterable[Piece], layout: Layout, inv_freq: Tensor, dtype: torch.dtype) -> list[TurnedPiece]:
    """Pieces as a layer has them, of queries and keys that are rotated in halves; equal rotations are made once."""
    made: dict[object, Turn] = {}

    def turn(where: PositionMap, positions: Tensor) -> Turn | None:
        if where.changes_nothing:
            return None
        new = Turn(where, positions, inv_freq, form=RotationForm(), dtype=dtype)
        return made.setdefault((where, id(positions)), new)

    return [
        TurnedPiece(p.region, turn(p.query, layout.query_positions), turn(p.key, layout.key_positions), p.weight)
        for p in pieces
    ]


def truth(case: Case, *, backward: bool = True) -> list[Tensor]:
    """Output and gradients in float64, from the same rounded inputs."""
    inputs = case.tensors(torch.float64)
    how = {"scale": case.scale, "slopes": case.slopes, "window": case.window, "softcap": case.softcap}
    out = Reference()(*inputs, case.layout, **how)
    return [out.detach(), *(torch.autograd.grad(out, inputs, case.grad.double()) if backward else ())]


def naive(case: Case, *, backward: bool = True) -> list[Tensor]:
    """Output and gradients of a plain dense-bias run in the case's own dtype: the error that is fair to make."""
    q, k, v = inputs = case.tensors()
    repeat = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(repeat, 1).transpose(-1, -2) * case.scale
    if case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    if case.slopes is not None:
        distance = case.layout.query_positions[:, None, :, None] - case.layout.key_positions[:, None, None, :]
        distance = distance.abs() if case.layout.sees == "both" else distance
        scores = scores - (case.slopes[:, None, None] * distance).to(scores.dtype)
    visible = case.layout.visible(case.window)[:, None]
    scores = scores.masked_fill(~visible, -math.inf)
    weights = torch.softmax(scores.masked_fill(~visible.any(-1, keepdim=True), 0.0), -1)
    out = weights.masked_fill(~visible, 0.0) @ v.repeat_interleave(repeat, 1)
    return [out.detach(), *(torch.autograd.grad(out, inputs, case.grad) if backward else ())]


def torchs_own(case: Case, *, backward: bool = True) -> list[Tensor]:
    """Output and gradients of the kernel that torch chooses for a dense bias; of a naive run with a soft cap."""
    if case.softcap is not None:
        return naive(case, backward=backward)
    q, k, v = inputs = case.tensors()
    visible = case.layout.visible(case.window)[:, None]
    some = visible.any(-1, keepdim=True)
    bias = torch.zeros(visible.shape, dtype=q.dtype, device=q.device)
    if case.slopes is not None:
        distance = case.layout.query_positions[:, None, :, None] - case.layout.key_positions[:, None, None, :]
        bias = (-case.slopes[:, None, None] * distance.abs()).to(q.dtype)
    bias = bias.masked_fill(~(visible | ~some), -math.inf).expand(*q.shape[:3], k.shape[2])
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    out = F.scaled_dot_product_attention(q, k, v, bias, scale=case.scale) * some
    return [out.detach(), *(torch.autograd.grad(out, inputs, case.grad) if backward else ())]


def error(found: Tensor, right: Tensor) -> float:
    """Norm of the difference, in parts of the norm of the right one."""
    assert found.isfinite().all()
    found, right = found.detach(), right.detach()
    return float((found.double() - right).norm() / right.norm().clamp(min=1e-30))


class Largest(TorchDispatchMode):
    """Numbers in the largest tensor that an operation returned, and the bytes of the one with most."""

    numbers = bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        self.numbers = max([self.numbers, *(x.untyped_storage().nbytes() // x.itemsize for x in tensors)])
        self.bytes = max([self.bytes, *(x.untyped_storage().nbytes() for x in tensors)])
        return result
