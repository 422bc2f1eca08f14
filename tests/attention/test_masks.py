"""Which mask functions of transformers show every token to every other."""

from __future__ import annotations

import pytest
import torch
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    or_masks,
    packed_sequence_mask_function,
    sliding_window_bidirectional_mask_function,
)

from ctxext.core.code import shows_all

ALWAYS = or_masks(causal_mask_function, lambda *args: torch.tensor(True))  # as in EmbeddingGemma
PACKED = packed_sequence_mask_function(torch.zeros(1, 8, dtype=torch.long))


@pytest.mark.parametrize("mask_function", [bidirectional_mask_function, ALWAYS])
def test_all_is_shown(mask_function: object) -> None:
    assert shows_all(mask_function)
    with torch.device("meta"):
        assert shows_all(mask_function)


@pytest.mark.parametrize(
    "mask_function",
    [
        causal_mask_function,
        sliding_window_bidirectional_mask_function(4),
        or_masks(causal_mask_function, lambda *args: torch.tensor(False)),
        or_masks(causal_mask_function, PACKED),
        or_masks(causal_mask_function, lambda b, h, i, j: (i < 4) & (j < 4)),
        and_masks(ALWAYS, PACKED),
    ],
)
def test_some_may_be_hidden(mask_function: object) -> None:
    assert not shows_all(mask_function)
