"""What is special to the general path: its three forms, compilation, shards, and which kernel it asks for."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ctxext.kernels import Call, Layout, Need
from ctxext.kernels.pieces import TurnedPiece, attend_pieces
from ctxext.kernels.reference import Reference
from ctxext.kernels.sdpa import Sdpa, kernel_order
from ctxext.methods.remap import Band
from tests._products import pairwise
from tests._programs import ROOT, ran
from tests.kernels.cases import HEAD_DIM, HEADS, KV_HEADS, LAYOUTS, N, case, error, naive, truth

FORMS = {"blocks": Sdpa(block_overhead=0, dense_rows=0), "mask": Sdpa(1 << 60, 0), "dense": Sdpa(0, 1 << 60)}
SLOPES = torch.tensor([0.5, 0.25])


@pytest.mark.parametrize(("how", "layout"), pairwise(list(itertools.product(FORMS, (True, False))), list(LAYOUTS)))
def test_every_form_is_right_wherever_it_is_taken(layout: str, how: tuple[str, bool]) -> None:
    form, biased = how
    one = case(layout, torch.bfloat16, biased=biased)
    inputs = one.tensors()
    out = FORMS[form](*inputs, one.layout, scale=one.scale, slopes=one.slopes)
    found = [out.detach(), *torch.autograd.grad(out, inputs, one.grad)]
    for ours, exact, plain in zip(found, truth(one), naive(one), strict=True):
        assert error(ours, exact) <= 2 * error(plain, exact) if exact.norm() else ours.norm() == 0


@pytest.mark.parametrize("layout", ["decode", "chunked prefill", "causal", "both ways"])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
def test_any_order_in_memory_is_right(transposed: bool, biased: bool, layout: str) -> None:
    """torch's kernels read the numbers of a head side by side, wherever these lie."""
    where, slopes = LAYOUTS[layout](), torch.rand(HEADS) if biased else None
    shapes = [(HEADS, where.query_length), *[(KV_HEADS, where.key_length)] * 2]
    plain = [torch.randn(where.batch, *shape, HEAD_DIM) for shape in shapes]
    stored = [x.mT.contiguous().mT if transposed else x.repeat_interleave(2, 3)[..., ::2] for x in plain]
    right = Reference()(*plain, where, scale=0.1, slopes=slopes)
    torch.testing.assert_close(Sdpa()(*stored, where, scale=0.1, slopes=slopes), right, rtol=0, atol=1e-5)
    if not biased and where.sees == "past":
        one = (TurnedPiece(Band(), None, None),)
        call = Call.of(*stored, where, scale=0.1, lse=True)
        torch.testing.assert_close(attend_pieces(Sdpa(), call, one), right, rtol=0, atol=1e-5)


def _tensors(length: int, heads: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, h, length, 16, generator=generator, requires_grad=True) for h in (2, heads, heads)]


