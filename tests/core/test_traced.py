"""ALiBi's own attention in a program that torch.export records: BLOOM's, and the one that replaced a rotation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import ctxext
from ctxext.errors import IncompatibleError
from tests._models import logits, tiny, tokens
from tests._products import some
from tests.walk.tiny import TRAINED_LENGTH

LENGTHS = torch.export.Dim("length", min=20, max=4 * TRAINED_LENGTH)
SHAPES = {"input_ids": {1: LENGTHS}, "use_cache": None}
pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("_for_compiling")]


@pytest.mark.parametrize("model_type", some(["bloom", "llama"], "llama"))
def test_a_recorded_program_gives_the_same_logits_at_every_length(model_type: str) -> None:
    model = ctxext.patch(tiny(model_type), "alibi", factor=4.0, trained_length=TRAINED_LENGTH)
    inputs = {"input_ids": tokens(96), "use_cache": False}
    program = torch.export.export(model, (), inputs, strict=False, dynamic_shapes=SHAPES).module()
    for length in (40, 3 * TRAINED_LENGTH):
        found = program(input_ids=tokens(length), use_cache=False).logits
        torch.testing.assert_close(found, logits(model, tokens(length)), atol=1e-5, rtol=0)


def test_recording_leaves_nothing_without_data_in_the_live_model() -> None:
    model, again = (ctxext.patch(tiny("bloom"), "alibi", factor=4.0, trained_length=TRAINED_LENGTH) for _ in range(2))
    torch.export.export(model, (), {"input_ids": tokens(40), "use_cache": False}, strict=False)
    assert torch.equal(logits(model, tokens()), logits(again, tokens()))


@pytest.mark.parametrize("method", ["self_extend", "streaming", "rerope", "dual_chunk"])
def test_pieces_in_a_program_for_every_length_are_refused_by_name(method: str) -> None:
    model = ctxext.patch(tiny(), method, factor=4.0)
    inputs = {"input_ids": tokens(96), "use_cache": False}
    with pytest.raises(IncompatibleError, match="attention in pieces reads the values of position_ids"):
        torch.export.export(model, (), inputs, strict=False, dynamic_shapes=SHAPES)
    with pytest.raises(IncompatibleError, match="attention in pieces reads the values of position_ids"):
        torch.jit.trace(_logits_of(model), tokens(96), check_trace=False)


@pytest.mark.parametrize("method", some(["self_extend", "streaming", "rerope", "dual_chunk"], "self_extend"))
def test_pieces_in_a_program_for_one_length_are_exact_and_so_is_what_it_is_decomposed_into(method: str) -> None:
    model = ctxext.patch(tiny(), method, factor=4.0)
    inputs = {"input_ids": tokens(3 * TRAINED_LENGTH), "use_cache": False}
    program = torch.export.export(model, (), inputs, strict=False)
    for each in (program, program.run_decompositions()):  # by a formula: its sums are rounded in another order
        found = each.module()(**inputs).logits
        torch.testing.assert_close(found, logits(model, inputs["input_ids"]), atol=3e-5, rtol=0)


def _logits_of(model: nn.Module) -> nn.Module:
    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: Tensor) -> Tensor:
            found: Tensor = self.model(input_ids=input_ids, use_cache=False).logits
            return found

    return Logits()
