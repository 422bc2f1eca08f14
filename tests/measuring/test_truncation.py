"""The best of several truncations: which windows, what each sees, and that it is chosen on the tokens compared."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from ctxext.measuring.forward import pass_cost, ticking
from ctxext.measuring.labels import label_of
from ctxext.measuring.loss import truncated_loss
from ctxext.measuring.loss_table import LossTable
from ctxext.measuring.truncation import best_short, is_reference, tail_windows, window_name, window_of, windows_of


def test_windows_are_the_quarters_of_the_trained_length() -> None:
    assert windows_of(8192) == (2048, 4096, 6144, 8192)
    assert windows_of(64) == (16, 32, 48, 64)
    assert windows_of(20) == (10, 15, 20)
    assert windows_of(7) == (7,)
    assert [window_of(window_name(window)) for window in windows_of(64)] == [16, 32, 48, 64]
    assert [window_of(name) for name in ("truncated", "unpatched", "yarn x2", "truncated by hand")] == [None] * 4
    assert [is_reference(name) for name in ("truncated", "truncated 64", "unpatched", "pi")] == [True] * 3 + [False]
    labels = [label_of(name) for name in ("truncated", "truncated 6144", "yarn")]
    assert labels == ["best truncation", "last 6K", "YaRN"]


@pytest.mark.slow
def test_every_window_scores_the_same_tokens(model: LlamaForCausalLM, input_ids: Tensor) -> None:
    """Those of truncated_loss, in as few passes; test_perplexity has these by hand."""
    steps: list[tuple[str, float]] = []
    for window in (10, 20, 30, 40):
        with ticking(model, window_name(window), pass_cost(window, 100), lambda *step: steps.append(step)):
            windows = tail_windows(window, start=40, positions=89, prefix=1)
            losses = torch.cat([one.losses(model, input_ids) for one in windows], dim=1)
        stride = window // 4
        assert losses.shape == (2, 49)
        assert len(windows) == (88 - window) // stride - (40 - window) // stride + 1
        whole = truncated_loss(model, input_ids, window=window, stride=stride, prefix=1)
        torch.testing.assert_close(losses, whole[:, 40:], rtol=1e-5, atol=2e-6)
    ways = [one for window in (10, 20, 30, 40) for one in tail_windows(window, start=40, positions=89)]
    cost = sum(pass_cost(one.positions, 100) for one in ways)
    assert sum(done for _, done in steps) == pytest.approx(cost)
    steps.clear()
    with ticking(model, "inside", pass_cost(20, 100), lambda *step: steps.append(step)):
        for one in tail_windows(20, start=7, positions=89, prefix=1):
            one.losses(model, input_ids)
    inside = sum(pass_cost(one.positions, 100) for one in tail_windows(20, start=7, positions=89))
    assert sum(cost for _, cost in steps) == pytest.approx(inside), "the window itself is a pass too"


def test_the_best_is_that_of_the_tokens_compared() -> None:
    generator = torch.Generator().manual_seed(0)
    base = 3 + torch.rand(2, 24, generator=generator)
    losses = {window: base.clone() for window in (4, 8, 16)}
    losses[4][:, 8:16] -= 0.1
    losses[8][:, 16:] -= 0.2
    losses[16][:, 16:] += 0.5
    table = LossTable.of({window_name(window): [*own] for window, own in losses.items()})
    for start, stop, window in ((8, 16, 4), (16, 24, 8), (0, 8, 16)):
        span = table.span(start, stop)
        assert (span.window, span.window_of("truncated"), span.tokens("truncated")) == (window, window, 16)
        assert torch.equal(torch.stack([*span.losses("truncated")]), losses[window][:, start:stop])
        gaps = [span.difference(window_name(window)) for window in losses]
        assert min(gap.mean for gap in gaps) == 0.0
        assert {gap.baselines for gap in gaps} == {3}
        assert span.versus("truncated") is None
        assert span.difference("truncated 4", "truncated 16").baselines == 1
    assert table.span(8, 9).versus("truncated 4") is not None
    assert LossTable.of({"truncated 4": [base[0, :1]], "one": [base[1, :1]]}).versus("one") is None
    equal = {"truncated 4": [base], "truncated 8": [base], "truncated 16": [base + 1]}
    assert best_short(equal) == "truncated 8", "of equal ones the longest"
    # All tokens weigh the same, whatever text they are of.
    uneven = {"truncated 4": [torch.tensor([1.0]), torch.full((9,), 2.0)]}
    uneven["truncated 8"] = [torch.tensor([5.0]), torch.full((9,), 1.7)]
    assert best_short(uneven) == "truncated 4"
    uneven["truncated 8"][1] -= 0.2
    assert best_short(uneven) == "truncated 8"
