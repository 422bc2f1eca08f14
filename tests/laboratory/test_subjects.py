"""Everybody that the laboratory measures."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ctxext.laboratory.run import PRESETS
from ctxext.laboratory.subjects import RECURRENT, subjects
from ctxext.methods import EncodingMethod, known_methods
from tests.laboratory._laboratory import SMALL

PAIR = replace(SMALL, layers=2)


def test_everybody_who_can_take_the_place_of_rotation_is_here() -> None:
    found = subjects()
    encodings = {name for name, kind in known_methods().items() if issubclass(kind, EncodingMethod)}
    assert len(encodings) >= 8
    assert set(found) == encodings | {"rope", "alibi", "nope"} | set(RECURRENT)
    assert {name for name, one in found.items() if one.is_slow} == {"sinusoidal", "learned", "nope"}


@pytest.mark.slow
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_models_have_about_as_many_weights_and_any_length(name: str) -> None:
    body = PRESETS["quick"].settings.text
    how = {"vocabulary": 256, "trained_length": 128, "seed": 0}
    built = [subjects()[one].build(body, **how) for one in ("rope", name)]
    ours, theirs = (sum(weight.numel() for weight in model.parameters()) for model in built)
    assert 0.8 < theirs / ours < 1.25
    model = subjects()[name].build(PAIR, vocabulary=7, trained_length=8, seed=0).eval()
    tokens = torch.randint(0, 7, (2, 50), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole, part = (model(input_ids=each, use_cache=False).logits for each in (tokens, tokens[:, :33]))
    torch.testing.assert_close(whole[:, :33], part, atol=1e-4, rtol=1e-4)  # and what comes later changes nothing
