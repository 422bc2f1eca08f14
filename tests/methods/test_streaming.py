"""StreamingLLM: sinks and a window, with positions counted among the tokens in sight."""

from __future__ import annotations

import pytest
import torch

from ctxext.methods.streaming import Streaming
from tests._remap import ROPE, by_formula, relative_positions


@pytest.mark.parametrize(("sinks", "window"), [(4, 24), (1, 63), (10, 54)])
def test_only_the_first_and_the_nearest_tokens_are_seen(sinks: int, window: int) -> None:
    found = relative_positions(Streaming(factor=4, sinks=sinks, window=window), ROPE, 200)

    def paper(i: int, j: int) -> float | None:
        if i - j < window:
            return i - j
        # In a cache of ``sinks`` + ``window`` tokens the newest one stands last, and sinks stand first.
        return sinks + window - 1 - j if j < sinks else None

    assert torch.equal(found[..., 0].nan_to_num(-1), by_formula(paper, 200).nan_to_num(-1))
    assert found.nan_to_num(0).max() == sinks + window - 1 <= 63


def test_by_default_the_window_takes_what_the_sinks_leave() -> None:
    assert Streaming(factor=2).exact_length(ROPE) == 60
