"""The recipe itself on a tiny checkpoint: interrupted, resumed, reloaded, merged, and told nonsense."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer

import ctxext
from ctxext.errors import CheckpointError, IncompatibleError, InvalidParameterError, PatchStateError
from ctxext.training.before_after import BeforeAndAfter
from ctxext.training.checkpoints import last_checkpoint
from ctxext.training.trainer import LongTrainer, NotANumberError
from tests._models import logits, tiny, tokens
from tests.texts._conversations import PLAIN, chat_tokenizer, write
from tests.training._recipe import interrupted, losses, recipe

STEPS = 4


def full_disk(monkeypatch: pytest.MonkeyPatch) -> type[BaseException]:
    original = LongTrainer._save_optimizer_and_scheduler

    def save(self: Any, output_dir: str) -> None:
        if self.state.global_step == STEPS:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(self, output_dir)

    monkeypatch.setattr(LongTrainer, "_save_optimizer_and_scheduler", save)
    return CheckpointError


@pytest.mark.nightly
def test_resumed_it_has_the_losses_and_weights_of_a_run_never_interrupted(settings: Any, tmp_path: Path) -> None:
    through = tmp_path / "through"
    recipe.finetune(settings("--output", str(through)))
    assert list(losses(through)) == [1, 2, 3, 4]
    for accident in (interrupted, full_disk):
        broken = tmp_path / accident.__name__
        with pytest.MonkeyPatch.context() as patched, pytest.raises(accident(patched)):
            recipe.finetune(settings("--output", str(broken)))
        assert last_checkpoint(broken) == broken / "checkpoint-2"
        assert (broken / "checkpoint-4").exists() == (accident is full_disk), "a part of a checkpoint was left behind"
        recipe.finetune(settings("--output", str(broken)), resume=True)
        assert losses(broken) == losses(through)
        ours, theirs = (ctxext.load(place / "adapter").state_dict() for place in (through, broken))
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.nightly
def test_what_a_run_leaves(settings: Any, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe.finetune(settings("--merge", "--dtype", "bf16"))
    run = tmp_path / "run"
    said = capsys.readouterr().err
    assert "64 -> 128 tokens" in said
    assert "step 4/4  loss" in said
    assert "tokens/s" in said
    report = json.loads((run / "run.json").read_text(encoding="utf-8"))
    assert report["settings"]["training"]["steps"] == STEPS
    assert report["extension"]["method"]["method"] == "yarn"
    assert min(report["tokens_per_second"], report["training_seconds"]) > 0
    assert report["started"] <= report["finished"]
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert report["peak_memory_bytes"] > 2**20
    assert [entry["step"] for entry in report["loss"]] == [1, 2, 3, 4]
    adapter = ctxext.load(run / "adapter", dtype=torch.bfloat16).eval()
    stock = AutoModelForCausalLM.from_pretrained(run / "merged").eval()
    base = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()
    ours, theirs, before = (logits(model, tokens()).float() for model in (adapter, stock, base))
    assert stock.dtype == torch.bfloat16
    rounding = (ours - theirs).abs().mean()
    assert rounding < 0.1 * (ours - before).abs().mean(), "the merged model is not the trained one"
    assert AutoTokenizer.from_pretrained(run / "merged")("ab").input_ids[0] == 256


@pytest.mark.nightly
def test_it_learns_the_answers_of_conversations(
    settings: Any, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = shutil.copytree(checkpoint, tmp_path / "chat")
    chat_tokenizer(PLAIN).save_pretrained(place)
    question = {"role": "user", "content": "a" * 9}
    rows = [[question, {"role": "assistant", "content": "z" * size}] for size in range(5, 60)]
    chats = write(tmp_path / "chats.jsonl", *({"messages": row} for row in rows))
    given = ["--checkpoint", str(place), "--data.train", str(chats), "--data.length", "48"]
    given += ["--evaluation.text", str(chats), "--evaluation.documents", "4"]
    recipe.finetune(settings(*given, "--positions", "packed"))
    said = capsys.readouterr().err
    assert "26 are conversations, of which 481 tokens of answers alone have a loss" in said
    assert "(conversations left out: 29 longer than a sequence)" in said
    report = json.loads((tmp_path / "run/run.json").read_text(encoding="utf-8"))
    before, after = (report["evaluation"][when]["perplexity"] for when in ("before", "after"))
    assert any("the answers alone are scored" in note for note in before["notes"])
    first, last = (one["readings"][-1]["scores"][-1]["loss"] for one in (before, after))
    assert last < first
    with pytest.raises(InvalidParameterError, match=r"Conversations stand whole.*Set it to packed"):
        recipe.finetune(settings(*given, "--positions", "pose", "--output", str(tmp_path / "other")))


@pytest.mark.nightly
def test_the_last_losses_are_told_however_rarely_a_run_logs(settings: Any, tmp_path: Path) -> None:
    recipe.finetune(settings("--output", str(tmp_path / "all")))
    recipe.finetune(settings("--training.log_every", "3"))
    single, found = losses(tmp_path / "all"), losses(tmp_path / "run")
    # With each checkpoint, too: where a run is resumed, no mean lacks a step.
    means = {2: (single[1] + single[2]) / 2, 3: single[3], STEPS: single[STEPS]}
    assert found == pytest.approx(means, rel=1e-5)


@pytest.mark.nightly
def test_a_resumed_run_saves_and_logs_as_it_is_told_now(settings: Any, tmp_path: Path) -> None:
    recipe.finetune(settings("--output", str(tmp_path / "all")))
    with pytest.MonkeyPatch.context() as patched, pytest.raises(interrupted(patched)):
        recipe.finetune(settings())
    recipe.finetune(settings("--checkpoint_every", "1", "--training.keep", "9", "--log_every", "2"), resume=True)
    assert {path.name for path in (tmp_path / "run").glob("checkpoint-*")} == {f"checkpoint-{n}" for n in (2, 3, 4)}
    assert losses(tmp_path / "run") == losses(tmp_path / "all")  # each with its checkpoint


@pytest.mark.nightly
def test_a_copy_of_a_checkpoint_that_a_user_made_stays(settings: Any, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patched, pytest.raises(interrupted(patched)):
        recipe.finetune(settings())
    run = tmp_path / "run"
    shutil.copytree(run / "checkpoint-2", run / "checkpoint-2-backup")
    recipe.finetune(settings("--checkpoint_every", "1"), resume=True)
    found = {path.name for path in run.glob("checkpoint-*")}
    assert found == {"checkpoint-2-backup", "checkpoint-3", "checkpoint-4"}


@pytest.mark.nightly
def test_a_run_that_an_earlier_version_began_is_ended(settings: Any, tmp_path: Path) -> None:
    """Its settings hold no record of its texts."""
    with pytest.MonkeyPatch.context() as patched, pytest.raises(interrupted(patched)):
        recipe.finetune(settings())
    kept = json.loads((tmp_path / "run" / "settings.json").read_text(encoding="utf-8"))
    texts = kept.pop("texts")
    (tmp_path / "run" / "settings.json").write_text(json.dumps(kept), encoding="utf-8")
    recipe.finetune(settings(), resume=True)
    assert json.loads((tmp_path / "run" / "run.json").read_text(encoding="utf-8"))["texts"] == texts


@pytest.mark.nightly
def test_a_disk_that_is_full_at_the_end_or_at_the_beginning_costs_nothing(
    settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"

    def full(*args: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(recipe, "write_json", full)
        with pytest.raises(CheckpointError, match=r"No space left.*The last whole checkpoint is .*checkpoint-4; make"):
            recipe.finetune(settings())
    assert not (run / "run.json").exists()
    monkeypatch.setattr(LongTrainer, "training_step", full)  # nothing is trained again
    recipe.finetune(settings(), resume=True)
    report = json.loads((run / "run.json").read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert list(losses(run)) == [1, 2, 3, 4]
    assert report["tokens_per_second"] == pytest.approx(4 * 32 / report["training_seconds"])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        with pytest.raises(CheckpointError, match="Nothing was trained yet; make room, or choose another --output"):
            recipe.finetune(settings("--output", str(tmp_path / "new")))


@pytest.mark.slow
@pytest.mark.parametrize("process", [0, 1])
def test_a_measurement_that_fails_at_the_end_costs_nothing_else(
    process: int, settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"

    def measure(self: Any, model: Any) -> dict[str, Any]:
        if last_checkpoint(run) is not None and process == 0:
            raise IncompatibleError("The model returned NaN or infinite losses")
        return {}

    def beside(mine: list[Any]) -> list[Any]:
        return [*mine, IncompatibleError("It returned NaN")] if process else mine

    monkeypatch.setattr(BeforeAndAfter, "measure", measure)
    monkeypatch.setattr("ctxext.training.before_after.gather_object", beside)
    said = "^The measurement after training failed in process 1: It returned NaN$" if process else "^The model returned"
    with pytest.raises(IncompatibleError, match=said):
        recipe.finetune(settings("--merge", "--training.steps", "2"))
    assert list(losses(run)) == [1, 2]
    assert json.loads((run / "run.json").read_text(encoding="utf-8"))["evaluation"] == {"before": {}, "after": {}}
    for place in ("adapter", "merged"):
        assert AutoTokenizer.from_pretrained(run / place)("ab").input_ids[0] == 256
    assert AutoModelForCausalLM.from_pretrained(run / "merged").config.ctxext["method"]["method"] == "yarn"


def test_a_token_that_the_model_lacks_is_named_before_weights_are_read(
    settings: Any, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(checkpoint, tmp_path / "larger")
    words = AutoTokenizer.from_pretrained(checkpoint)
    words.add_special_tokens({"additional_special_tokens": ["<|user|>"]})
    words.save_pretrained(tmp_path / "larger")
    text = write(tmp_path / "texts.jsonl", {"text": "Once upon a time. " * 20}, {"text": "<|user|> Who came? " * 20})
    monkeypatch.setattr("ctxext.checkpoints.load.read_model", lambda *_, **__: pytest.fail("weights are read"))
    with pytest.raises(InvalidParameterError, match="has token 257 of its tokenizer, and this llama knows 257 tokens"):
        recipe.finetune(settings("--checkpoint", str(tmp_path / "larger"), "--data.train", str(text)))


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("lora.dropout", "0.1", r"dropout=0\.1: PEFT adapts experts that are one tensor"),
        ("memory.mlp_tile", "8", r"has no plain MLP to tile \(found Mixtral"),
    ],
)
def test_what_a_step_cannot_be_is_said_before_texts_and_weights_are_read(
    key: str, value: str, said: str, settings: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny("mixtral", vocab_size=257).save_pretrained(tmp_path / "experts")
    tokenizer.save_pretrained(tmp_path / "experts")
    monkeypatch.setattr("ctxext.checkpoints.load.read_model", lambda *_, **__: pytest.fail("weights are read"))
    monkeypatch.setattr(recipe.TokenisedDocuments, "read", lambda *_, **__: pytest.fail("texts are read"))
    with pytest.raises(IncompatibleError, match=said):
        recipe.finetune(settings("--checkpoint", str(tmp_path / "experts"), f"--{key}", value))


@pytest.mark.nightly
def test_a_run_is_resumed_only_as_itself(settings: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no whole checkpoint to resume from"):
        recipe.finetune(settings(), resume=True)
    recipe.finetune(settings())
    with pytest.raises(PatchStateError, match=r"holds a run with checkpoint-4\. Add --resume"):
        recipe.finetune(settings())
    said = r"had other settings: seed=0, now 1; extension.factor=2\.0, now 4\.0"
    with pytest.raises(InvalidParameterError, match=said):
        recipe.finetune(settings("--factor", "4", "--seed", "1"), resume=True)
    texts = tmp_path / "letters.jsonl"
    texts.write_text('{"text": "' + "abc" * 300 + '"}')
    with pytest.MonkeyPatch.context() as patched, pytest.raises(interrupted(patched)):
        recipe.finetune(settings("--output", str(tmp_path / "other"), "--data.train", str(texts)))
    texts.write_text('{"text": "' + "abcd" * 300 + '"}')
    with pytest.raises(InvalidParameterError, match=r"other read other sequences up to step 2\. Resume with the same"):
        recipe.finetune(settings("--output", str(tmp_path / "other"), "--data.train", str(texts)), resume=True)
    stored = tmp_path / "run" / "settings.json"  # whatever it says, the checkpoint is of its own extension
    stored.write_text(stored.read_text(encoding="utf-8").replace('"factor": 2.0', '"factor": 4.0'), encoding="utf-8")
    with pytest.raises(PatchStateError, match=r"by yarn \(factor 2, .* this model is extended by yarn \(factor 4"):
        recipe.finetune(settings("--factor", "4"), resume=True)


@pytest.mark.slow
def test_a_loss_that_is_no_number_stops_a_run(settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Trainer.compute_loss

    def broken(self: Any, *args: Any, **kwargs: Any) -> Any:
        loss = original(self, *args, **kwargs)
        return loss * float("nan") if self.state.global_step == 2 else loss

    def backward(self: Any, loss: Tensor, **kwargs: Any) -> None:
        assert torch.isfinite(loss), "with DeepSpeed the weights would be changed here"
        pushed(self, loss, **kwargs)

    pushed = Accelerator.backward
    monkeypatch.setattr(Accelerator, "backward", backward)
    monkeypatch.setattr(Trainer, "compute_loss", broken)
    said = r"The loss is nan in step 3, on sequence 2: 'document \d' from token \d+.*Begin a new run with a lower"
    with pytest.raises(NotANumberError, match=said):
        recipe.finetune(settings())
    assert last_checkpoint(tmp_path / "run") == tmp_path / "run" / "checkpoint-2"
    lower = settings("--training.learning_rate", "1e-3")  # which is another run, and not the rest of this one
    with pytest.raises(InvalidParameterError, match=r"had other settings: training\.learning_rate=0\.01, now 0\.001"):
        recipe.finetune(lower, resume=True)


@pytest.mark.parametrize(("dtype", "mixed"), [("fp32", "no"), ("bf16", "bf16")])
def test_a_launcher_does_not_say_what_a_run_computes_in(
    dtype: str, mixed: str, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``accelerate launch`` puts the mixed precision of its config into the environment."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    assert recipe.training_arguments(settings("--dtype", dtype), "cpu").mixed_precision == mixed
