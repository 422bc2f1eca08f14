"""The Trainer of the recipe: rates of its groups of weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import TrainingArguments

from ctxext.training.lora import attach_lora
from ctxext.training.trainer import LongTrainer
from tests._models import tiny, tokens


@pytest.mark.parametrize("rate", [None, 1e-5])
def test_the_embedding_has_a_rate_of_its_own(rate: float | None, tmp_path: Path) -> None:
    """One step of Adam moves every weight by its rate."""
    model = attach_lora(tiny(tie_word_embeddings=True), rank=4)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters() if weight.requires_grad}
    rows = [{"input_ids": row, "labels": row, "index": torch.tensor(0)} for row in tokens(rows=2)]
    arguments = TrainingArguments(
        str(tmp_path), max_steps=1, learning_rate=1e-3, use_cpu=True, report_to=[], remove_unused_columns=False
    )
    trainer = LongTrainer(model, arguments, train_dataset=rows, embedding_learning_rate=rate)
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
