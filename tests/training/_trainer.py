"""A trainer of a tiny model with LoRA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from ctxext.training.lora import attach_lora
from ctxext.training.trainer import LongTrainer
from tests._models import tiny, tokens
from tests.training._recipe import QUIET


def trainer_of(directory: Path, *, layers: int = 2, steps: int = 1, **own: Any) -> LongTrainer:
    model = attach_lora(tiny(num_hidden_layers=layers, tie_word_embeddings=True), rank=4)
    rows = [{"input_ids": row, "labels": row, "index": torch.tensor(0)} for row in tokens(rows=2)]
    arguments = TrainingArguments(
        str(directory), max_steps=steps, learning_rate=1e-3, remove_unused_columns=False, **QUIET
    )
    return LongTrainer(model, arguments, train_dataset=rows, **own)
