"""A real Trainer on a tiny model: its checkpoints know their extension, and resuming into another one is refused."""

from __future__ import annotations

import errno
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, set_seed

import ctxext
from ctxext.errors import CheckpointError, PatchStateError
from ctxext.training import ExtensionCallback
from ctxext.training.checkpoints import COMPLETE, CompleteCheckpoints, alone_in, last_checkpoint, resume_point, saving
from ctxext.training.documents import TokenisedDocuments
from ctxext.training.sequences import TrainingSequences
from tests._models import logits, tiny, tokens
from tests._peft import refusal, through_transformers
from tests.training._recipe import QUIET, recipe

STEPS = 4
Changed = Callable[[Any], Any]


def extended(model: Any) -> Any:
    return ctxext.patch(model, "yarn", factor=4)


def whole(change: Changed) -> Any:
    return change(tiny())


def lora(change: Changed, name: str = "default") -> Any:
    set_seed(3)
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"])
    return get_peft_model(change(tiny()), config, adapter_name=name)


def lora_first(change: Changed) -> Any:
    return change(lora(lambda model: model))


def named_lora(change: Changed) -> Any:
    return lora(change, "mine")


def trainer(model: Any, directory: Path, callback: bool = True, measured: Any = None, **arguments: Any) -> Trainer:
    settings = QUIET | {"max_steps": STEPS, "save_steps": 2, "learning_rate": 1e-2, "per_device_train_batch_size": 2}
    rows = [{"input_ids": row, "labels": row} for row in tokens(96, rows=8)]
    own = [ExtensionCallback(model)] if callback else []
    given = TrainingArguments(str(directory), **(settings | arguments))
    return Trainer(model, given, train_dataset=rows, eval_dataset=measured, callbacks=own)


def losses(run: Trainer) -> dict[int, float]:
    found = {entry["step"]: entry["loss"] for entry in run.state.log_history if "loss" in entry}
    assert all(math.isfinite(loss) for loss in found.values())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("build", [whole, lora])
def test_resuming_the_same_extension_goes_on_as_if_never_interrupted(build: Any, tmp_path: Path) -> None:
    through = trainer(build(extended), tmp_path)
    through.train()
    assert list(losses(through)) == list(range(1, STEPS + 1))
    resumed = trainer(build(extended), tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert losses(resumed) == losses(through)
    ours, theirs = resumed.model.state_dict(), through.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "change", "said"),
    [
        (whole, lambda model: model, "not extended"),
        (lora, lambda model: model, "not extended"),
        (named_lora, lambda model: model, "not extended"),
        (whole, lambda model: ctxext.patch(model, "yarn", factor=2), r"extended by yarn \(factor 2"),
        (whole, lambda model: ctxext.patch(model, "pi", factor=4), r"extended by pi \(factor 4"),
        (whole, lambda model: ctxext.patch(model, "yarn", factor=4, beta_fast=16), r"extended by yarn \(factor 4"),
    ],
    ids=["whole", "lora", "named lora", "factor", "method", "parameter"],
)
def test_resuming_into_another_model_is_refused_before_the_first_step(
    build: Any, change: Changed, said: str, checkpoints: dict[Any, Path], tmp_path: Path
) -> None:
    run = trainer(build(change), tmp_path)
    with pytest.raises(PatchStateError, match=rf"checkpoint was extended by yarn \(factor 4, .*, this model is {said}"):
        run.train(resume_from_checkpoint=str(checkpoints[build]))
    assert set(losses(run)) == {1, 2}, "it trained on"
    assert run.state.global_step == 2
    assert not list(tmp_path.glob("checkpoint-*"))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Path]:
    """The checkpoint of two steps of each kind of model."""
    found = {}
    for build in (whole, lora, named_lora):
        directory = tmp_path_factory.mktemp(build.__name__)
        trainer(build(extended), directory, max_steps=2).train()
        found[build] = directory / "checkpoint-2"
    return found


@pytest.mark.slow
def test_an_unextended_checkpoint_into_an_extended_model(tmp_path: Path) -> None:
    trainer(whole(lambda model: model), tmp_path, max_steps=2).train()
    state = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["stateful_callbacks"]["ExtensionCallback"]["attributes"] == {"extension": None, "encoding": None}
    run = trainer(whole(extended), tmp_path)
    with pytest.raises(PatchStateError, match=r"of the checkpoint was not extended, this model is extended by yarn"):
        run.train(resume_from_checkpoint=True)
    plain = trainer(whole(lambda model: model), tmp_path)
    plain.train(resume_from_checkpoint=True)
    assert plain.state.global_step == STEPS


@pytest.mark.nightly
def test_a_checkpoint_that_was_written_without_the_callback(tmp_path: Path) -> None:
    trainer(whole(extended), tmp_path, callback=False, max_steps=2).train()
    with pytest.raises(PatchStateError, match=r"was written without ExtensionCallback, so nothing says how its model"):
        trainer(whole(extended), tmp_path).train(resume_from_checkpoint=True)
    run = trainer(whole(extended), tmp_path, callback=False)
    run.train(resume_from_checkpoint=True)
    assert run.state.global_step == STEPS


