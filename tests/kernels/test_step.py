"""The kernels of a step: exact in Triton's interpreter, two launches, and programs for GPUs that are not here."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

from ctxext.kernels.pieces import RotationForm
from ctxext.kernels.step import TRITON_FOR_AMD
from tests._programs import ROOT, ran
from tests.kernels._launches import Launches, programs, step

triton = pytest.importorskip("triton")
step_kernel = importlib.import_module("ctxext.kernels._step_kernel")

SETTINGS = 14
# Without a GPU, dynamo would trace into Triton itself. Graphs take tensors without memory.
TRACED = """
import torch.utils._triton
torch.utils._triton.has_triton = lambda: True
from ctxext.kernels._step_kernel import attend_rows
from tests.kernels._launches import step
graphs = []
def backend(graph, _):
    graphs.append(sum("triton_kernel" in str(node.target) for node in graph.graph.nodes))
    return graph.forward
compiled = torch.compile(attend_rows, fullgraph=True, backend=backend)
print(*[tuple(compiled(**step(slots=slots)).shape) for slots in (256, 300, 333, 512, 999)], graphs, sep="; ")
"""


@pytest.mark.nightly
def test_the_error_is_a_few_last_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside float64; naive attention errs as much. Also the same bits twice, and 0 for a query that sees nothing."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    done = ran([str(Path(__file__).with_name("step_program.py")), "0", str(SETTINGS)], ROOT)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one for one in found if not one["places"] <= (4 if one["dtype"] == "float32" else 2)] == []
    assert [one for one in found if not (one["repeats"] and one["blind is 0"])] == []
    assert {one["dtype"] == one["dtype of output"] for one in found} == {True}
    seen = {name: {str(one[name]) for one in found} for name in found[0]}
    few = {"dtype": 3, "pieces": 3, "tokens": 3, "heads": 4, "width": 8, "slots": 5, "softcap": 3, "turned": 5}
    assert {name: len(seen[name]) >= least for name, least in few.items()} == dict.fromkeys(few, True)
    assert all(len(seen[name]) == 2 for name in ("interleaved", "tail", "sinks", "padded", "blind", "spread", "split"))
    assert sum(one["blind queries"] > 0 for one in found) >= 3
    assert sum(one["settled"] > 0 for one in found) >= 2


def launched(monkeypatch: pytest.MonkeyPatch, **setting: Any) -> Launches:
    """Return what one step launches."""
    launches = Launches()
    with monkeypatch.context() as patch:
        for name in ("_attend", "_merge"):
            patch.setattr(step_kernel, name, launches.of(getattr(step_kernel, name)))
        step_kernel.attend_rows(**step(**setting))
    return launches


@pytest.mark.parametrize(
    "setting", [{}, {"tokens": 8, "batch": 3}, {"heads": (71, 1), "slots": 5}, {"slots": 1 << 17}, {"near": 99}]
)
def test_a_step_is_two_launches(monkeypatch: pytest.MonkeyPatch, setting: dict[str, Any]) -> None:
    launches = launched(monkeypatch, **setting)
    assert [kernel for kernel, *_ in launches] == [step_kernel._attend, step_kernel._merge]
    whole, groups, lines = launches[0][1], *launches[1][1]
    arguments = step(**setting)
    assert lines * groups == arguments["q"].shape[:3].numel()
    # Every program has slots, every line a program, and a large GPU enough programs.
    assert (whole[1] - 1) * launches[0][3]["BLOCK"] < arguments["k"].shape[2]
    assert (whole[2] - 1) * launches[0][3]["LINES"] < lines <= whole[2] * launches[0][3]["LINES"]
    assert 1 <= whole[0] * whole[1] * whole[2] <= step_kernel.PROGRAMS


def test_a_step_of_many_rows_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA takes at most 65,535 programs on every axis of a grid but the first."""
    for _, grid, *_ in launched(monkeypatch, batch=9000, slots=16):
        assert grid[0] == 9000 * 8
        assert max(grid[1:]) < 1 << 16


