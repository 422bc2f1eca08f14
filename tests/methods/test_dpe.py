"""DPE: Self-Extend with a group size for each frequency."""

from __future__ import annotations

import pytest
import torch

from ctxext.methods.dpe import DPE, PUBLISHED
from ctxext.methods.self_extend import SelfExtend
from ctxext.spec import RopeSpec
from tests._remap import ROPE, by_formula, relative_positions


def test_each_frequency_has_the_positions_of_its_group() -> None:
    sizes = (1, 3, 5, 8)
    found = relative_positions(DPE(factor=3, window=23, groups=sizes, exact=False), ROPE, 192)
    for frequency, size in enumerate(sizes):

        def paper(i: int, j: int, size: int = size) -> float:
            return i - j if i - j < 23 else i // size + 23 - 23 // size - j // size

        assert torch.equal(found[..., frequency].nan_to_num(-1), by_formula(paper, 192).nan_to_num(-1))


def test_equal_groups_are_self_extend() -> None:
    one = relative_positions(DPE(factor=2, window=32, groups=(4,)), ROPE, 128)
    other = relative_positions(SelfExtend(factor=2, window=32, group=4), ROPE, 128)
    assert torch.equal(one.nan_to_num(-1), other.nan_to_num(-1))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_groups_are_for_eighths_of_the_frequencies(name: str) -> None:
    rope = RopeSpec(128, 5e5, 8192)
    far = DPE(factor=16, groups=name).pieces(rope, 131072)[1]
    assert isinstance(far.key.group, tuple)
    assert len(far.key.group) == 64
    assert far.key.group[::8] == PUBLISHED[name]
    assert far.key.group[7] == far.key.group[0]
