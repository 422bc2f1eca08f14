"""STRING against the paper's arithmetic."""

from __future__ import annotations

import pytest
import torch

from ctxext.methods.string import STRING
from ctxext.spec import RopeSpec
from tests._remap import ROPE, by_formula, relative_positions


@pytest.mark.parametrize(("shift", "local"), [(21, 4), (40, 8), (64, 1)])
def test_far_keys_are_shifted_once(shift: int, local: int) -> None:
    """Section 4: distances from S on become d - S + W. Each key counts once; the authors' prefill counts S twice."""
    length = 64 + shift - local
    found = relative_positions(STRING(factor=length / 64, shift=shift, local=local), ROPE, length)

    def paper(i: int, j: int) -> float:
        return i - j if i - j < shift else i - j - shift + local

    assert torch.equal(found[..., 0].nan_to_num(-1), by_formula(paper, length).nan_to_num(-1))
    assert found.nan_to_num(0).max() == 63


def test_the_shift_is_a_third_or_what_the_target_needs() -> None:
    rope = RopeSpec(8, 1e4, 8192)
    assert STRING(factor=1).exact_length(rope) == 8192 // 3
    assert STRING(factor=1.5).exact_length(rope) == 4096 + 128
    assert relative_positions(STRING(factor=1.5, local=4), ROPE, 96).nan_to_num(0).max() == 63