@pytest.mark.slow
def test_a_whole_checkpoint_is_a_model(checkpoints: dict[Any, Path]) -> None:
    loaded, stock = ctxext.load(checkpoints[whole]), AutoModelForCausalLM.from_pretrained(checkpoints[whole])
    assert torch.equal(logits(loaded, tokens()), logits(stock, tokens()))
    assert ctxext.describe(loaded).method == ctxext.method("yarn", factor=4).to_dict()


def added(change: Changed) -> Any:
    """By transformers' own adapters."""
    set_seed(3)
    model = change(tiny())
    model.add_adapter(LoraConfig(target_modules=["q_proj", "v_proj"]))
    return model


@pytest.mark.slow
@pytest.mark.parametrize("callback", [True, pytest.param(False, marks=pytest.mark.nightly)], ids=["callback", "none"])
@pytest.mark.parametrize("build", [lora, lora_first, named_lora, pytest.param(added, marks=through_transformers)])
def test_an_adapter_checkpoint_carries_its_extension(build: Any, callback: bool, plain: Path, tmp_path: Path) -> None:
    run = trainer(build(extended), tmp_path, callback, max_steps=2)
    run.train()
    run.save_model(str(tmp_path / "final"))
    expected = logits(run.model.eval(), tokens())
    for directory in (tmp_path / "checkpoint-2", tmp_path / "final"):
        place = directory / "mine" if build is named_lora else directory
        assert torch.equal(logits(ctxext.load(place, base=plain), tokens()), expected)
        with pytest.raises(KeyError, match=r"needs its base model extended by ctxext"):
            PeftModel.from_pretrained(tiny(), place)
        with pytest.raises((KeyError, ValueError), match=refusal("needs its base model extended by ctxext")):
            tiny().load_adapter(place)
        with pytest.raises(CheckpointError, match=r"does not say what its base checkpoint is"):
            ctxext.load(place)


