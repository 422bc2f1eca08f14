"""The Triton kernels of a text's pieces, in Triton's interpreter, against plain torch in float64."""

from __future__ import annotations

import importlib
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests._programs import ROOT, ran
from tests.kernels._launches import Launches, programs
from tests.referee import twin

pytest.importorskip("triton")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _require_near(found: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    """Hold a result to one rounding of the exact one, and what float32 leaves of it."""
    allowed = exact.abs() * torch.finfo(dtype).eps + 4e-6
    assert bool(((found.double() - exact).abs() <= allowed).all()), dtype


def merges() -> None:
    from ctxext.kernels._merge_kernel import launch

    draw = random.Random(0)
    for index in range(6):
        generator, dtype = torch.Generator().manual_seed(index), DTYPES[index % 3]
        batch, heads, length, width = draw.randint(1, 2), draw.randint(1, 3), draw.randint(1, 20), draw.choice([8, 24])
        bias = draw.choice([0.0, -1.5])
        whole = torch.randn(batch, length + 5, heads, width, generator=generator).to(dtype)
        total = whole.transpose(1, 2)[:, :, 5:]  # part of a longer memory in the order of a layer
        out = torch.randn(batch, heads, length, width, generator=generator).to(dtype)
        total_lse, lse = (torch.randn(batch, length, heads, generator=generator).mul(4).transpose(1, 2) for _ in "12")
        total_lse[:, :, ::3], lse[:, :, ::4] = -torch.inf, -torch.inf
        untouched, exact, both = whole[:, :5].clone(), total.double(), total_lse.double()
        twin.merge(exact, both, out, lse, bias)
        again, again_lse = total.clone(), total_lse.clone()
        launch(total, total_lse, out, lse, bias)
        seen = both > -torch.inf
        _require_near(total[seen], exact[seen], dtype)
        assert torch.allclose(total_lse[seen].double(), both[seen], atol=1e-5)
        assert bool((total_lse[~seen] == -torch.inf).all())
        assert torch.equal(whole[:, :5], untouched)
        launch(again, again_lse, out, lse, bias)
        assert torch.equal(again, total)
        first, first_lse = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
        launch(first, first_lse, out, lse, 0.0)  # the first part is copied as it is
        assert torch.equal(first[lse > -torch.inf], out[lse > -torch.inf])


def turns() -> None:
    from ctxext.kernels._turn_kernel import launch

    draw = random.Random(1)
    for index in range(6):
        generator, dtype = torch.Generator().manual_seed(index), DTYPES[index % 3]
        batch, heads, length, pairs = draw.randint(1, 2), draw.randint(1, 3), draw.randint(1, 20), draw.choice([3, 8])
        width = 2 * pairs + draw.choice([0, 4])
        interleaved, tail, back = (draw.random() < 0.5 for _ in "123")
        x = torch.randn(batch, length, heads, width, generator=generator).to(dtype).transpose(1, 2)
        angles = torch.randn(draw.choice([1, batch]), 1, length, pairs, generator=generator, dtype=torch.float64)
        found = launch(x, angles.cos().float(), angles.sin().float(), interleaved, tail, back)
        exact = twin.rotated(x, angles.cos(), (-angles if back else angles).sin(), interleaved, tail)
        assert found.dtype == dtype
        _require_near(found, exact, dtype)
        assert torch.equal(launch(x, angles.cos().float(), angles.sin().float(), interleaved, tail, back), found)


def launched(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Return what is launched for many rows of 33 tokens."""
    module, launches = importlib.import_module(f"ctxext.kernels._{name}_kernel"), Launches()
    monkeypatch.setattr(module, f"_{name}", launches.of(getattr(module, f"_{name}")))
    x, lse = (torch.empty(1024, 65, 33, *width, device="meta") for width in ([128], []))
    x, angles = x.to(dtype), torch.empty(1, 1, 33, 64, device="meta")
    is_interleaved = dtype == torch.float32
    module.launch(*((x, lse, x, lse, 0.0) if name == "merge" else (x, angles, angles, is_interleaved, False, False)))
    return launches


@pytest.mark.parametrize("name", ["merge", "turn"])
def test_many_rows_start(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA takes at most 65,535 programs on every axis of a grid but the first."""
    assert [grid for _, grid, *_ in launched(name, torch.float16, monkeypatch)] == [(1024 * 65 * 3,)]


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("name", ["merge", "turn"])
def test_kernels_compile_for_a_gpu_that_is_not_there(
    name: str, capability: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    ((program, _),) = programs(launched(name, dtype, monkeypatch), capability)
    assert "cubin" in program.asm


@pytest.mark.nightly
def test_kernels_compute_what_torch_computes_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process where Triton interprets its kernels, as it does only if it is told before its first import."""
    program = "from tests.kernels import test_prefill_kernels as test; test.merges(); test.turns(); print('equal')"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    done = ran(["-c", program], ROOT)
    assert done.stdout.strip().endswith("equal"), done.stderr[-3000:]
