"""A step on a GPU launches few kernels more than plain attention: counted on the CPU, without computing attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import ctxext
from ctxext.attention import step
from tests._models import tiny, tokens
from tests._steps import launches_a_layer

PLAIN = 1.0  # launches of plain attention on a CPU; on CUDA it splits the keys, which takes two
KERNELS = 2
METHODS: dict[str, dict[str, Any]] = {
    "self_extend": {"window": 16},
    "dual_chunk": {"chunk": 24, "local": 4},
    "rerope": {"window": 16},
    "streaming": {"window": 24},
    "retrieval_heads": {"heads": [0, 2, 4, 6, 8], "window": 20},
}


def stand_in(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
    """Return an empty output, counted as the two kernels."""
    for _ in range(KERNELS):
        torch.zeros(1)
    return q.new_empty(*q.shape[:3], v.shape[3])


def step_of(method: str | None) -> Callable[[int], Callable[[], object]]:
    """Return what makes the step of a model of so many layers, behind a text beyond every border."""

    def made(layers: int) -> Callable[[], object]:
        model, cache = tiny(num_hidden_layers=layers), DynamicCache()
        if method is not None:
            ctxext.patch(model, method, factor=4, **METHODS[method])
        with torch.no_grad():
            for part in tokens(100).split([98, 1, 1], 1):
                model(part, past_key_values=cache)

        @torch.no_grad()
        def call() -> object:
            return model(tokens(1), past_key_values=cache)

        return call

    return made


@pytest.mark.parametrize("method", METHODS)
def test_a_layer_of_a_step_launches_few_kernels_more_than_a_plain_one(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """At most four more than stock, as the attention of a step is two launches; split heads pick and join theirs."""
    plain = launches_a_layer(step_of(None), "cpu", (2, 6))
    monkeypatch.setattr(step, "available", lambda device: True)
    monkeypatch.setattr(step, "attend_rows", stand_in)
    found = launches_a_layer(step_of(method), "cpu", (2, 6)) - plain
    print(method, plain, found)
    assert found <= 4