@pytest.mark.slow
def test_virtual_tokens_carry_it_with_the_callback(plain: Path, tmp_path: Path) -> None:
    set_seed(3)
    model = get_peft_model(extended(tiny()), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    run = trainer(model, tmp_path, max_steps=2)
    run.train()
    with pytest.raises(KeyError, match=r"needs its base model extended by ctxext"):
        PeftModel.from_pretrained(tiny(), tmp_path / "checkpoint-2")
    loaded = ctxext.load(tmp_path / "checkpoint-2", base=plain)
    assert torch.equal(logits(loaded, tokens()), logits(run.model.eval(), tokens()))


@pytest.mark.slow
@pytest.mark.parametrize("callback", [True, False], ids=["callback", "none"])
def test_the_best_adapter_comes_back_at_the_end(callback: bool, plain: Path, tmp_path: Path) -> None:
    """The Trainer reads the weights of a checkpoint that PEFT itself would refuse."""
    rows = [{"input_ids": row, "labels": row} for row in tokens(96, rows=2)]
    best: dict[str, Any] = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
    best["greater_is_better"] = True  # so that it is not the last one
    run = trainer(lora(extended), tmp_path, callback, rows, eval_strategy="steps", eval_steps=2, **best)
    run.train()
    assert run.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    loaded = ctxext.load(tmp_path / "checkpoint-2", base=plain)
    assert torch.equal(logits(loaded, tokens()), logits(run.model.eval(), tokens()))


@pytest.mark.slow
@pytest.mark.parametrize("build", [lora, lora_first])
def test_what_is_uploaded_while_training_carries_the_extension(
    build: Any, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Trainer copies the files of adapters that it knows out of a checkpoint, and uploads the copies."""
    hub = tmp_path / "hub"

    def upload_folder(folder_path: str, **_: Any) -> Any:
        shutil.copytree(folder_path, hub, ignore=shutil.ignore_patterns("checkpoint-*"), dirs_exist_ok=True)
        return SimpleNamespace(done=lambda: True)

    api = SimpleNamespace(create_repo=lambda *_, **__: SimpleNamespace(repo_id="me/run"), upload_folder=upload_folder)
    monkeypatch.setattr("transformers.trainer.hf_api", lambda *_, **__: api)
    options = {"push_to_hub": True, "hub_strategy": "every_save", "hub_model_id": "me/run"}
    run = trainer(build(extended), tmp_path / "run", max_steps=2, **options)
    run.train()
    assert torch.equal(logits(ctxext.load(hub, base=plain), tokens()), logits(run.model.eval(), tokens()))


@pytest.mark.slow
def test_states_restored_from_the_checkpoint(checkpoints: dict[Any, Path], tmp_path: Path) -> None:
    run = trainer(whole(extended), tmp_path, restore_callback_states_from_checkpoint=True)
    run.train(resume_from_checkpoint=str(checkpoints[whole]))
    assert run.state.global_step == STEPS
    other = trainer(tiny(), tmp_path, restore_callback_states_from_checkpoint=True)
    with pytest.raises(PatchStateError, match="this model is not extended"):
        other.train(resume_from_checkpoint=str(checkpoints[whole]))


def test_a_copy_of_a_checkpoint_is_none_of_the_run(tmp_path: Path) -> None:
    assert last_checkpoint(tmp_path) is None
    for number in ("9", "20", "20-backup", "30.old", "", "40"):
        (tmp_path / f"checkpoint-{number}").mkdir()
        if number != "40":  # killed while it was saved
            (tmp_path / f"checkpoint-{number}" / COMPLETE).touch()
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-20"


def test_old_checkpoints_go_once_the_new_one_is_whole_and_copies_stay(
    documents: TokenisedDocuments, tmp_path: Path
) -> None:
    unmarked = {"checkpoint-5", "checkpoint-6"}  # the part that a kill left, and the one that was just written
    for name in ("checkpoint-2", "checkpoint-4", "checkpoint-4-backup", *unmarked):
        (tmp_path / name).mkdir()
        if name not in unmarked:
            (tmp_path / name / COMPLETE).touch()
    sequences = TrainingSequences(documents, length=32, count=8, seed=0, target_length=64)
    state = SimpleNamespace(is_world_process_zero=True, global_step=6, max_steps=8)
    CompleteCheckpoints(sequences, keep=2).on_save(SimpleNamespace(output_dir=str(tmp_path)), state, None)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-4", "checkpoint-4-backup", "checkpoint-6"}
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-6"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is full")
def test_what_torch_raises_on_a_full_disk_says_how_to_go_on(tmp_path: Path) -> None:
    """Optimisers are saved by torch.save, whose error is a RuntimeError and names no disk."""
    said = r"Saving failed: torch could not write a file, as on a full disk\. Nothing"
    with pytest.raises(CheckpointError, match=said), saving(tmp_path):
        torch.save({"moments": torch.zeros(1 << 20)}, "/dev/full")
    for other in (RuntimeError("CUDA error: out of luck"), PatchStateError("It is patched already.")):
        with pytest.raises(type(other), match=str(other)), saving(tmp_path):
            raise other


def test_two_programs_do_not_train_into_one_folder(
    settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, run = settings(), tmp_path / "run"
    run.mkdir()
    with alone_in(run, resume=False), pytest.raises(SystemExit, match=r"Another program trains into .*run at this"):
        recipe.main(given, False)
    with alone_in(run, resume=True), alone_in(tmp_path / "other", resume=False), pytest.MonkeyPatch.context() as others:
        others.setenv("RANK", "1")  # a process of the same run
        with alone_in(run, resume=False):
            assert (tmp_path / "other").is_dir()
    assert not (tmp_path / "other").exists(), "nothing was written"
    with alone_in(tmp_path / "none", resume=True):
        assert not (tmp_path / "none").exists()

    def without(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", without)
    with alone_in(run, resume=True), alone_in(run, resume=True):
        pass


def test_the_results_of_a_run_are_not_replaced(settings: Any, tmp_path: Path) -> None:
    """Its checkpoints are large, and were deleted."""
    assert resume_point(settings(), resume=False) is None
    assert resume_point(settings(), resume=False) is None, "it was killed before its first checkpoint"
    (tmp_path / "run" / "run.json").write_text("{}")
    with pytest.raises(PatchStateError, match=r"run holds the results of a run \(run\.json\).*another --output"):
        resume_point(settings(), resume=False)


SAVED = [f"checkpoint-6/{name}" for name in ("optimizer.pt", "scheduler.pt", "mine/adapter_model.safetensors")]


@pytest.mark.parametrize("name", [*SAVED, "settings.json"])
def test_a_run_goes_on_only_with_all_that_it_saved(
    name: str, settings: Any, documents: TokenisedDocuments, tmp_path: Path
) -> None:
    """The Trainer takes a new optimiser, and the first learning rate, where the file of either is missing."""
    run = tmp_path / "run"
    assert resume_point(settings(), resume=False) is None
    for file in (*SAVED, "checkpoint-6/README.md"):
        (run / file).parent.mkdir(parents=True, exist_ok=True)
        (run / file).write_text("states")
    sequences = TrainingSequences(documents, length=32, count=8, seed=0, target_length=64)
    state = SimpleNamespace(is_world_process_zero=True, global_step=6, max_steps=8, compute_steps=lambda *_: None)
    arguments = SimpleNamespace(output_dir=str(run))
    for _ in range(2):
        CompleteCheckpoints(sequences, keep=2).on_save(arguments, state, None)
        CompleteCheckpoints(sequences, keep=2).on_train_begin(arguments, state, None)
    (run / "checkpoint-6" / "README.md").unlink()  # which nothing reads
    assert resume_point(settings(), resume=True) == run / "checkpoint-6"
    if name.endswith(".pt"):
        whole = (run / name).read_text()
        (run / name).write_text(whole[:-1])  # as where a folder was copied in part
        with pytest.raises(CheckpointError, match=rf"{name} is missing, or not whole any more"):
            resume_point(settings(), resume=True)
    (run / name).unlink()
    with pytest.raises(CheckpointError, match=rf"{name} is missing, or not whole any more: the run would not go on"):
        resume_point(settings(), resume=True)
    with pytest.raises(PatchStateError, match="holds a run with checkpoint-6"):
        resume_point(settings(), resume=False)
