"""A step on a GPU launches few kernels more than plain attention: counted on the CPU, without computing attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import ctxext
from ctxext.kernels import step
from tests._models import tiny, tokens
from tests._products import some
from tests._steps import launches_a_layer

KERNELS = 2  # plain attention is counted as one, although on CUDA it splits the keys and takes two
# Parameters of each method, and the launches a layer beyond those of plain attention.
METHODS: dict[str, tuple[dict[str, Any], int]] = {
    "self_extend": ({"window": 16}, 1),
    "dual_chunk": ({"chunk": 24, "local": 4}, 1),
    "rerope": ({"window": 16}, 1),
    "streaming": ({"window": 24}, 1),
    "retrieval_heads": ({"window": 20}, 3),  # it writes keys and values of two kinds of heads
}


def stand_in(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
    """Return an empty output, counted as the two kernels."""
    for _ in range(KERNELS):
        torch.zeros(1)
    batch, heads, length = q.shape[:3]
    return q.new_empty(batch, length, heads, v.shape[3]).transpose(1, 2)  # in the order that layers expect


def step_of(method: str | None) -> Callable[[int], Callable[[], object]]:
    """Return what makes the step of a model of so many layers, behind a text beyond every border."""

    def made(layers: int) -> Callable[[], object]:
        model, cache = tiny(num_hidden_layers=layers), DynamicCache()
        if method is not None:
            one_a_layer = {"heads": [4 * layer + 2 for layer in range(layers)]} if method == "retrieval_heads" else {}
            ctxext.patch(model, method, factor=4, **METHODS[method][0], **one_a_layer)
        with torch.no_grad():
            for part in tokens(100).split([98, 1, 1], 1):
                model(part, past_key_values=cache)

        @torch.no_grad()
        def call() -> object:
            return model(tokens(1), past_key_values=cache)

        return call

    return made


@pytest.mark.parametrize("method", some(METHODS, "self_extend", "retrieval_heads"))
def test_a_layer_of_a_step_launches_few_kernels_more_than_a_plain_one(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    plain = launches_a_layer(step_of(None), "cpu", (2, 6))
    monkeypatch.setattr(step, "runs_triton", lambda device: True)
    monkeypatch.setattr(step, "_rows", stand_in)
    assert launches_a_layer(step_of(method), "cpu", (2, 6)) - plain <= METHODS[method][1]
