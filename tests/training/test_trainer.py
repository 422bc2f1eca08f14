"""The Trainer of the recipe: rates of its groups of weights, and gradients that are no numbers."""

from __future__ import annotations

import os
import pty
import re
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainingArguments

from ctxext.training.lora import attach_lora
from ctxext.training.progress import TrainingProgress
from ctxext.training.trainer import LongTrainer, NotANumberError
from tests._host_reads import Counting
from tests._models import tiny, tokens
from tests.training._recipe import QUIET


def trainer_of(directory: Path, *, layers: int = 2, steps: int = 1, **own: Any) -> LongTrainer:
    model = attach_lora(tiny(num_hidden_layers=layers, tie_word_embeddings=True), rank=4)
    rows = [{"input_ids": row, "labels": row, "index": torch.tensor(0)} for row in tokens(rows=2)]
    arguments = TrainingArguments(
        str(directory), max_steps=steps, learning_rate=1e-3, remove_unused_columns=False, **QUIET
    )
    return LongTrainer(model, arguments, train_dataset=rows, **own)


@pytest.mark.slow
@pytest.mark.parametrize("rate", [None, 1e-5])
def test_the_embedding_has_a_rate_of_its_own(rate: float | None, tmp_path: Path) -> None:
    """One step of Adam moves every weight by its rate."""
    trainer = trainer_of(tmp_path, embedding_learning_rate=rate)
    model = trainer.model
    before = {name: weight.detach().clone() for name, weight in model.named_parameters() if weight.requires_grad}
    trainer.train()
    trained = [weight for group in trainer.optimizer.param_groups for weight in group["params"]]
    assert len(trained) == len({id(weight) for weight in trained}) == len(before)
    moved = {
        name: (weight - before[name]).abs().max().item() for name, weight in model.named_parameters() if name in before
    }
    embedding = {name for name in moved if "embed_tokens" in name}
    assert len(embedding) == 1
    for name, distance in moved.items():
        expected = rate if rate is not None and name in embedding else 0.0 if "lora_A" in name else 1e-3
        assert distance == pytest.approx(expected, rel=0.02), name


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
@pytest.mark.parametrize("part", ["lora_A", "embed_tokens"])
def test_a_gradient_that_is_no_number_stops_training_before_weights_change(
    wrong: float, part: str, tmp_path: Path
) -> None:
    """One number among all of them, in the last weight of its kind, under a loss that is a number."""
    trainer = trainer_of(tmp_path)
    trained = {name: weight for name, weight in trainer.model.named_parameters() if weight.requires_grad}
    before = {name: weight.detach().clone() for name, weight in trained.items()}

    def spoiled(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        gradient.view(-1)[-1] = wrong
        return gradient

    [weight for name, weight in trained.items() if part in name][-1].register_hook(spoiled)
    with pytest.raises(NotANumberError, match=r"A gradient is not finite \(the loss is \d\.\d+\) in step 1"):
        trainer.train()
    assert all(torch.equal(weight, before[name]) for name, weight in trained.items())


@pytest.mark.nightly
def test_reads_of_a_step_do_not_grow_with_the_weights(tmp_path: Path) -> None:
    def reads(layers: int, steps: int) -> int:
        trainer = trainer_of(tmp_path, layers=layers, steps=steps)
        with Counting() as counting:
            trainer.train()
        return counting.found.total()

    few, many = (reads(layers, steps=6) - reads(layers, steps=2) for layers in (1, 3))
    assert few == many


def test_the_bar_of_a_terminal_shows_the_loss_of_each_step_beside_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = pty.openpty()
    written: list[bytes] = []

    def read() -> None:
        while not written or b"the end" not in b"".join(written):
            written.append(os.read(ours, 4096))

    reader = threading.Thread(target=read)
    reader.start()
    progress = TrainingProgress(lambda step: 100)
    trainer = trainer_of(tmp_path, steps=3, callbacks=[progress])
    with os.fdopen(theirs, "w") as terminal, monkeypatch.context() as patched:
        patched.setenv("COLUMNS", "200")
        patched.setattr(sys, "stderr", terminal)
        trainer.train()
        progress.close()
        terminal.write("the end")
        terminal.flush()
        reader.join()
    os.close(ours)
    shown = set(re.findall(r"step (\d)/3  loss (\S+)", b"".join(written).decode()))
    losses = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert shown == {(str(entry["step"]), f"{entry['loss']:.4f}") for entry in losses}
    assert len(shown) == 3
