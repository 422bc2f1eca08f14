"""Real flash-attn under ctxext without a GPU (``make flash``): 2 over a stand-in of its kernels, 4 compiled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests._programs import ROOT

PACKAGE = Path(os.environ.get("CTXEXT_FLASH") or Path(sys.prefix) / "flash_attn-2.8.3.post2")
"""Sources of version 2, which ``make flash`` and ``make nightly`` unpack."""
FLASH4 = Path(os.environ.get("CTXEXT_FLASH4") or Path(sys.prefix) / "flash_attn_4-4.0.0b36")
"""Version 4 and what it compiles with, which they install."""
DRAWN = 250
NO_KERNEL = {"sm_90": {}, "sm_100": {"ALiBi at 128": "found 136", "latent": "found 192"}}
"""Calls for which version 4 has no kernel on a target, with a word of the reason."""


def run(program: str, *arguments: str, paths: list[Path]) -> Any:
    """Run a program with further packages, and return what it prints as JSON."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [*paths, ROOT])), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", program, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return json.loads(done.stdout)


@pytest.mark.nightly
@pytest.mark.skipif(not PACKAGE.is_dir(), reason="no sources of flash-attn 2: make flash")
@pytest.mark.parametrize("seed", range(6))
def test_real_calls_are_right(seed: int) -> None:
    """Outputs and gradients, also of pieces, against float64: at least 900 of 1,500; the others are refused."""
    found = run("tests.kernels.flash_program", str(seed), str(DRAWN), paths=[PACKAGE])
    assert found["wrong"] == []
    tally = found["tally"]
    assert tally["right"] + tally["refused"] == DRAWN
    assert tally["right"] >= 150
    assert tally["in pieces, with gradients"] >= 20
    assert min(tally[name] for name in ("fwd", "varlen_fwd", "bwd", "varlen_bwd", "fwd_kvcache")) >= 3, tally


@pytest.mark.nightly
@pytest.mark.skipif(not FLASH4.is_dir(), reason="no flash-attn 4: make flash")
@pytest.mark.parametrize("target", NO_KERNEL)
def test_every_call_of_version_4_compiles(target: str) -> None:
    """Its real kernels for a GPU that is not here; what they compute is not seen."""
    packages = FLASH4 / "nvidia_cutlass_dsl" / "dsl_packages"  # as a .pth file says, for site-packages alone
    told = run("tests.kernels.flash4_program", target, paths=[FLASH4, packages])
    kernels = {name: int(told.pop(name)) for name in ("forward", "backward")}
    refused = {name: reason for name, reason in told.items() if reason != "compiled"}
    assert refused.keys() == NO_KERNEL[target].keys()
    assert all(word in refused[name] for name, word in NO_KERNEL[target].items())
    assert kernels["forward"] >= 12
    assert kernels["backward"] >= 4
