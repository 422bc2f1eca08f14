"""Which layers rotate is seen, not read off the config: extensions that could only harm are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

import ctxext
from ctxext.core.probe import Layers, look
from ctxext.core.subject import Subject
from ctxext.errors import IncompatibleError
from tests._models import RECENT, tiny, tokens
from tests.walk.check import State, rotating_layers


def test_inspecting_such_a_model_says_so_too() -> None:
    from ctxext.core.rotary import find_sites

    model = tiny("cohere2")
    with pytest.raises(IncompatibleError, match="belong to its sliding-window layers only"):
        find_sites(Subject.of(model), 64)


def seen_of(model: Any) -> Layers:
    return look(model, [path for path, _ in Subject(model).rotaries])


@pytest.mark.parametrize(
    "model_type",
    ["llama", "gemma2", "gemma3_text", "smollm3", "cohere2", "exaone4", "qwen3_5_text", "granite_swa", "gpt_neox"]
    + (["flint", "llama4_text"] if RECENT else []),
)
def test_the_probe_sees_what_arithmetic_with_not_a_number_shows(model_type: str) -> None:
    if model_type == "llama4_text":
        pytest.skip("rotates by complex numbers")
    model = tiny(model_type)
    seen = seen_of(model)
    assert seen.failure is None
    paths = [path for path, _ in Subject(model).rotaries]
    assert seen.rotating == rotating_layers(model, tokens(24), paths, seen.attending | seen.rotating)
    assert seen.rotating


def test_the_probe_names_windows_and_leaves_the_model_alone() -> None:
    model = tiny("gemma2")
    before = State.of(model, tokens())
    seen = seen_of(model)
    assert seen.rotating == seen.attending == {"model.layers.0", "model.layers.1"}
    assert seen.windowed == {"model.layers.0"}
    assert before.difference(model) is None
    assert not any("forward" in vars(module) for module in model.modules())


class UntraceableActivation(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().numpy())


def untraceable(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Any:
    """A model whose forward pass asks its data something that a pass without data cannot answer."""
    monkeypatch.setitem(ACT2FN, "untraceable", UntraceableActivation)
    return tiny(hidden_act="untraceable", num_hidden_layers=2, **changes)


def test_a_model_that_cannot_be_probed_is_extended_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    model = untraceable(monkeypatch)
    assert "numpy" in str(seen_of(model).failure)
    ctxext.patch(model, "yarn", factor=4.0)
    assert "cannot tell which layers rotate" in " ".join(ctxext.describe(model).notes)


def test_a_model_that_cannot_be_probed_and_has_windows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = untraceable(monkeypatch, layer_types=["sliding_attention", "full_attention"], sliding_window=16)
    with pytest.raises(IncompatibleError, match="cannot tell which of them rotate"):
        ctxext.patch(model, "yarn", factor=4.0)


def test_alibi_needs_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(IncompatibleError, match="cannot tell which of its layers rotate"):
        ctxext.patch(untraceable(monkeypatch), "alibi", factor=4.0)


def test_a_model_that_reads_no_tokens_is_refused_by_name() -> None:
    from transformers import PixtralVisionConfig, PixtralVisionModel

    model = PixtralVisionModel(
        PixtralVisionConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    )
    with pytest.raises(IncompatibleError, match="reads no tokens"):
        ctxext.patch(model, "yarn", factor=4.0, trained_length=64)