@pytest.mark.nightly
def test_one_graph_holds_a_step_of_any_length() -> None:
    """In a process of its own: the runtime shape checker of the test suite cannot be traced."""
    done = ran(["-c", TRACED], ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "; ".join(["(1, 32, 1, 128)"] * 5 + ["[2, 2]"])


@pytest.mark.nightly
@pytest.mark.parametrize("setting", [{}, {"near": 99}], ids=["whole", "split"])
def test_compiles_inside_a_graph_of_inductor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, setting: dict[str, Any]
) -> None:
    """It hands a kernel float64 and int64 numbers, where Triton by itself hands it float32 and int32."""
    for program, _ in compiled(monkeypatch, tmp_path, 90, ("i64", "fp64"), **setting):
        assert ".f64" not in re.sub(r"\.param \.f64|ld\.param\.f64|\.f32\.f64", "", program.asm["ptx"])


EACH = {
    "llama": {},
    "llama, several": {"tokens": 8},
    "one key head": {"width": 64, "values": 64, "pairs": 32, "heads": (71, 1)},
    "several": {"width": 64, "values": 64, "pairs": 8, "heads": (9, 3), "tokens": 8},
    "odd": {"width": 80, "values": 80, "pairs": 40, "form": RotationForm(interleaved=True)},
    "latent": {"width": 192, "pairs": 32, "heads": (16, 16), "form": RotationForm(interleaved=True, tail=True)},
    "gemma": {"width": 256, "values": 256, "pairs": 128, "heads": (8, 4)},
    "split": {"near": 2000},
}


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("target", [80, 90, 100])
@pytest.mark.parametrize("setting", EACH)
def test_compiles_for_gpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, setting: str, target: int, dtype: torch.dtype
) -> None:
    """Without a device, for Ampere, Hopper and Blackwell: at most two registers are spilled of 16 bits; memory fits.

    No load is of one number, but where pairs are interleaved.
    """
    chosen = step_kernel.tile_of
    monkeypatch.setattr(step_kernel, "tile_of", lambda *given, **_: chosen(*given, before_hopper=target == 80))
    for program, constants in compiled(monkeypatch, tmp_path, target, dtype=dtype, **EACH[setting]):
        assert spilled(program, tmp_path) <= (24 if dtype == torch.float32 else 8)
        assert program.metadata.shared <= 99 << 10
        ptx = program.asm["ptx"]
        is_staged = constants.get("STAGES", 1) > 1  # the next blocks are loaded while one is multiplied
        assert ("cp.async.c" in ptx) == is_staged
        assert dtype == torch.float32 or constants.get("STEP") == 2 or "ld.global.b16" not in ptx


@pytest.mark.slow  # by day too: the newest Triton is that of ``make newest``
@pytest.mark.skipif(
    Version(triton.__version__) < TRITON_FOR_AMD, reason="this Triton does not compile it: why_no_kernel"
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("setting", EACH)
def test_compiles_for_an_amd_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, setting: str, dtype: torch.dtype
) -> None:
    """Without a device, for CDNA 3."""
    monkeypatch.setattr(torch.version, "hip", "6.3")
    for program, _ in compiled(monkeypatch, tmp_path, "gfx942", dtype=dtype, **EACH[setting]):
        assert spilled(program, tmp_path) <= (24 if dtype == torch.float32 else 16)
        assert program.metadata.shared <= 64 << 10


def spilled(program: Any, place: Path) -> int:
    """Bytes that a compiled program keeps in memory for want of registers, or registers of an AMD GPU."""
    if "amdgcn" in program.asm:
        assert len(program.asm["hsaco"]) > 5_000
        return sum(map(int, re.findall(r"\.[sv]gpr_spill_count:\s+(\d+)", program.asm["amdgcn"])))
    assert len(program.asm["cubin"]) > 10_000
    (place / "program.cubin").write_bytes(program.asm["cubin"])
    words = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", place / "program.cubin"]
    printed = subprocess.run(words, capture_output=True, text=True, check=True)
    (stack,) = re.findall(r"STACK:(\d+)", printed.stdout + printed.stderr)
    return int(stack)


def compiled(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    target: int | str,
    as_: Sequence[str] = ("i32", "fp32"),
    **setting: Any,
) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield the programs of a step, for a GPU that is not there, and the constants of each."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    yield from programs(launched(monkeypatch, **setting), target, as_)
