"""Retrieval heads: which pairs of tokens each kind of head sees, and at which relative position."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from ctxext.errors import InvalidParameterError
from ctxext.methods.dual_chunk import DualChunk
from ctxext.methods.remap import RemapMethod
from ctxext.methods.rerope import ReRoPE
from ctxext.methods.retrieval_heads import RetrievalHeads
from ctxext.methods.self_extend import SelfExtend
from tests._remap import ROPE, by_formula, relative_positions, weights

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


def test_heads_that_read_far_do_so_by_self_extend() -> None:
    """Written out from its definition: groups of 8 beyond 32 tokens, each key there counting for 8 ** -0.3."""
    method = far_of(window=0.5, group=8, thinning=0.3, far_window=32)

    def definition(i: int, j: int) -> float | None:
        if i - j < 32 or i < ROPE.trained_length:
            return i - j
        return i // 8 - j // 8 + 32 - 4

    positions = relative_positions(method, ROPE, LENGTH)
    assert torch.equal(positions[..., 0].nan_to_num(-1), by_formula(definition, LENGTH).nan_to_num(-1))
    counted = weights(method, ROPE, LENGTH)
    assert math.isclose(float(counted[150, 20]), 8**-0.3)
    assert float(counted[150, 3]) == float(counted[150, 149]) == float(counted[63, 20]) == 1
    assert float(counted[150, 4]) < 1


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


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"heads": [1, 1]}, r"heads must be different numbers of groups, found \(1, 1\)"),
        ({"heads": [-1]}, r"heads\[0\] must be a whole number, at least 0, found -1"),
        ({"heads": "scores.txt"}, "heads must be a list of numbers of groups, or the path of a .json file"),
        ({"heads": [1], "share": 0.2}, "share must be left out where heads lists the groups"),
        ({"heads": [1], "threshold": 0.2}, "threshold must be left out where heads lists the groups"),
        ({"share": 0.2, "threshold": 0.2}, "share must be left out where threshold is given"),
        ({"share": 0.0}, "share must be a finite number, above 0 and at most 1"),
        ({"leak": 0.5}, "leak must be left out unless far is rerope"),
        ({"far": "dual_chunk", "far_window": 8}, "far_window must be left out unless far is self_extend or rerope"),
        ({"far": "plain", "exact": False}, "factor must be 1 with far='plain'"),
        ({"far": "plain", "factor": 1.0}, "exact must be False with far='plain'"),
        ({"sinks": 0}, "sinks must be a whole number"),
    ],
)
def test_bad_parameters_are_named(parameters: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidParameterError, match=said):
        RetrievalHeads(**{"factor": 4.0, **parameters})


def test_a_window_leaves_room_for_the_sinks() -> None:
    with pytest.raises(InvalidParameterError, match="window must be from 1 to 60 tokens"):
        far_of(window=61).exact_length(ROPE)
