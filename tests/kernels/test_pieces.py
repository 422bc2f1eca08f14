"""Attention in pieces against a dense float64 reference of another form: every backend, every kind of layout."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from packaging.version import Version
from torch import Tensor

from ctxext.errors import BackendUnavailableError
from ctxext.kernels import BACKENDS, AttentionBackend, Call, Layout, Need, named
from ctxext.kernels.blocks import PartRule
from ctxext.kernels.flash import INSTALLED, Flash
from ctxext.kernels.pieces import RotationForm, Turn, TurnedPiece, attend_pieces, need_in_pieces
from ctxext.kernels.reference import Reference
from ctxext.kernels.step import attend_step, plan_step, why_no_kernel
from ctxext.methods.dpe import DPE
from ctxext.methods.dual_chunk import DualChunk
from ctxext.methods.remap import PositionMap, RemapMethod
from ctxext.methods.rerope import ReRoPE
from ctxext.methods.self_extend import SelfExtend
from ctxext.methods.streaming import Streaming
from tests._formulas import dense_attention
from tests._products import pairwise
from tests._remap import ROPE, relative_positions, weights
from tests._steps import launches
from tests.kernels.cases import leave_flex_uncompiled, turned

LENGTH = 203
HEADS, KV_HEADS, HEAD_DIM = 6, 2, 12
METHODS: dict[str, RemapMethod] = {
    "self_extend": SelfExtend(factor=4, window=23, group=7),
    "authors' self_extend": SelfExtend(factor=4, window=23, group=7, exact=False),
    "rerope": ReRoPE(factor=4, window=31, exact=False),
    "leaky": ReRoPE(factor=4, window=24, leak=1 / 8, exact=False),
    "dual_chunk": DualChunk(factor=4, chunk=48, local=8),
    "dpe": DPE(factor=4, window=24, groups=(3, 5, 8, 16)),
    "streaming": Streaming(factor=4, sinks=4, window=48),
}
INV_FREQ = ROPE.base ** (-torch.arange(0, ROPE.rotary_dim, 2, dtype=torch.float64) / ROPE.rotary_dim)


def _gaps() -> Layout:
    positions = torch.cat([torch.arange(100), torch.arange(140, 140 + LENGTH - 100)])
    return Layout.of(positions[None].expand(2, -1), positions[None].expand(2, -1))


def _padded_gaps() -> Layout:
    """More padding than a tile of the tests has queries."""
    positions, documents = torch.arange(0, 90, 2), torch.zeros(90, dtype=torch.long)
    positions = torch.cat([torch.zeros(45, dtype=torch.long), positions])[None]
    documents[:45] = -1
    return Layout.of(positions, positions, documents[None], documents[None])


KEEP = torch.arange(LENGTH)[None] >= torch.tensor([[0], [37]])
DECODING = torch.arange(LENGTH)[None] >= LENGTH - torch.tensor([[1], [LENGTH], [30], [2], [150]])
LAYOUTS: dict[str, Callable[[], Layout]] = {
    "causal": lambda: Layout.causal(2, LENGTH),
    "chunk of a prefill": lambda: Layout.causal(2, 53, LENGTH),
    "decoding": lambda: Layout.causal(2, 1, LENGTH),
    "packed": lambda: Layout.packed([50, 103, 50]),
    "continuous batch": lambda: Layout.packed([50, 103, 50], queries=[1, 53, 50]),
    "padded": lambda: Layout.padded(KEEP),
    "padded, decoding": lambda: Layout.padded(KEEP, query=1),
    "rows that decode": lambda: Layout.padded(DECODING, query=1, analyse=False),
    "static cache": lambda: Layout.cached(2, 7, LENGTH, filled=150),
    "not from the start": lambda: Layout.of(*[torch.arange(5, 5 + LENGTH).expand(2, -1)] * 2),
    "gaps": _gaps,
    "gaps behind padding": _padded_gaps,
}
BOTH_WAYS = ("causal", "chunk of a prefill", "packed", "padded", "static cache", "gaps", "gaps behind padding")
LAYOUTS |= {f"{name}, both ways": lambda name=name: LAYOUTS[name]().both_ways for name in BOTH_WAYS}  # type: ignore[misc]


def _pieces(method: RemapMethod, layout: Layout, dtype: torch.dtype) -> list[TurnedPiece]:
    pieces = list(method.pieces(ROPE, 4 * ROPE.trained_length))
    pieces += [piece.ahead for piece in pieces if layout.sees == "both" and piece.ahead is not None]
    return turned(pieces, layout, INV_FREQ, dtype)


def _rotated(x: Tensor, positions: Tensor) -> Tensor:
    """What the model hands over: halves rotated by each token's own position."""
    half = len(INV_FREQ)
    angles = (positions.double()[:, None, :, None] * INV_FREQ).to(x.dtype)
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin(), rest], -1)


