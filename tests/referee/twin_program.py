"""Run by test_referee in its own process, in Triton's interpreter: the twins beside the kernels, on drawn arguments."""

from __future__ import annotations

import sys

import torch

from ctxext.kernels import _merge_kernel, _step_kernel, _turn_kernel
from tests.kernels import step_program
from tests.referee import twin

for seed in range(int(sys.argv[1])):
    _step_kernel.PROGRAMS = 8  # so that a program has several blocks
    case = step_program.Case(step_program.drawn(seed) | {"dtype": "float32"})
    kernel = case.kernels()
    case.k, case.v = case.k.nan_to_num(), case.v.nan_to_num()
    rows, _step_kernel.attend_rows = _step_kernel.attend_rows, twin.attend_rows
    torch.testing.assert_close(case.kernels(), kernel, atol=1e-4, rtol=1e-4)
    _step_kernel.attend_rows = rows
    form, angles = case.setting, torch.randn(1, 1, case.q.shape[2], case.pairs)
    how = (angles.cos(), angles.sin(), form["interleaved"], form["tail"], bool(seed % 2))
    torch.testing.assert_close(twin.turn(case.q, *how), _turn_kernel.launch(case.q, *how), atol=1e-5, rtol=1e-5)
    lse = torch.randn(case.q.shape[:3]).masked_fill(torch.rand(case.q.shape[:3]) < 0.2, -torch.inf)
    both = [(kernel.clone(), lse.clone()) for _ in range(2)]
    for merge, (total, total_lse) in zip((twin.merge, _merge_kernel.launch), both, strict=True):
        merge(total, total_lse, kernel.flip(2), lse.flip(2), 0.3)
    for ours, theirs in zip(*both, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    print("right")
