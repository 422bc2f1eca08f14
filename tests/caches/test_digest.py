"""A digest tells checkpoints apart."""

from __future__ import annotations

import pytest
import torch

import ctxext
from ctxext.caches.digest import _adapters_in_use, weights_digest
from tests._models import tiny


def test_a_digest_tells_checkpoints_apart() -> None:
    model = tiny()
    first = weights_digest(model)
    ctxext.patch(model, "dynamic_ntk", factor=2.0)
    ctxext.unpatch(model)
    assert weights_digest(model) == first
    model.model.layers[1].mlp.up_proj.weight.data += 1e-3
    trained = weights_digest(model)
    assert len({first, trained, weights_digest(model.to(torch.bfloat16))}) == 3
    assert _adapters_in_use(model) == [], "a whole model has methods of the same names"


@pytest.mark.parametrize(("model_type", "methods"), [("bloom", ("pi", "dynamic_pi")), ("gpt2", ("pi", "group"))])
def test_a_digest_tells_extensions_apart_that_only_the_method_does(model_type: str, methods: tuple[str, str]) -> None:
    """Whose config says no more of them, and whose rows are the same wherever the digest looks."""
    extended = [ctxext.patch(tiny(model_type), name, factor=2.0, trained_length=64) for name in methods]
    assert len({weights_digest(model) for model in (tiny(model_type), *extended)}) == 3