def _tensors(layout: Layout, dtype: torch.dtype, value_dim: int = HEAD_DIM) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(heads: int, length: int, width: int = HEAD_DIM) -> Tensor:
        x = torch.randn(layout.batch, heads, length, width, generator=generator, dtype=torch.float64)
        return x.to(dtype).requires_grad_()

    q, k = draw(HEADS, layout.query_length), draw(KV_HEADS, layout.key_length)
    return q, k, draw(KV_HEADS, layout.key_length, value_dim)


def _call(layout: Layout, q: Tensor, k: Tensor, v: Tensor, softcap: float | None = None) -> Call:
    """What a layer asks for, whose queries and keys the model has rotated."""
    rotated = _rotated(q, layout.query_positions), _rotated(k, layout.key_positions)
    return Call.of(*rotated, v, layout, scale=SCALE, softcap=softcap, lse=True)


def _truth(method: RemapMethod, layout: Layout, q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    """Row by row and document by document, from relative positions written out pair by pair."""
    longest = int(layout.key_positions.max()) + 1
    given = (method, ROPE, min(longest, 256))
    relative, weight = (written(*given, both_ways=layout.sees == "both") for written in (relative_positions, weights))
    rows = []
    for row in range(layout.batch):
        places, keys = layout.query_positions[row], layout.key_positions[row]
        apart = relative[places][:, keys].masked_fill(~layout.visible()[row, :, :, None], torch.nan)
        seen = ~apart[..., 0].isnan().all(-1)
        counted = weight[places][:, keys][seen]
        out = dense_attention(
            q[row][:, seen], k[row], v[row], apart[seen], INV_FREQ, scale=SCALE, weight=counted, **how
        )
        rows.append(out.new_zeros(*q[row].shape[:2], v.shape[3]).index_copy(1, seen.nonzero()[:, 0], out))
    return torch.stack(rows)


class Variant(NamedTuple):
    """A kind of attention beyond the plain one."""

    sinks: bool = False
    softcap: float | None = None
    value_dim: int = HEAD_DIM


SCALE = 0.2
SINKS = torch.linspace(-2, 3, HEADS)
VARIANTS = {
    "sinks": Variant(sinks=True),
    "soft cap": Variant(softcap=1.0),
    "narrow values": Variant(value_dim=7),
    "wide values": Variant(value_dim=20),
    "all": Variant(sinks=True, softcap=1.0, value_dim=7),
}
VARIED = ("self_extend", "dual_chunk", "streaming")


@pytest.fixture(autouse=True)
def _plain_flex_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling costs 10 s per shape on CPU."""
    leave_flex_uncompiled(monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "method", "layout"),
    [
        *((None, *case) for case in itertools.product(METHODS, LAYOUTS)),
        *(
            pytest.param(*case.values, marks=pytest.mark.nightly)
            for case in pairwise(list(VARIANTS), VARIED, [*LAYOUTS])
        ),
    ],
)
def test_output_and_gradients_are_those_of_dense_attention(
    variant: str | None, method: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64: tiles by the CPU's fused kernel and its backward with the merged log-sum-exp, and bands.

    Of variants the reference computes in many small blocks, and what it gives without gradients is the same.
    """
    where, how = LAYOUTS[layout](), Variant() if variant is None else VARIANTS[variant]
    q, k, v = _tensors(where, torch.float64, how.value_dim)
    sinks = SINKS.double().requires_grad_() if how.sinks else None
    inputs = [q, k, v] if sinks is None else [q, k, v, sinks]
    truth = _truth(METHODS[method], where, q, k, v, sinks=sinks, softcap=how.softcap)
    up = torch.randn(truth.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wanted = [truth, *torch.autograd.grad(truth, inputs, up)]
    call, pieces = _call(where, q, k, v, how.softcap), _pieces(METHODS[method], where, torch.float64)
    runs = [("sdpa", 16), ("sdpa", 1000)] if how.softcap is None else [("flex", 1000)]
    if variant is not None:
        monkeypatch.setattr("ctxext.kernels.blocks.CPU_BYTES", 1)
    for name, tile in (*runs, ("reference", 16), ("reference", None)):
        out = attend_pieces(named(name), call, pieces, tile=tile, sinks=sinks)
        found = [out, *torch.autograd.grad(out, inputs, up, retain_graph=True)]
        errors = [float((a - b).detach().abs().max()) for a, b in zip(found, wanted, strict=True)]
        assert all(x < (1e-13 if variant is None else 1e-12) for x in errors), (name, tile, errors)  # NaN is not
        if variant is not None:
            with torch.no_grad():
                assert torch.equal(attend_pieces(named(name), call, pieces, tile=tile, sinks=sinks), out)


STEPS = [name for name in LAYOUTS if "both ways" not in name and "padded" not in name.removeprefix("padded, ")]


@pytest.mark.parametrize(("variant", "method", "layout"), pairwise([None, *VARIANTS], list(METHODS), STEPS))
def test_a_step_is_dense_attention(variant: str | None, method: str, layout: str) -> None:
    """All pieces under one softmax, in float64; of layouts with many queries, the last few."""
    where, how = LAYOUTS[layout](), Variant() if variant is None else VARIANTS[variant]
    q, k, v = (x.detach() for x in _tensors(where, torch.float64, how.value_dim))
    sinks = SINKS.double() if how.sinks else None
    truth = _truth(METHODS[method], where, q, k, v, sinks=sinks, softcap=how.softcap)
    pieces = _pieces(METHODS[method], where, torch.float64)
    call = _call(where, q, k, v, how.softcap)
    found = attend_step(call, plan_step(where, pieces, call.q), sinks=sinks)
    torch.testing.assert_close(found, truth, rtol=0, atol=1e-13)


@torch.no_grad()
def test_the_kernel_of_a_step_is_left_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no gradient and no float64, rotates keys in one way, and knows six pieces."""
    monkeypatch.setattr("ctxext.kernels.step.runs_triton", lambda device: True)
    pieces = METHODS["self_extend"].pieces(ROPE, 4 * ROPE.trained_length)
    ahead = [piece.ahead for piece in pieces if piece.ahead is not None]
    q = torch.zeros(1, HEADS, 1, HEAD_DIM)
    assert why_no_kernel(q, pieces) is None
    assert why_no_kernel(q, (*pieces, *ahead))
    assert why_no_kernel(q, (*pieces, *pieces, *pieces))
    assert why_no_kernel(q.double(), pieces)
    with torch.enable_grad():
        assert why_no_kernel(q, pieces)
    monkeypatch.setattr(torch.version, "hip", "6.3")
    for version, reason in (("3.7.1+rocm6.3", r"compiled by Triton 3\.8 or newer, found 3\.7\.1"), ("3.8.0", "^None$")):
        monkeypatch.setattr("ctxext.kernels.step._triton_version", functools.partial(Version, version))
        assert re.search(reason, str(why_no_kernel(q, pieces)))


def test_sinks_alone_may_be_trained() -> None:
    where = Layout.causal(1, 64)
    method = METHODS["self_extend"]
    q, k, v = (x.detach() for x in _tensors(where, torch.float64))
    sinks = SINKS.double().requires_grad_()
    truth = _truth(method, where, q, k, v, sinks=sinks).sum()
    out = attend_pieces(named("sdpa"), _call(where, q, k, v), _pieces(method, where, torch.float64), sinks=sinks)
    (wanted,), (found,) = torch.autograd.grad(truth, sinks), torch.autograd.grad(out.sum(), sinks)
    assert torch.allclose(found, wanted, atol=1e-13)


@pytest.mark.parametrize("name", ["sdpa", "reference"])
def test_heads_that_are_computed_apart_keep_their_sinks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in long texts: one key head at a time, and some of its query heads in a long tile."""
    monkeypatch.setattr("ctxext.kernels.pieces.SHORTEST", 8)
    monkeypatch.setattr("ctxext.kernels.pieces.TILE", 64)
    monkeypatch.setattr("ctxext.kernels.pieces.BAND_ROWS", LENGTH)
    where, method = Layout.causal(2, LENGTH), METHODS["self_extend"]
    q, k, v = _tensors(where, torch.float64)
    sinks = SINKS.double().requires_grad_()
    truth = _truth(method, where, q, k, v, sinks=sinks)
    out = attend_pieces(named(name), _call(where, q, k, v), _pieces(method, where, torch.float64), sinks=sinks)
    wanted, found = (torch.autograd.grad(x.square().sum(), (q, k, v, sinks)) for x in (truth, out))
    for a, b in zip([out, *found], [truth, *wanted], strict=True):
        assert torch.allclose(a, b, atol=1e-12)


@pytest.mark.parametrize("name", ["sdpa", "reference"])
@pytest.mark.parametrize("new", [1, 20, 34])
def test_settled_keys_go_with_sinks(new: int, name: str) -> None:
    """New tokens whose oldest keys have the rotation of the last piece already."""
    where, method = Layout.causal(2, new, LENGTH), METHODS["self_extend"]
    q, k, v = (x.detach() for x in _tensors(where, torch.float64))
    truth = _truth(method, where, q, k, v, sinks=SINKS.double())
    pieces, settled = _pieces(method, where, torch.float64), LENGTH - 60
    keys, last = _rotated(k, where.key_positions), pieces[-1].key
    keys = torch.cat([last(keys[:, :, :settled], (0, 2), (0, settled)), keys[:, :, settled:]], 2)
    call = Call.of(_rotated(q, where.query_positions), keys, v, where, scale=SCALE, lse=True)
    out = attend_pieces(named(name), call, pieces, settled=settled, sinks=SINKS.double())
    assert float((out - truth).abs().max()) < 1e-13


@pytest.mark.parametrize(
    ("method", "dtype", "layout"), pairwise(VARIED, [torch.bfloat16, torch.float32, torch.float16], list(LAYOUTS))
)
def test_every_precision_is_as_near_as_it_can_be(method: str, dtype: torch.dtype, layout: str) -> None:
    where = LAYOUTS[layout]()
    q, k, v = (x.detach() for x in _tensors(where, dtype))
    truth = _truth(METHODS[method], where, *(x.double() for x in (q, k, v)))
    queries = _rotated(q.double(), where.query_positions).to(dtype)
    keys = _rotated(k.double(), where.key_positions).to(dtype)
    for name, sinks, softcap in (
        ("sdpa", None, None),
        ("reference", None, None),
        ("sdpa", SINKS.to(dtype), None),
        ("reference", None, 2.0),
    ):
        if sinks is not None or softcap is not None:
            wide = None if sinks is None else sinks.double()
            truth = _truth(METHODS[method], where, *(x.double() for x in (q, k, v)), sinks=wide, softcap=softcap)
        call = Call.of(queries, keys, v, where, scale=SCALE, softcap=softcap, lse=True)
        tile = 64 if name == "sdpa" else None
        out = attend_pieces(named(name), call, _pieces(METHODS[method], where, torch.float32), tile=tile, sinks=sinks)
        assert out.dtype == dtype
        # Rotating twice and rounding between: a few units of the last place of q and k, in scores of about 1.
        allowed = 12 * torch.finfo(dtype).eps * float(v.double().abs().max())
        assert float((out.double() - truth).abs().max()) < allowed, name


class OldBackend(Reference):
    """A backend of somebody who wrote it before attention came in pieces."""

    with_lse = AttentionBackend.with_lse


UNABLE = [*map(named, sorted(BACKENDS.keys() - {"sdpa", "reference"})), OldBackend()]


@pytest.mark.parametrize("backend", UNABLE, ids=lambda backend: type(backend).__name__)
def test_backends_that_cannot_here_say_why(backend: AttentionBackend) -> None:
    where = Layout.causal(1, 64)
    call = Call.of(*(x.detach() for x in _tensors(where, torch.float32)), where, scale=SCALE, lse=True)
    why = r"runs on CUDA only|compiles for about 10 s|does not return the log-sum-exp"
    with pytest.raises(BackendUnavailableError, match=why):
        backend.run(call)


class Watched(Reference):
    """Knows whether it was given a mask; in tiles, as most backends."""

    masked = False

    def bands(self, need: Need) -> bool:
        return False

    def with_lse(self, q: Tensor, k: Tensor, v: Tensor, rule: PartRule) -> tuple[Tensor, Tensor]:
        self.masked = self.masked or rule.mask is not None
        return super().with_lse(q, k, v, rule)


@pytest.mark.parametrize(("name", "layout"), pairwise(list(METHODS), list(LAYOUTS)))
def test_what_takes_a_mask_is_not_for_flash_attn_and_all_else_is(
    name: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(INSTALLED, "flash", True)
    where, backend, method = LAYOUTS[layout](), Watched(), METHODS[name]
    q, k, v = (x.detach() for x in _tensors(where, torch.float32))
    call, pieces = Call.of(q, k, v, where, scale=SCALE, lse=True), _pieces(method, where, torch.float32)
    attend_pieces(backend, call, pieces)
    there = {"device": "cuda", "capability": (9, 0), "dtype": torch.bfloat16, "head_dim": 64}
    reason = Flash().refuses(Need(**(vars(need_in_pieces(call, pieces)) | there)))
    assert (reason is not None) == backend.masked


@pytest.mark.parametrize("name", ["sdpa", "reference", "flex"])
def test_a_query_that_sees_nothing_has_no_weight(name: str) -> None:
    q, k, v = (torch.randn(1, 2, 4, 16) for _ in range(3))
    mask = torch.tensor([[True, False, True, True], [False] * 4, [True] * 4, [False, False, False, True]])[None, None]
    out, lse = named(name).with_lse(q, k, v, PartRule(0.25, mask=mask))
    scores = (q @ k.transpose(-1, -2) * 0.25).masked_fill(~mask, -math.inf)
    assert torch.allclose(lse, torch.logsumexp(scores, -1), atol=1e-5)
    assert torch.allclose(out, torch.softmax(scores, -1).nan_to_num() @ v, atol=1e-5)
    assert lse[0, 0, 1] == -math.inf
    assert not out[0, :, 1].any()


@pytest.mark.parametrize("interleaved", [False, True])
def test_turning_on_is_rotating_by_the_other_position(interleaved: bool) -> None:
    x = torch.randn(2, 3, 9, HEAD_DIM, dtype=torch.float64)
    places = torch.stack([torch.arange(9), torch.arange(4, 13)])
    where = PositionMap(group=3, offset=7.0)
    turn = Turn(where, places, INV_FREQ, form=RotationForm(interleaved), dtype=torch.float64)

    def rotate(x: Tensor, positions: Tensor) -> Tensor:
        pairs = x[..., : 2 * len(INV_FREQ)]
        pairs = pairs.unflatten(-1, (-1, 2)) if interleaved else pairs.unflatten(-1, (2, -1)).transpose(-1, -2)
        turns = torch.polar(torch.ones(()).double(), positions.double()[:, None, :, None] * INV_FREQ)
        turned = torch.view_as_complex(pairs.contiguous()) * turns
        back = torch.view_as_real(turned)
        back = back.flatten(-2) if interleaved else back.transpose(-1, -2).flatten(-2)
        return torch.cat([back, x[..., 2 * len(INV_FREQ) :]], -1)

    moved = where(places.flatten()).view(places.shape)
    found = turn(rotate(x, places), (0, 2), (0, 9))
    assert torch.allclose(found, rotate(x, moved), atol=1e-13)
    assert torch.allclose(turn(found, (0, 2), (0, 9), back=True), rotate(x, places), atol=1e-13)
    assert torch.equal(turn(rotate(x, places)[:1, :, 2:5], (0, 1), (2, 5)), found[:1, :, 2:5])


@pytest.mark.parametrize(
    ("where", "operators"),
    [
        (PositionMap(), 4),  # a division, to float64, a scale, an offset
        (PositionMap(group=3, offset=7.0), 4),
        (PositionMap(period=5, scale=2.0, ceiling=3.0), 6),
        (PositionMap(scale=0.0, offset=-1.5), 4),
    ],
)
def test_positions_by_numbers_bring_nothing_from_the_host(where: PositionMap, operators: int) -> None:
    positions = torch.arange(9)
    assert launches(lambda: where(positions), "cpu") == operators
