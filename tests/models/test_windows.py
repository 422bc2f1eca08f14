"""Sliding windows: never silently left to cap the reach."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ctxext
from ctxext.errors import IncompatibleError
from tests._models import RECENT, logits, tiny, tokens
from tests.walk.tiny import TRAINED_LENGTH


def last_sees_first(model: Any) -> bool:
    inputs = tokens()
    other = inputs.clone()
    other[0, 0] = 40 + (int(other[0, 0]) - 39) % 88
    return not torch.equal(logits(model, inputs)[:, -1], logits(model, other)[:, -1])


def test_lifted_equals_a_model_built_without_windows() -> None:
    lifted = ctxext.patch(tiny("mistral", sliding_window=16), "yarn", factor=4.0, sliding_window="lift")
    without = ctxext.patch(tiny("mistral", sliding_window=None), "yarn", factor=4.0)
    assert torch.equal(logits(lifted, tokens()), logits(without, tokens()))


def test_kept_windows_are_named_in_the_description() -> None:
    model = ctxext.patch(tiny("mistral", sliding_window=16), "yarn", factor=4.0, sliding_window="keep")
    assert not last_sees_first(model)
    assert "still sees only the last 16 tokens" in " ".join(ctxext.describe(model).notes)
    assert model.config.sliding_window == 16


@pytest.mark.slow
@pytest.mark.parametrize("method", ["yarn", "dynamic_ntk", "alibi"])
def test_a_window_as_wide_as_the_extension_caps_nothing(method: str) -> None:
    wide, target = tiny("mistral", sliding_window=4 * TRAINED_LENGTH), 4 * TRAINED_LENGTH
    ctxext.patch(wide, method, factor=4.0)
    assert wide.config.sliding_window == target
    assert not any("sees only" in note for note in ctxext.describe(wide).notes)
    without = ctxext.patch(tiny("mistral", sliding_window=None), method, factor=4.0)
    inputs = tokens(target)
    torch.testing.assert_close(logits(wide, inputs), logits(without, inputs), atol=1e-5, rtol=0)
    ctxext.unpatch(wide)
    with pytest.raises(IncompatibleError, match=rf"the last {target} tokens.*an extension to {target + 64} tokens"):
        ctxext.patch(wide, method, factor=5.0)
    narrow = tiny("mistral", sliding_window=target - 1)
    with pytest.raises(IncompatibleError, match=f"sees only the last {target - 1} tokens"):
        ctxext.patch(narrow, method, factor=4.0)


def test_a_window_that_caps_nothing_may_still_be_lifted_or_kept() -> None:
    for choice, expected in (("lift", None), ("keep", 4 * TRAINED_LENGTH)):
        model = tiny("mistral", sliding_window=4 * TRAINED_LENGTH)
        ctxext.patch(model, "yarn", factor=4.0, sliding_window=choice)
        assert model.config.sliding_window == expected
        assert not any("sees only" in note for note in ctxext.describe(model).notes)


def test_some_windows_by_design_need_no_answer_and_are_not_lifted() -> None:
    model = tiny("gemma3_text")
    with pytest.raises(IncompatibleError, match="already see the whole text"):
        ctxext.patch(model, "yarn", factor=4.0, sliding_window="lift")
    ctxext.patch(model, "yarn", factor=4.0)
    assert "sliding windows of 16 tokens by design" in " ".join(ctxext.describe(model).notes)


@pytest.mark.skipif(not RECENT, reason="transformers 5.17 has no such model")
def test_windows_that_the_config_holds_per_layer_are_read_per_layer() -> None:
    model = tiny("neomme")
    ctxext.patch(model, "pi", factor=4.0)
    assert "sliding windows of 16 tokens by design" in " ".join(ctxext.describe(model).notes)
