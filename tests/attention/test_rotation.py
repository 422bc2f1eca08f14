"""How a model rotates is found without its weights too: ``ctxext patch``, ``inspect`` and ``export`` load none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ctxext
from ctxext.attention import remapped_layers
from ctxext.checkpoints.load import extended_config
from ctxext.errors import IncompatibleError
from ctxext.kernels.pieces import RotationForm
from ctxext.methods import METHODS
from tests._models import logits, tiny, tokens
from tests.walk.tiny import TRAINED_LENGTH, tiny_config, tiny_model

# The functions that rotate take q and k with cosines and sines or with complex numbers, or one of the two at a time.
KINDS = ["gemma4_text", "gemma3n_text", "deepseek_v2", "deepseek_v3", "longcat_flash", "bailing_hybrid", "cohere"]
KINDS += ["glm", "qwen2_vl", "qwen2_5_vl"]
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
    model.config.architectures = [type(model).__name__]
    extended_config(model.config, method, trained_length=TRAINED_LENGTH)
    ctxext.patch(model, method, trained_length=TRAINED_LENGTH)
    assert len(forms) == 2
    assert forms[0] == forms[1]


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[DeviceMesh]:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["self_extend", "alibi", "yarn"])
def test_a_model_that_fsdp_manages_runs_as_a_whole_only(method: str, alone: DeviceMesh) -> None:
    """FSDP takes the first module that runs for the outermost one, and gathers weights until its pass has ended."""
    expected = logits(ctxext.patch(tiny(), method, factor=4.0), tokens(100))
    model = tiny()
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=alone)
    ctxext.patch(model, method, factor=4.0)
    assert all(isinstance(weight, DTensor) for weight in model.parameters())
    torch.testing.assert_close(logits(model, tokens(100)), expected)
    with pytest.raises(IncompatibleError, match="heads are scored in a whole model"):
        ctxext.heads(ctxext.unpatch(model))
    for encoding in ("fire", "fox"):
        with pytest.raises(IncompatibleError, match="FSDP manages this llama, and would leave the weights"):
            ctxext.patch(model, encoding, factor=4.0)
    ctxext.patch(model, "sinusoidal", factor=4.0)  # which has no weights


@pytest.mark.parametrize("part", ["embeddings", "adapter"])
def test_a_model_in_training_is_asked_without_its_dropout(part: str) -> None:
    """It would tell two queries of one token apart by more than a rotation does."""
    torch.manual_seed(0)
    model: Any = tiny("gpt_neox", hidden_dropout=0.5) if part == "embeddings" else tiny()
    if part == "adapter":
        how = {"target_modules": ["q_proj"], "r": 8, "init_lora_weights": False}
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.5, **how))
    before, drawn = {name: each.training for name, each in model.train().named_modules()}, torch.get_rng_state()
    ctxext.patch(model, "self_extend", factor=4.0, window=16)
    assert {name: each.training for name, each in model.named_modules()} == before
    assert torch.equal(torch.get_rng_state(), drawn)
