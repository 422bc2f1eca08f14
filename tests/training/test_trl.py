"""TRL trains an extended model: the losses are those of the model itself, and references and rollouts are extended."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import ctxext
from tests._models import byte_model
from tests._tokenizer import make_tokenizer

trl = pytest.importorskip("trl", reason="needs TRL: make nightly installs it")
pytestmark = pytest.mark.nightly

TEXT = "".join(f"{i} rivers run, and the rain falls on {i * i % 97} of them.\n" for i in range(14))
ROWS = [
    {"prompt": f"{number}{TEXT}", "chosen": " and the rain", "rejected": " of a river"} for number in range(4)
]  # longer than the 512 tokens that the model was trained for
STEP = {"max_steps": 1, "per_device_train_batch_size": 2, "learning_rate": 0.0, "logging_steps": 1}
SETTINGS: dict[str, Any] = STEP | {"use_cpu": True, "bf16": False, "report_to": [], "save_strategy": "no"}
LORA = LoraConfig(target_modules=["q_proj", "v_proj"])


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    made = make_tokenizer(bos=False)
    made.add_special_tokens({"eos_token": "<s>", "pad_token": made.convert_ids_to_tokens(1)})
    return made


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain checkpoint, trained for 512 tokens."""
    place = tmp_path_factory.mktemp("base")
    byte_model().save_pretrained(place)
    return place


def extended(base: Path, method: str) -> Any:
    return ctxext.patch(AutoModelForCausalLM.from_pretrained(base), method, factor=4)


def logged(trainer: Any, name: str) -> float:
    trainer.train()
    return float(trainer.state.log_history[0][name])


@pytest.mark.parametrize("adapter", [None, LORA], ids=["whole", "lora"])
@pytest.mark.parametrize("method", ["yarn", "self_extend"])
def test_sft_reads_beyond_the_trained_window(
    method: str, adapter: Any, base: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    ids = torch.tensor([tokenizer(row["prompt"]).input_ids for row in ROWS[:2]])
    model = extended(base, method)
    with torch.no_grad():
        expected = model(ids, labels=ids).loss.item()
    trainer = trl.SFTTrainer(
        model=model,
        args=trl.SFTConfig(str(tmp_path), max_length=2048, **SETTINGS),
        train_dataset=Dataset.from_dict({"input_ids": ids.tolist()}),
        processing_class=tokenizer,
        peft_config=adapter,
    )
    assert logged(trainer, "loss") == pytest.approx(expected, rel=1e-4)
    trainer.save_model(str(tmp_path / "saved"))
    assert ctxext.describe(ctxext.load(tmp_path / "saved")).target_length == 2048


@pytest.mark.parametrize("way", ["saved", "lora", "reference"])
def test_dpo_begins_at_the_logarithm_of_two(
    way: str, base: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    model = extended(base, "yarn" if way == "saved" else "self_extend")
    if way == "saved":
        ctxext.save(model, tmp_path / "long", tokenizer=tokenizer)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "long")
    trainer = trl.DPOTrainer(
        model=model,
        ref_model=ctxext.training.reference(model) if way == "reference" else None,
        args=trl.DPOConfig(str(tmp_path / "run"), max_length=2048, **SETTINGS),
        train_dataset=Dataset.from_list(ROWS),
        processing_class=tokenizer,
        peft_config=LORA if way == "lora" else None,
    )
    assert logged(trainer, "loss") == pytest.approx(math.log(2), abs=1e-6)


@pytest.mark.parametrize("way", ["saved", "lora"])
def test_grpo_rolls_out_and_scores_with_the_extension(
    way: str, base: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """Sampled from the most likely token alone, a rollout is what ``generate`` of the extended model gives."""
    model = extended(base, "yarn" if way == "saved" else "self_extend")
    prompt = tokenizer(ROWS[0]["prompt"], return_tensors="pt")
    written = model.generate(**prompt, max_new_tokens=8, do_sample=False, pad_token_id=1)[0, -8:].tolist()
    plain = AutoModelForCausalLM.from_pretrained(base)
    assert plain.generate(**prompt, max_new_tokens=8, do_sample=False, pad_token_id=1)[0, -8:].tolist() != written
    if way == "saved":
        ctxext.save(model, tmp_path / "long", tokenizer=tokenizer)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "long")
    rollouts: list[list[int]] = []

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        rollouts.extend(completion_ids)
        return [float(len(set(ids))) for ids in completion_ids]

    options = {"max_completion_length": 8, "num_generations": 2, "beta": 0.1, "top_k": 1}
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=trl.GRPOConfig(str(tmp_path / "run"), **options, **SETTINGS),
        train_dataset=Dataset.from_list([{"prompt": ROWS[0]["prompt"]}] * 4),
        processing_class=tokenizer,
        peft_config=LORA if way == "lora" else None,
    )
    assert logged(trainer, "kl") == pytest.approx(0, abs=1e-6)
    assert rollouts
    assert all(ids == written[: len(ids)] for ids in rollouts)


@pytest.mark.parametrize("kind", ["DPO", "GRPO"])
def test_a_reference_is_never_the_plain_checkpoint(
    kind: str, base: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """For a model extended in memory, TRL builds its reference from the path in the config, and is told so."""
    options: dict[str, Any] = {"reward_funcs": len} if kind == "GRPO" else {}
    settings = {"beta": 0.1, "num_generations": 2} if kind == "GRPO" else {}
    with pytest.raises(OSError, match=r"ctxext\.training\.reference"):
        getattr(trl, f"{kind}Trainer")(
            model=extended(base, "yarn"),
            args=getattr(trl, f"{kind}Config")(str(tmp_path), **settings, **SETTINGS),
            train_dataset=Dataset.from_list(ROWS),
            processing_class=tokenizer,
            **options,
        )
