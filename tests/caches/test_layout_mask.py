"""Which mask functions of transformers show every token to every other, and code that computes with its mask."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import masking_utils
from transformers.masking_utils import causal_mask_function, or_masks

from ctxext.caches.layout_mask import LayoutMask
from ctxext.errors import IncompatibleError
from ctxext.probe.code import shows_all

ALWAYS = or_masks(causal_mask_function, lambda *args: torch.tensor(True))  # as in EmbeddingGemma
PACKED = masking_utils.packed_sequence_mask_function(torch.zeros(1, 8, dtype=torch.long))


@pytest.mark.parametrize(
    ("mask_function", "all_is_shown"),
    [
        (masking_utils.bidirectional_mask_function, True),
        (ALWAYS, True),
        (causal_mask_function, False),
        (masking_utils.sliding_window_bidirectional_mask_function(4), False),
        (or_masks(causal_mask_function, lambda *args: torch.tensor(False)), False),
        (or_masks(causal_mask_function, PACKED), False),
        (or_masks(causal_mask_function, lambda b, h, i, j: (i < 4) & (j < 4)), False),
        (masking_utils.and_masks(ALWAYS, PACKED), False),
    ],
)
def test_what_is_shown(mask_function: object, all_is_shown: bool) -> None:
    assert shows_all(mask_function) == all_is_shown
    if all_is_shown:
        with torch.device("meta"):
            assert shows_all(mask_function)


@pytest.mark.parametrize(
    "compute",
    [
        lambda mask: mask.dtype,
        lambda mask: mask.shape[-1],
        lambda mask: mask == 0,
        lambda mask: mask != torch.zeros(1),
        lambda mask: mask[:, 0],
        lambda mask: mask & torch.ones(1, dtype=torch.bool),
        lambda mask: torch.ones(1) + mask,
        lambda mask: torch.where(mask, 0.0, 1.0),
        lambda mask: torch.cat([mask, torch.ones(1)]),
    ],
)
def test_a_layer_that_computes_with_its_mask_is_told_so(compute: Callable[[Any], Any]) -> None:
    with pytest.raises(IncompatibleError, match="computes with the attention mask"):
        compute(LayoutMask(None))


def test_a_layout_in_place_of_a_mask_is_compared_and_copied_as_any_object() -> None:
    mask = LayoutMask(None)
    assert mask in [mask]
    assert mask not in (None, copy.copy(mask))
    assert not hasattr(mask, "dtype")
