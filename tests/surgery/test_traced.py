"""ALiBi's own attention in a program that torch.export records: BLOOM's, and the one that replaced a rotation."""

from __future__ import annotations

import pytest
import torch

import ctxext
from tests._models import TRAINED_LENGTH, logits, tiny, tokens

LENGTHS = torch.export.Dim("length", min=20, max=4 * TRAINED_LENGTH)


@pytest.mark.usefixtures("_for_compiling")
@pytest.mark.parametrize("model_type", ["bloom", "llama"])
def test_a_recorded_program_gives_the_same_logits_at_every_length(model_type: str) -> None:
    model = ctxext.patch(tiny(model_type), "alibi", factor=4.0, trained_length=TRAINED_LENGTH)
    shapes = {"input_ids": {1: LENGTHS}, "use_cache": None}
    inputs = {"input_ids": tokens(96), "use_cache": False}
    program = torch.export.export(model, (), inputs, strict=False, dynamic_shapes=shapes).module()
    for length in (40, 3 * TRAINED_LENGTH):
        found = program(input_ids=tokens(length), use_cache=False).logits
        torch.testing.assert_close(found, logits(model, tokens(length)), atol=1e-5, rtol=0)


@pytest.mark.usefixtures("_for_compiling")
def test_recording_leaves_nothing_without_data_in_the_live_model() -> None:
    model, again = (ctxext.patch(tiny("bloom"), "alibi", factor=4.0, trained_length=TRAINED_LENGTH) for _ in range(2))
    torch.export.export(model, (), {"input_ids": tokens(40), "use_cache": False}, strict=False)
    assert torch.equal(logits(model, tokens()), logits(again, tokens()))
