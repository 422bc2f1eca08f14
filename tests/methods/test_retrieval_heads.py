"""Retrieval heads: which pairs of tokens each kind of head sees, and at which relative position."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ctxext.methods.dual_chunk import DualChunk
from ctxext.methods.remap import RemapMethod
from ctxext.methods.rerope import ReRoPE
from ctxext.methods.retrieval_heads import RetrievalHeads
from ctxext.methods.self_extend import SelfExtend
from tests._remap import ROPE, by_formula, relative_positions

LENGTH = 200


def far_of(**parameters: Any) -> RetrievalHeads:
    return RetrievalHeads(**{"factor": 4, "heads": (0,)} | parameters)


@pytest.mark.parametrize("exact", [True, False])
def test_the_other_heads_see_the_first_and_the_nearest_tokens(exact: bool) -> None:
    sinks, window = 3, 24
    method = far_of(window=window, sinks=sinks, exact=exact)

    def definition(i: int, j: int) -> float | None:
        if i - j < window or (exact and i < ROPE.trained_length):
            return i - j
        return sinks + window - 1 - j if j < sinks else None

    positions = relative_positions(method.near_method, ROPE, LENGTH)
    assert torch.equal(positions[..., 0].nan_to_num(-1), by_formula(definition, LENGTH).nan_to_num(-1))
    assert method.exact_length(ROPE) == (64 if exact else window)


@pytest.mark.parametrize(
    ("parameters", "method"),
    [
        ({}, SelfExtend(factor=4)),
        ({"far_window": 20, "reach": 60, "sinks": 2}, SelfExtend(factor=4, window=20, reach=60, sinks=2)),
        ({"factor": 2}, SelfExtend(factor=2)),
        ({"factor": 2, "thinning": 0.5}, SelfExtend(factor=2, thinning=0.5)),
        ({"far": "rerope", "far_window": 40, "leak": 0.1}, ReRoPE(factor=4, window=40, leak=0.1)),
        ({"far": "dual_chunk", "chunk": 48, "local": 8}, DualChunk(factor=4, chunk=48, local=8)),
        ({"far": "rerope", "temperature": "logn"}, ReRoPE(factor=4, temperature="logn")),
    ],
)
def test_the_far_method_gets_its_own_parameters(parameters: dict[str, Any], method: RemapMethod) -> None:
    assert far_of(**parameters).far_method == method
    assert far_of(**parameters).pieces(ROPE, 256) == method.pieces(ROPE, 256)


def test_plain_positions_save_work_inside_the_trained_window() -> None:
    method = RetrievalHeads(far="plain", heads=[1], window=16, exact=False)
    positions = relative_positions(method, ROPE, 64)[..., 0]
    assert torch.equal(positions.nan_to_num(-1), by_formula(lambda i, j: i - j, 64).nan_to_num(-1))
    assert method.exact_length(ROPE) == 16
    assert method.far_method is None


def test_its_saved_form_is_the_same_method() -> None:
    method = far_of(threshold=None, window=0.5, thinning=0.25)
    assert RetrievalHeads.from_dict(method.to_dict()) == method
    assert RetrievalHeads(factor=2, heads=[7, 3, 5]).heads == (3, 5, 7)
