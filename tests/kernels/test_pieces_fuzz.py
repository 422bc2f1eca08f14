"""Attention in pieces on random settings: its error in float64 beside that of torch's own kernel on the same inputs."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ctxext.kernels import Call, Layout, named
from ctxext.kernels.pieces import attend_pieces
from ctxext.methods.dual_chunk import DualChunk
from ctxext.methods.remap import Band, Piece, PositionMap, RemapMethod
from ctxext.methods.rerope import ReRoPE
from ctxext.methods.self_extend import SelfExtend
from ctxext.methods.streaming import Streaming
from ctxext.spec import RopeSpec
from tests.kernels.cases import error, turned


class Setting(NamedTuple):
    """One call: a method whose borders lie anywhere in the text, and tensors of any shape that a kernel takes."""

    method: RemapMethod
    rope: RopeSpec
    layout: Layout
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype


def _drawn(draw: random.Random, device: str) -> Setting:
    head_dim = draw.choice([32, 64, 128])
    rope = RopeSpec(head_dim, 1e4, draw.randint(24, 200))
    window = draw.randint(1, rope.trained_length - 1)
    exact, chunk = draw.random() < 0.5, draw.randint(12, rope.trained_length - 1)
    methods: list[RemapMethod] = [
        SelfExtend(factor=4, window=window, group=draw.randint(2, 9), exact=exact),
        ReRoPE(factor=4, window=window, exact=exact),
        DualChunk(factor=4, chunk=chunk, local=draw.randint(1, (chunk - 1) // 2)),
        Streaming(factor=4, sinks=draw.randint(1, 6), window=draw.randint(8, rope.trained_length - 7)),
    ]
    batch, length = draw.randint(1, 2), draw.randint(2, 400)
    padding = torch.tensor([[draw.randint(0, length - 1)] for _ in range(batch)])
    cuts = [draw.randint(1, length) for _ in range(2)]
    layouts = [
        Layout.causal(batch, length),
        Layout.causal(batch, draw.randint(1, length), length),
        Layout.padded(torch.arange(length)[None] >= padding),
        Layout.packed([*cuts, length]),
    ]
    kv_heads = draw.choice([1, 2, 3])
    return Setting(
        draw.choice(methods),
        rope,
        draw.choice(layouts).to(torch.device(device)),
        kv_heads * draw.choice([1, 2, 4]),
        kv_heads,
        head_dim,
        draw.choice([torch.float32, torch.float16, torch.bfloat16]),
    )


def _tensors(one: Setting, seed: int) -> list[Tensor]:
    generator, layout = torch.Generator().manual_seed(seed), one.layout
    shapes = [(one.heads, layout.query_length), *[(one.kv_heads, layout.key_length)] * 2]
    drawn = [torch.randn(layout.batch, *shape, one.head_dim, generator=generator) for shape in shapes]
    return [x.to(layout.query_positions.device, one.dtype).requires_grad_() for x in drawn]


def _moved(x: Tensor, where: PositionMap, positions: Tensor, inv_freq: Tensor) -> Tensor:
    """Rotate halves from their own positions to others, in float64."""
    target = where(positions.flatten()).view(positions.shape).double()
    angles = ((target - positions)[..., None] * inv_freq)[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


def _exact(one: Setting, pieces: tuple[Piece, ...] | None, inv_freq: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Dense attention in float64; without pieces, plain attention."""
    queries, keys = one.layout.query_positions, one.layout.key_positions
    repeat, visible = one.heads // one.kv_heads, one.layout.visible()[:, None]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    scores = torch.full((), -torch.inf, dtype=torch.float64, device=q.device)
    for piece in pieces or (Piece(region=Band()),):
        here = piece.region.holds(queries[:, None, :, None], keys[:, None, None, :]) & visible
        turned = _moved(q, piece.query, queries, inv_freq), _moved(k, piece.key, keys, inv_freq)
        found = turned[0] @ turned[1].transpose(-1, -2) * one.head_dim**-0.5 + torch.tensor(piece.weight).log().item()
        scores = torch.where(here, found, scores)
    seen = (scores > -torch.inf).any(-1, keepdim=True)
    return (torch.softmax(scores.masked_fill(~seen, 0.0), -1) * seen) @ v


def _torchs_own(one: Setting, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Plain attention of the same tokens by the kernel that torch chooses."""
    visible = one.layout.visible()[:, None]
    seen = visible.any(-1, keepdim=True)
    k, v = (x.repeat_interleave(one.heads // one.kv_heads, 1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, visible | ~seen) * seen


def check(seed: int, device: str, backend: str) -> None:
    """Require at most twice the error of torch's own kernel, besides the rounding of turned queries and keys."""
    one = _drawn(random.Random(seed), device)
    inv_freq = one.rope.base ** (-torch.arange(0, one.head_dim, 2, dtype=torch.float64, device=device) / one.head_dim)
    inputs, pieces, layout = _tensors(one, seed), one.method.pieces(one.rope, one.rope.trained_length), one.layout
    there = turned(pieces, layout, inv_freq, torch.float32)

    def run() -> Tensor:
        q, k, v = inputs
        call = Call.of(q, k, v, layout, scale=one.head_dim**-0.5, lse=True)
        return attend_pieces(named(backend), call, there)

    wide = [x.detach().double().requires_grad_() for x in inputs]
    outs = run(), _torchs_own(one, *inputs), _exact(one, pieces, inv_freq, *wide), _exact(one, None, inv_freq, *wide)
    up = torch.randn(outs[0].shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(device)
    pairs = zip(outs, (inputs, inputs, wide, wide), strict=True)
    found, fair, exact, plain = ([out, *torch.autograd.grad(out, given, up.to(out.dtype))] for out, given in pairs)
    for name, ours, theirs, right, own in zip(("out", "dq", "dk", "dv"), found, fair, exact, plain, strict=True):
        # A turned query and a turned key are rounded once more each, and so are their gradients.
        allowed = 2 * error(theirs, own) + torch.finfo(one.dtype).eps
        assert error(ours, right) <= allowed, (seed, one, name, error(ours, right), allowed)
    assert torch.equal(run(), outs[0]), (seed, "the same call twice gives the same bits")


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(5), pytest.param(range(5, 20), marks=pytest.mark.nightly)], ids=str)
@pytest.mark.parametrize("backend", ["sdpa", "reference"])
def test_random_settings(backend: str, seeds: range) -> None:
    """The body of the test for a GPU; the reference computes in bands, as a GPU does."""
    for seed in seeds:
        check(seed, "cpu", backend)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("part", range(10))
def test_random_settings_on_a_gpu(part: int) -> None:
    for seed in range(50 * part, 50 * part + 50):
        check(seed, "cuda", "sdpa")
