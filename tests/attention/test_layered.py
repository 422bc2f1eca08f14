"""Rotary modules with frequencies for each type of layer, and models with more than one rotary module."""

from __future__ import annotations

import copy

import pytest
import torch

import ctxext
from ctxext.core.subject import Subject
from ctxext.kernels.pieces import RotationForm
from ctxext.methods.self_extend import SelfExtend
from tests._models import logits, tiny, tokens
from tests._remap import dense
from tests.walk.check import State


@pytest.mark.parametrize("model_type", ["gemma3_text", "olmo3", "mimo_v2_flash", "modernbert-decoder"])
def test_only_layers_that_see_everything_are_extended(model_type: str) -> None:
    model = tiny(model_type)
    old = copy.deepcopy(model.config.rope_parameters)
    rotary = next(module for _, module in Subject(model).rotaries)
    window_frequencies = rotary.sliding_attention_inv_freq.clone()
    full_frequencies = rotary.full_attention_inv_freq.clone()
    ctxext.patch(model, "pi", factor=4.0)
    assert torch.equal(rotary.sliding_attention_inv_freq, window_frequencies)
    torch.testing.assert_close(rotary.full_attention_inv_freq, full_frequencies / 4)
    assert model.config.rope_parameters["sliding_attention"] == old["sliding_attention"]
    assert model.config.rope_parameters["full_attention"]["rope_type"] == "linear"
    assert "extended: full_attention" in " ".join(ctxext.describe(model).notes)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["granite_swa", "granitemoe_swa", "moshi"])
def test_every_rotary_module_that_is_used_is_extended(model_type: str) -> None:
    model = tiny(model_type)
    window = {"sliding_window": "keep"} if model_type == "moshi" else {}
    before = State.of(model, tokens())
    old = {path: rotary.inv_freq.clone() for path, rotary in Subject(model).rotaries}
    ctxext.patch(model, "ntk", factor=4.0, **window)
    assert len(old) >= 2
    for path, rotary in Subject(model).rotaries:
        ratio = old[path] / rotary.inv_freq
        assert ratio[0] == pytest.approx(1)
        assert ratio[-1] == pytest.approx(4, rel=1e-5), path
    ctxext.unpatch(model)
    assert before.difference(model) is None


@pytest.mark.slow
def test_a_layer_of_base_0_stays_as_it_is_under_remapping() -> None:
    model = tiny("granite_swa", num_hidden_layers=2, layer_rope_theta=[1e4, 0], layer_types=["full_attention"] * 2)
    method, inputs = SelfExtend(factor=4.0, window=16), tokens(138)
    with dense(model, method, RotationForm()) as oracle, torch.no_grad():
        wanted = logits(model, inputs)
    assert oracle.remapped == {0}
    ctxext.patch(model, method)
    assert "1 of 2 attention layers are remapped" in " ".join(ctxext.describe(model).notes)
    torch.testing.assert_close(logits(model, inputs), wanted, rtol=0.0, atol=1e-4 * float(wanted.abs().max()))


@pytest.mark.parametrize("method", ["pi", "yarn", "ntk_by_parts"])
def test_a_query_temperature_that_steps_with_length_stays_as_trained(method: str) -> None:
    """Ministral 3 reads its step from the same key in which YaRN stores the trained length."""
    model = tiny("ministral3")
    trained = model.config.rope_parameters["original_max_position_embeddings"]
    ctxext.patch(model, method, factor=4.0, scaling="extend")
    assert trained == 16
    assert model.config.rope_parameters["original_max_position_embeddings"] == trained
    assert model.config.rope_parameters["llama_4_scaling_beta"] > 0


def test_proportional_frequencies_keep_their_still_pairs() -> None:
    model = tiny("gemma4_text")
    rotary = next(module for _, module in Subject(model).rotaries)
    old = rotary.full_attention_inv_freq.clone()
    ctxext.patch(model, "pi", factor=4.0)
    assert 0 < int(old.count_nonzero()) < len(old)
    assert f"Only the {old.count_nonzero()} fastest of {len(old)} pairs" in " ".join(ctxext.describe(model).notes)
    torch.testing.assert_close(rotary.full_attention_inv_freq, old / 4)
    assert model.config.rope_parameters["full_attention"]["rope_type"] == "proportional"
    assert model.config.rope_parameters["full_attention"]["factor"] == 4.0