@pytest.mark.nightly
def test_compiles_in_one_graph() -> None:
    """In a process of its own: the runtime shape checker of the test suite cannot be traced."""
    program = Path(__file__).with_name("compiled_program.py")
    done = ran([str(program)], ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["causal", "padded", "decode"]


def test_long_causal_needs_no_mask_and_no_quadratic_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is called plainly causal: so it also works under engines that forbid masks."""
    seen = []
    real = torch.nn.functional.scaled_dot_product_attention

    def spy(q, k, v, mask=None, dropout=0.0, **options):
        seen.append((mask, options["is_causal"], q.shape[-1], v.shape[-1]))
        return real(q, k, v, mask, dropout, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    Sdpa()(*_tensors(64), scale=0.25, slopes=SLOPES)
    Sdpa()(*_tensors(64), Layout.shard(torch.arange(64)[None] * 3), scale=0.25, slopes=SLOPES)
    assert seen == [(None, True, 24, 24)] * 2


def test_the_rounding_math_path_is_never_taken_for_columns() -> None:
    with sdpa_kernel(SDPBackend.MATH):
        out = Sdpa()(*_tensors(64), scale=0.25, slopes=SLOPES)
    right = Reference()(*(x.double() for x in _tensors(64)), scale=0.25, slopes=SLOPES)
    assert error(out, right) < 1e-6
    assert SDPBackend.MATH not in kernel_order(Need(device="cuda", biased=True))
    assert SDPBackend.MATH in kernel_order(Need(device="cuda"))


def test_cudnn_is_the_last_of_the_fused() -> None:
    for capability in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0)):
        for biased in (True, False):
            order = kernel_order(Need(device="cuda", capability=capability, biased=biased))
            fused = [kernel for kernel in order if kernel != SDPBackend.MATH]
            assert fused[0] == SDPBackend.FLASH_ATTENTION
            assert fused[-1] == SDPBackend.CUDNN_ATTENTION


def test_layers_share_the_columns() -> None:
    layout = Layout.causal(1, 32)
    first = Sdpa()(*_tensors(32), layout, scale=0.25, slopes=SLOPES)
    built = dict(layout._memo)
    assert torch.equal(Sdpa()(*_tensors(32), layout, scale=0.25, slopes=SLOPES), first)
    assert {k: id(v) for k, v in layout._memo.items()} == {k: id(v) for k, v in built.items()}
    other = Sdpa()(*_tensors(32), layout, scale=0.25, slopes=SLOPES * 2)
    assert not torch.allclose(other, first)


def test_why_not() -> None:
    assert "no attention dropout" in (Sdpa().why_not(Need(dropout=0.1)) or "")
    assert Sdpa().why_not(Need(device="cuda", dropout=0.1)) is None
    assert "float64" in (Sdpa().why_not(Need(device="mps", biased=True)) or "")
    assert "forbids masks" in (Sdpa().why_not(Need(order="external", window=4)) or "")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"capability": (7, 5), "dtype": torch.bfloat16}, "compute capability 8.0"),
        ({"capability": (7, 5), "dtype": torch.float16}, None),
        ({"capability": (8, 0), "dtype": torch.bfloat16, "head_dim": 64}, None),
        ({"capability": (8, 0), "dtype": torch.bfloat16, "head_dim": 20, "order": "free"}, "multiple of 8, found 20"),
        (
            {"capability": (8, 0), "dtype": torch.bfloat16, "head_dim": 20, "query_length": 3, "key_length": 9},
            "found 20",
        ),
        ({"capability": (8, 0), "dtype": torch.bfloat16, "head_dim": 20}, None),
        ({"capability": (8, 0), "dtype": torch.float32, "head_dim": 18}, "multiple of 4, found 18"),
        ({"capability": (8, 0), "dtype": torch.float32, "head_dim": 20, "order": "free"}, None),
        ({"capability": (8, 0), "dtype": torch.bfloat16, "head_dim": 20, "order": "free", "biased": False}, None),
        ({"capability": (7, 5), "dtype": torch.float16, "head_dim": 20}, "multiple of 8, found 20"),
        ({"capability": (7, 5), "dtype": torch.bfloat16, "biased": False, "lse": True}, "compute capability 8.0"),
        ({"capability": (7, 5), "dtype": torch.float16, "biased": False, "lse": True}, None),
        ({"capability": (8, 0), "dtype": torch.float16, "biased": False, "lse": True, "head_dim": 20}, "found 20"),
        ({"capability": (8, 0), "dtype": torch.float32, "biased": False, "lse": True, "head_dim": 20}, None),
    ],
)
def test_why_no_fused_kernel_on_cuda(changes: dict[str, Any], reason: str | None) -> None:
    """Where the plain path would round the columns, torch would only say that no kernel is available."""
    found = Sdpa().why_not(Need(**({"device": "cuda", "biased": True} | changes)))
    assert found is None if reason is None else reason in (found or "")


@pytest.mark.parametrize("layout", ["both ways", "both ways, left padded", "both ways, packed"])
@pytest.mark.parametrize("rows", [1, 7, N])
def test_a_bias_in_parts_is_the_bias(layout: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However few queries have their bias written out at a time, outputs and gradients are those of all at once."""
    one = case(layout, torch.float32, biased=True)
    found = []
    for size in (rows, N):
        monkeypatch.setattr("ctxext.kernels.sdpa.BIAS_BYTES", 4 * HEADS * one.layout.batch * N * size)
        q, k, v = one.tensors()
        out = Sdpa()(q, k, v, one.layout, scale=one.scale, slopes=one.slopes)
        found.append([out.detach(), *torch.autograd.grad(out, (q, k, v), one.grad)])
    for parts, whole in zip(*found, strict=True):
        torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-5)
