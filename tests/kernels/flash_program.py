"""Draw calls of flash-attn and hold them to float64; without a GPU, version 2 over a stand-in of its kernels.

    python -m tests.kernels.flash_program 0 250                   # by test_real_flash, with the sources on the path
    python -m tests.kernels.flash_program 0 250 flash3 cuda       # by gpu_run.sh, with what is installed

``flash_attn_2_cuda`` is compiled for GPUs alone. Its stand-in checks arguments as csrc/flash_attn/flash_api.cpp of
2.8.3 does, and computes what mask.h, alibi.h and flash_bwd_kernel.h define, in float64: causal from the bottom right
corner, a log-sum-exp of plus infinity for a query that sees nothing, and in the backward pass weights exp(score - lse)
of the lse that is given.
"""

from __future__ import annotations

import dataclasses
import importlib.machinery
import itertools
import json
import math
import random
import sys
from collections import Counter
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

CALLS: list[str] = []
Scores = tuple[Tensor, Tensor, Tensor, Tensor]
WINDOW, CAP = 9, 5.0
WORST = {torch.bfloat16: 0.012, torch.float16: 0.002}
"""Norm of an error that is fair to make, in parts of the norm of what is right."""


def require(holds: bool, what: str) -> None:
    """Refuse an argument as TORCH_CHECK does."""
    if not holds:
        raise RuntimeError(f"TORCH_CHECK: {what}")


def require_arguments(tensors: tuple[Tensor, ...], slopes: Tensor | None, dropout: float, softcap: float) -> None:
    """What all entry points check."""
    q, k, _ = tensors
    require(q.dtype in WORST, "fp16 and bf16 only")
    require(all(x.dtype == q.dtype and x.stride(-1) == 1 for x in tensors), "one dtype, contiguous last dimension")
    require(q.shape[-1] <= 256 and q.shape[-1] % 8 == 0, "head_size must be a multiple of 8 up to 256")
    require(q.shape[-2] % k.shape[-2] == 0, "number of heads in key/value must divide number of heads in query")
    require(not (softcap > 0 and dropout > 0), "softcapping does not support dropout")
    if slopes is not None:
        require(slopes.dtype == torch.float32 and slopes.shape == (q.shape[-2],), "slopes are float32 [heads]")


