"""Remapped models read token by token through the kernels of a step, in Triton's interpreter: one pass in numbers."""

from __future__ import annotations

import json

import pytest

from tests._programs import ROOT, ran

pytest.importorskip("triton")


@pytest.mark.nightly
@pytest.mark.parametrize(
    "methods",
    [("retrieval_heads",), ("self_extend", "dual_chunk", "rerope", "streaming", "dpe")],
    ids=["heads", "others"],
)
def test_steps_through_the_kernels_are_one_pass(monkeypatch: pytest.MonkeyPatch, methods: tuple[str, ...]) -> None:
    """On dynamic and static caches, a padded row beside a full one, one to three tokens at a time."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    done = ran(["-m", "tests.attention.step_program", *methods], ROOT, code=0)
    errors = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(errors) == len(methods)
    assert all(error < 2e-6 for pair in errors for error in pair), errors
