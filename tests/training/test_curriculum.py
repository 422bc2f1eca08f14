"""A run that begins with a smaller extension and goes on with a larger one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerState

import ctxext
from ctxext.errors import IncompatibleError, InvalidParameterError
from ctxext.training import Memory
from ctxext.training.checkpoint import with_found
from ctxext.training.curriculum import Curriculum, try_stages
from ctxext.training.lora import attach_lora
from ctxext.training.settings import ExtensionSettings, Settings, Stage
from tests._models import tiny, tokens
from tests.training._recipe import interrupted, losses, recipe


def with_stages(settings: Settings, *stages: dict[str, Any]) -> Settings:
    return settings.model_copy(update={"stages": [Stage(**stage) for stage in stages]})


@pytest.mark.nightly
def test_each_stage_trains_its_own_extension_and_a_resumed_run_knows_where_it_was(
    settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, small, broken = (tmp_path / name for name in ("both", "small", "broken"))
    recipe.finetune(settings("--output", str(small), "--factor", "2", "--length", "24"))
    staged = {"steps": 2, "factor": 2, "length": 24}
    recipe.finetune(with_stages(settings("--output", str(both), "--factor", "4"), staged))
    first, second = losses(small), losses(both)
    assert [second[step] for step in (1, 2)] == [first[step] for step in (1, 2)]
    assert second[3] != first[3]
    again = with_stages(settings("--output", str(broken), "--factor", "4"), staged)
    with pytest.MonkeyPatch.context() as patched, pytest.raises(interrupted(patched)):
        recipe.finetune(again)  # interrupted on the border: the checkpoint is of step 2
    recipe.finetune(again, resume=True)
    assert losses(broken) == second
    ours, theirs = (ctxext.load(place / "adapter") for place in (both, broken))
    assert ctxext.describe(ours).target_length == 256
    assert all(torch.equal(value, theirs.state_dict()[name]) for name, value in ours.state_dict().items())


@pytest.mark.slow
def test_stages_that_cannot_be(settings: Any) -> None:
    for method, factor, said in (
        ("dynamic_yarn", 2, "dynamic_yarn follows the length of the text by itself"),
        ("kerple", 1.5, r"kerple brings weights of its own, .*Leave out the stages"),
    ):
        asked = settings("--method", method, "--positions", "consecutive")
        with pytest.raises(IncompatibleError, match=said):
            recipe.finetune(with_stages(asked, {"steps": 2, "factor": factor}))
    with pytest.raises(InvalidParameterError, match=r"of 100 tokens do not fit into the extended window of 96"):
        recipe.finetune(with_stages(settings(), {"steps": 2, "factor": 1.5, "length": 100}))


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "method"), [("llama", "yarn"), ("llama", "alibi"), ("bloom", "pi")])
def test_changing_stages_leaves_what_else_was_done_to_the_model(model_type: str, method: str) -> None:
    """Loss in chunks, checkpointing and the adapter stay; only the extension is another."""
    extensions = [ExtensionSettings(method=method, factor=factor) for factor in (2, 8)]
    model = attach_lora(ctxext.patch(tiny(model_type), method, factor=8))
    memory = Memory(loss_chunk=16)
    held = memory.apply(model)
    curriculum = Curriculum(model, [(1, extension, 8) for extension in extensions], memory, held)
    inputs = tokens()
    model.train()
    found = []
    for step, notify in ((0, curriculum.on_train_begin), (1, curriculum.on_step_end)):
        notify(None, TrainerState(global_step=step), None)
        found.append(model(inputs, labels=inputs))
    assert all(output.logits is None for output in found)
    expected = []
    for extension in extensions:
        fresh = ctxext.patch(tiny(model_type), method, **extension.arguments())
        expected.append(fresh(inputs, labels=inputs).loss.item())
    assert [output.loss.item() for output in found] == pytest.approx(expected, rel=1e-5)
    assert (expected[0] != pytest.approx(expected[1], rel=1e-3)) == (method != "alibi"), "ALiBi's slopes stay"
    assert (ctxext.describe(model).method or {})["factor"] == 8


@pytest.mark.slow
def test_heads_stay_those_that_were_found_before_training(settings: Any) -> None:
    """Trained weights would score others for a later stage, a resumed run, or the model that is merged."""
    chosen = settings("--method", "retrieval_heads", "--parameters", "{share: 0.5}", "--factor", "4")
    model = ctxext.patch(tiny(), chosen.extension.method, **chosen.extension.arguments())
    found, heads = with_found(chosen, model), model.config.ctxext["method"]["heads"]
    ctxext.unpatch(model)
    for weight in model.parameters():
        weight.data += torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    again = ctxext.patch(model, found.extension.method, **found.extension.arguments())
    assert again.config.ctxext["method"]["heads"] == heads
    other = settings("--method", "yarn", "--factor", "4")
    assert with_found(other, ctxext.patch(tiny(), "yarn", factor=4)) is other


@pytest.mark.slow
def test_a_stage_that_cannot_be_is_refused_on_a_model_without_weights(settings: Any) -> None:
    overrides = ["--method", "self_extend", "--extension.parameters", "{group: 3, window: 16}", "--factor", "2"]
    run = settings(*overrides).model_copy(update={"stages": [Stage(steps=1, factor=1.5), Stage(steps=1, factor=8.0)]})
    with torch.device("meta"):
        outline = tiny()
    with pytest.raises(InvalidParameterError, match="reaches 159 tokens, found a target of 512"):
        try_stages(outline, run)
    assert ctxext.describe(outline).method is None
    try_stages(outline, run.model_copy(update={"stages": run.stages[:1]}))