def scores_of(q: Tensor, k: Tensor, slopes: Any, scale: float, how: tuple[bool, int, int, float]) -> Scores:
    """Scores in float64 of [seq, heads, head_dim], hidden pairs, the slope of the cap, and queries and keys by head."""
    causal, left, right, softcap = how
    right, left = 0 if causal else right if right < k.shape[0] else -1, left if left < k.shape[0] else -1
    queries, keys = (x.double().transpose(0, 1) for x in (q, k.repeat_interleave(q.shape[1] // k.shape[1], 1)))
    plain = queries @ keys.mT * scale
    bent = torch.tanh(plain / softcap) if softcap > 0 else torch.zeros_like(plain)
    scores = softcap * bent if softcap > 0 else plain
    ahead = torch.arange(k.shape[0]) - torch.arange(q.shape[0])[:, None] - (k.shape[0] - q.shape[0])
    if slopes is not None:
        scores = scores - slopes.double()[:, None, None] * ahead.abs()
    hidden = ((ahead > right) & (right >= 0)) | ((ahead < -left) & (left >= 0))
    return scores, hidden, 1 - bent.square(), queries


def forward(q: Tensor, k: Tensor, v: Tensor, slopes: Any, scale: float, *how: Any) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of one row."""
    scores, hidden, _, _ = scores_of(q, k, slopes, scale, how)  # type: ignore[arg-type]
    blind = hidden.all(-1)
    lse = scores.masked_fill(hidden & ~blind[:, None], -math.inf).logsumexp(-1).masked_fill(blind, math.inf)
    weights = (scores - lse[..., None]).exp().masked_fill(hidden, 0.0)
    values = v.double().repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(0, 1)
    return (weights @ values).transpose(0, 1).to(q.dtype), lse.float()


def backward(up: Tensor, row: tuple[Tensor, ...], lse: Tensor, slopes: Any, scale: float, *how: Any) -> list[Tensor]:
    """Gradients of one row out of the output and the log-sum-exp that are given."""
    q, k, v, out = row
    require(not bool((lse == -math.inf).any()), "infinite weights")
    scores, hidden, bend, queries = scores_of(q, k, slopes, scale, how)  # type: ignore[arg-type]
    groups = q.shape[1] // k.shape[1]
    keys, values = (x.double().repeat_interleave(groups, 1).transpose(0, 1) for x in (k, v))
    weights = (scores - lse.double()[..., None]).exp().masked_fill(hidden, 0.0)
    grad = up.double().transpose(0, 1)
    share = (grad * out.double().transpose(0, 1)).sum(-1, keepdim=True)
    slope = weights * (grad @ values.mT - share) * bend * scale
    by_key = [(slope.mT @ queries), weights.mT @ grad]
    by_key = [x.view(k.shape[1], groups, *x.shape[1:]).sum(1).transpose(0, 1) for x in by_key]
    return [(slope @ keys).transpose(0, 1), *by_key]


def fwd(q, k, v, out, slopes, dropout, scale, *how) -> tuple[Tensor, ...]:  # type: ignore[no-untyped-def]
    CALLS.append("fwd")
    require_arguments((q, k, v), slopes, dropout, how[3])
    rows = [forward(*row, slopes, scale, *how[:4]) for row in zip(q, k, v, strict=True)]
    return *map(torch.stack, zip(*rows, strict=True)), q.new_empty(0), torch.zeros(2, dtype=torch.int64)


def varlen_fwd(q, k, v, out, cu_q, cu_k, *rest) -> tuple[Tensor, ...]:  # type: ignore[no-untyped-def]
    CALLS.append("varlen_fwd")
    (_, _, _, slopes, longest_q, longest_k, dropout, scale, _), how = rest[:9], rest[9:13]
    require_arguments((q, k, v), slopes, dropout, how[3])
    require(cu_q.dtype == cu_k.dtype == torch.int32 and int(cu_q[-1]) == len(q), "cu_seqlens are int32 and whole")
    require(int(cu_q.diff().max()) <= longest_q and int(cu_k.diff().max()) <= longest_k, "longest sequences")
    result, lse = torch.full_like(q, math.nan), torch.full((q.shape[1], len(q)), math.nan)
    for (a, b), (c, d) in zip(*(itertools.pairwise(cu.tolist()) for cu in (cu_q, cu_k)), strict=True):
        result[a:b], lse[:, a:b] = forward(q[a:b], k[c:d], v[c:d], slopes, scale, *how)
    return result, lse, q.new_empty(0), torch.zeros(2, dtype=torch.int64)


def bwd(up, q, k, v, out, lse, dq, dk, dv, slopes, dropout, scale, *how) -> tuple[Tensor, ...]:  # type: ignore[no-untyped-def]
    CALLS.append("bwd")
    require(up.dtype == out.dtype == q.dtype and up.stride(-1) == 1, "dout is as q")
    for number, row in enumerate(zip(q, k, v, out, strict=True)):
        found = backward(up[number], row, lse[number], slopes, scale, *how[:4])
        for to, part in zip((dq, dk, dv), found, strict=True):
            to[number] = part.to(to.dtype)
    return dq, dk, dv, lse.clone()


def varlen_bwd(up, q, k, v, out, lse, dq, dk, dv, cu_q, cu_k, *rest) -> tuple[Tensor, ...]:  # type: ignore[no-untyped-def]
    CALLS.append("varlen_bwd")
    (slopes, _, _, _, scale, _), how = rest[:6], rest[6:10]
    for (a, b), (c, d) in zip(*(itertools.pairwise(cu.tolist()) for cu in (cu_q, cu_k)), strict=True):
        found = backward(up[a:b], (q[a:b], k[c:d], v[c:d], out[a:b]), lse[:, a:b], slopes, scale, *how)
        for to, part, (first, last) in zip((dq, dk, dv), found, ((a, b), (c, d), (c, d)), strict=True):
            to[first:last] = part.to(to.dtype)
    return dq, dk, dv, lse.clone()


def fwd_kvcache(q, k, v, new_k, new_v, lengths, *rest) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
    CALLS.append("fwd_kvcache")
    (slopes, _, scale, causal), (left, right, softcap) = rest[5:9], rest[9:12]
    require_arguments((q, k, v), slopes, 0.0, softcap)
    require(new_k is None and new_v is None and lengths.dtype == torch.int32, "nothing is appended, lengths are int32")
    left = left if left < k.shape[1] else -1  # against the width of the cache, not against what is filled
    rule, each = (slopes, scale, causal, left, right, softcap), zip(q, k, v, lengths.tolist(), strict=True)
    rows = [forward(a, b[:count], c[:count], *rule) for a, b, c, count in each]
    return torch.stack([out for out, _ in rows]), torch.stack([lse for _, lse in rows])


def put_in() -> None:
    """Make the package importable on a CPU, before it and ctxext are imported."""
    extension: Any = ModuleType("flash_attn_2_cuda")
    vars(extension).update({part.__name__: part for part in (fwd, varlen_fwd, bwd, varlen_bwd, fwd_kvcache)})
    extension.__spec__ = importlib.machinery.ModuleSpec("flash_attn_2_cuda", None)
    sys.modules["flash_attn_2_cuda"] = extension
    operator = torch.library.custom_op
    torch.library.custom_op = lambda *given, device_types=None, **named: operator(*given, **named)  # type: ignore[misc]
    torch.cuda.get_device_capability = lambda *_: (9, 0)


CHOICES: dict[str, list[Any]] = {
    "width": [(64, 64), (80, 80), (96, 96), (128, 128), (256, 256), (192, 128), (36, 36)],
    "heads": [(4, 2), (6, 6), (4, 1)],
    "biased": [False, True],
    "window": [None, WINDOW],
    "softcap": [None, CAP],
    "training": [False, True],
    "dtype": [*WORST],
    "strided": [False, True],
    "method": [None, None, "self_extend", "dual_chunk"],
}


def drawn(seed: int, number: int) -> tuple[dict[str, Any], Any, list[Tensor]]:
    """Return a point, its layout, and queries, keys, values and the gradient of the output."""
    from tests.kernels.cases import LAYOUTS

    draw = random.Random(f"{seed} {number}")
    point = {name: draw.choice(values) for name, values in CHOICES.items()}
    point["layout"] = draw.choice([*LAYOUTS])
    layout, generator = LAYOUTS[point["layout"]](), torch.Generator().manual_seed(number)
    (width, value_dim), (heads, kv_heads) = point["width"], point["heads"]
    sizes = [(heads, layout.query_length, width), (kv_heads, layout.key_length, width)]
    sizes += [(kv_heads, layout.key_length, value_dim), (heads, layout.query_length, value_dim)]
    tensors = [torch.randn(layout.batch, n, h, d, generator=generator).to(point["dtype"]) for h, n, d in sizes]
    tensors = [x.transpose(1, 2) if point["strided"] else x.transpose(1, 2).contiguous() for x in tensors]
    return point, layout, tensors


def attend(backend: Any, point: dict[str, Any], layout: Any, inputs: list[Tensor]) -> Tensor | None:
    """Return the output of a call, which is refused or served as on a GPU; None if it is refused."""
    from ctxext.kernels import Call
    from ctxext.kernels.pieces import attend_pieces, need_in_pieces
    from ctxext.methods import known_methods
    from ctxext.spec import RopeSpec
    from tests.kernels.cases import turned

    method, heads, device = point["method"], point["heads"][0], inputs[0].device
    how: dict[str, Any] = {"scale": point["width"][0] ** -0.5, "softcap": point["softcap"], "lse": method is not None}
    if method is None:
        how["slopes"] = 2.0 ** -torch.arange(1, heads + 1, device=device).float() if point["biased"] else None
        how["window"] = point["window"]
    call, made = Call.of(*inputs, layout, **how), []
    need = call.need
    if method is not None:
        spec = RopeSpec(rotary_dim=32, base=10000.0, trained_length=48)
        pieces = known_methods()[method](factor=4.0).pieces(spec, 192)
        made = turned(pieces, layout, 1e4 ** -(torch.arange(16, device=device).double() / 16), inputs[0].dtype)
        need = need_in_pieces(call, made)
    on_gpu = need if need.device == "cuda" else dataclasses.replace(need, device="cuda", capability=(9, 0))
    if backend.name != "reference" and backend.refuses(on_gpu) is not None:
        return None
    return attend_pieces(backend, call, made) if made else backend.attend(call)


def results(backend: Any, point: dict[str, Any], layout: Any, tensors: list[Tensor]) -> list[Tensor]:
    """Return the output and its gradients; nothing for a call that is refused."""
    inputs = [x.detach().requires_grad_(point["training"]) for x in tensors[:3]]
    out = attend(backend, point, layout, inputs)
    if out is None:
        return []
    is_constant = not point["training"] or not out.requires_grad  # of padding alone nothing is computed
    return [out.detach(), *(() if is_constant else torch.autograd.grad(out, inputs, tensors[3]))]


def main(seed: int, count: int, name: str = "flash", device: str = "cpu") -> int:
    """Draw calls, print what became of them, and return the number of wrong ones."""
    if device == "cpu":
        put_in()
    from ctxext.kernels import named
    from ctxext.kernels.reference import Reference
    from tests.kernels.cases import error

    tally, wrong = Counter[str](), list[list[Any]]()
    for number in range(count):
        point, layout, tensors = drawn(seed, number)
        CALLS.clear()
        there = layout.to(torch.device(device)), [x.to(device) for x in tensors]
        found = [x.cpu() for x in results(named(name), point, *there)]
        if not found:
            tally["refused"] += 1
            continue
        exact = results(Reference(), point, layout, [x.double() for x in tensors])
        errors = [error(ours, right) for ours, right in zip(found, exact, strict=False)]
        if max(errors) > WORST[point["dtype"]] * (2 if point["method"] else 1):  # pieces are rounded before they merge
            wrong.append([number, errors, {name: str(value) for name, value in point.items()}])
            continue
        tally["right"] += 1
        tally["in pieces, with gradients"] += point["method"] is not None and len(found) > 1
        tally.update(dict.fromkeys(CALLS, 1))
    print(json.dumps({"tally": tally, "wrong": wrong}))
    return len(wrong)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:3]), *sys.argv[3:]) > 0)
