"""How a model rotates is found without its weights too: ``ctxext patch``, ``inspect`` and ``export`` load none."""

from __future__ import annotations

from typing import Any

import pytest

import ctxext
from ctxext.attention import remapped_layers
from ctxext.checkpoints.load import extended_config
from ctxext.kernels.pieces import RotationForm
from ctxext.methods import METHODS
from tests.walk.tiny import TRAINED_LENGTH, tiny_config, tiny_model

# The functions that rotate take q and k with cosines and sines or with complex numbers, or one of the two at a time.
KINDS = [
    "gemma4_text",
    "gemma3n_text",
    "deepseek_v2",
    "deepseek_v3",
    "longcat_flash",
    "bailing_hybrid",
    "cohere",
    "glm",
]
# In Phi's, what keeps plain transformers out is a field that is read again.
GUARDED = ["phi3", "phimoe", "phi4_multimodal"]


@pytest.fixture
def forms(monkeypatch: pytest.MonkeyPatch) -> list[RotationForm]:
    """The forms that are found from here on."""
    found: list[RotationForm] = []
    find = remapped_layers.rotation_form

    def seen(*args: Any) -> RotationForm:
        found.append(find(*args))
        return found[-1]

    monkeypatch.setattr(remapped_layers, "rotation_form", seen)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [*KINDS, *GUARDED])
def test_it_is_what_running_the_first_layer_shows(model_type: str, forms: list[RotationForm]) -> None:
    model, method = tiny_model(tiny_config(model_type)), METHODS["self_extend"](factor=4.0)
    extended_config(model.config, method, trained_length=TRAINED_LENGTH)
    ctxext.patch(model, method, trained_length=TRAINED_LENGTH)
    assert len(forms) == 2
    assert forms[0] == forms[1]
