"""Self-Extend against the paper's arithmetic, and where the authors' own leaves the trained positions."""

from __future__ import annotations

import pytest
import torch

from ctxext.errors import InvalidParameterError
from ctxext.methods import self_extend
from ctxext.methods.self_extend import SelfExtend, largest_relative_position, longest_text, smallest_group
from tests._remap import ROPE, by_formula, relative_positions, weights


@pytest.mark.parametrize(("window", "group"), [(24, 4), (23, 5), (8, 7), (63, 3), (16, 1)])
def test_positions_are_the_papers(window: int, group: int) -> None:
    length = min(150, longest_text(window, group, 63))
    method = SelfExtend(factor=length / 64, window=window, group=group, exact=False)

    def paper(i: int, j: int) -> float:  # section 3: FLOOR(i / G) + W - FLOOR(W / G) against FLOOR(j / G)
        return i - j if i - j < window else i // group + window - window // group - j // group

    found = relative_positions(method, ROPE, length)
    assert torch.equal(found[..., 0].nan_to_num(-1), by_formula(paper, length).nan_to_num(-1))


@pytest.mark.parametrize("window", [1, 7, 16, 32, 48])
@pytest.mark.parametrize("reach", [48, 56, 63])
def test_the_smallest_group_keeps_the_reach_and_a_smaller_one_does_not(window: int, reach: int) -> None:
    for length in (65, 100, 128, 250):
        group = smallest_group(length, window, reach)
        assert group is not None
        assert largest_relative_position(length, window, group) <= reach
        assert group == 1 or largest_relative_position(length, window, group - 1) > reach
        assert longest_text(window, group, reach) >= length
        found = relative_positions(SelfExtend(factor=length / 64, window=window, reach=reach), ROPE, length)
        assert found[64:].nan_to_num(0).max() <= reach, "inside the trained window, distances are what they are"


def test_the_smallest_group_is_found_without_trying_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reach at the end of the window needs groups of nearly the whole text."""
    for length, window in ((250, 7), (101, 60), (3000, 48)):
        for reach in range(window, 63):
            sizes = [size for size in range(1, length + 1) if largest_relative_position(length, window, size) <= reach]
            assert smallest_group(length, window, reach) == sizes[0]
    tried = 0

    def counted(*numbers: int) -> int:
        nonlocal tried
        tried += 1
        return largest_relative_position(*numbers)

    monkeypatch.setattr(self_extend, "largest_relative_position", counted)
    for reach in (4096, 4097, 4100):
        assert smallest_group(10**9, 4096, reach)
    assert tried < 4 * 4096


def test_the_authors_rule_gives_out_a_position_that_was_never_trained() -> None:
    """(L - W) G + W >= N, as their README has it: with equality, the first token is L positions away from the last."""
    window, group, length = 48, 5, 128
    assert length == (64 - window) * group + window
    assert largest_relative_position(length, window, group) == 64, "where L - 1 = 63 is the last that was trained"
    with pytest.raises(InvalidParameterError, match="reaches 125 tokens, found a target of 128"):
        SelfExtend(factor=2, window=window, group=group).pieces(ROPE, length)
    assert SelfExtend(factor=2, window=window, reach=63).pieces(ROPE, length)[1].key.group == 6


def test_a_group_that_does_not_divide_the_window_is_rounded_as_in_decoding() -> None:
    """Their flash prefill takes W / G, so that prefill and decoding differ (scores by a fraction of a position)."""
    method = SelfExtend(factor=2, window=33, group=5)
    far = method.pieces(ROPE, 128)[1]
    assert far.query.offset == 33 - 33 // 5 != 33 - 33 / 5


def test_a_token_of_a_far_group_counts_for_less_but_the_first_ones_of_a_text() -> None:
    near, sinks, far = SelfExtend(factor=2, window=16, group=4, thinning=0.5, sinks=2).pieces(ROPE, 128)
    assert (near.weight, sinks.weight, far.weight) == (1, 1, 0.5)
    assert (sinks.query, sinks.key) == (far.query, far.key)
    counted = weights(SelfExtend(factor=2, window=16, group=4, thinning=1.0, sinks=2), ROPE, 128)
    wanted = by_formula(lambda i, j: 1 if i < 64 or i - j < 16 or j < 2 else 1 / 4, 128)
    assert torch.equal(counted.tril(), wanted.nan_to_num(0))


def test_the_authors_let_every_token_count_for_one() -> None:
    near, far = SelfExtend(factor=2, window=16, group=4, thinning=0).pieces(ROPE, 128)
    assert near.weight == far.weight == 1
    alone = SelfExtend(factor=2, window=16, group=4, thinning=0.5, sinks=0).pieces(ROPE, 128)
    assert [piece.weight for piece in alone] == [1, 0.5], "no piece for no tokens"


@pytest.mark.parametrize(("factor", "exponent"), [(1.5, 0), (2, 0), (2**1.5, 0.25), (4, 0.5), (6, 0.5)])
def test_tokens_are_thinned_out_by_how_far_a_text_is_extended(factor: float, exponent: float) -> None:
    *_, far = SelfExtend(factor=factor, window=16, group=8).pieces(ROPE, int(factor * 64))
    assert far.weight == pytest.approx(8**-exponent, rel=1e-12)


def test_shares_of_the_trained_length_are_tokens() -> None:
    assert SelfExtend(factor=2, window=0.5).pieces(ROPE, 128) == SelfExtend(factor=2, window=32).pieces(ROPE, 128)
    shares = SelfExtend(factor=2, window=0.25, reach=0.75).pieces(ROPE, 128)
    assert shares == SelfExtend(factor=2, window=16, reach=48).pieces(ROPE, 128)


def test_queries_inside_the_trained_window_keep_all_distances() -> None:
    method = SelfExtend(factor=2, window=24)
    assert method.exact_length(ROPE) == 64
    found = relative_positions(method, ROPE, 128)[..., 0].nan_to_num(-1)
    authors = relative_positions(SelfExtend(factor=2, window=24, exact=False), ROPE, 128)[..., 0].nan_to_num(-1)
    assert torch.equal(found[:64, :64], by_formula(lambda i, j: i - j, 64).nan_to_num(-1))
    assert torch.equal(found[64:], authors[64:])
    assert SelfExtend(factor=2, window=24, exact=False).exact_length(ROPE) == 24, (
        "texts of a window are exact otherwise"
    )


@pytest.mark.parametrize("window", [48, 55, 56, 57, 60, 0.875, 0.95])
def test_a_wide_window_leaves_far_tokens_an_order(window: float) -> None:
    far = SelfExtend(factor=4, window=window, thinning=0).pieces(ROPE, 256)[1]
    assert far.key.group <= 256 / 2, "at least two groups"
