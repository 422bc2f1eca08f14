"""The Python layer of a real flash-attn 2 under ctxext, over a stand-in of its compiled part (``make flash``)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests._programs import ROOT

PACKAGE = Path(os.environ.get("CTXEXT_FLASH") or Path(sys.prefix) / "flash_attn-2.8.3.post2")
"""Its sources, which ``make flash`` and ``make nightly`` unpack."""
DRAWN = 250


@pytest.mark.nightly
@pytest.mark.skipif(not PACKAGE.is_dir(), reason="no sources of flash-attn 2: make flash")
@pytest.mark.parametrize("seed", range(6))
def test_real_calls_are_right(seed: int) -> None:
    """Outputs and gradients, also of pieces, against float64: at least 900 of 1,500; the others are refused."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(PACKAGE), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-W", "ignore", "-m", "tests.kernels.flash_program", str(seed), str(DRAWN)]
    done = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["wrong"] == []
    tally = found["tally"]
    assert tally["right"] + tally["refused"] == DRAWN
    assert tally["right"] >= 150
    assert tally["in pieces, with gradients"] >= 20
    assert min(tally[name] for name in ("fwd", "varlen_fwd", "bwd", "varlen_bwd", "fwd_kvcache")) >= 3, tally
