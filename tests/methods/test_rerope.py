"""ReRoPE and Leaky ReRoPE against the author's arithmetic."""

from __future__ import annotations

import torch

from ctxext.methods.rerope import ReRoPE
from tests._remap import ROPE, by_formula, relative_positions


def test_beyond_the_window_all_keys_stand_at_one_distance() -> None:
    found = relative_positions(ReRoPE(factor=4, window=24, exact=False), ROPE, 200)
    assert torch.equal(found[..., 0].nan_to_num(-1), by_formula(lambda i, j: min(i - j, 24), 200).nan_to_num(-1))


def test_a_leak_lets_distances_grow_slowly() -> None:
    """The author's ``leaky_rerope_patch.py``: the query at (i + W (k - 1)) / k, the key at j / k."""
    found = relative_positions(ReRoPE(factor=3, window=24, leak=1 / 8, exact=False), ROPE, 192)

    def author(i: int, j: int) -> float:
        return i - j if i - j < 24 else (i + 24 * (8 - 1)) / 8 - j / 8

    assert torch.allclose(found[..., 0].nan_to_num(-1), by_formula(author, 192).nan_to_num(-1), rtol=0, atol=1e-12)
    assert found.nan_to_num(0).max() <= 63
    ReRoPE(factor=2, window=32, leak=0.326315).pieces(ROPE, 128)  # the most that a refusal advises


def test_by_default_texts_of_the_trained_length_are_exact_and_any_length_works() -> None:
    method = ReRoPE(factor=50)
    assert method.exact_length(ROPE) == 64
    found = relative_positions(method, ROPE, 150)
    near = by_formula(lambda i, j: i - j, 64).nan_to_num(-1)
    assert torch.equal(found[:64, :64, 0].nan_to_num(-1), near), "the last distance is where far keys stand"
    assert found.nan_to_num(0).max() == 63
