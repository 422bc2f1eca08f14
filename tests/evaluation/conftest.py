"""A tiny random model and tokens for it: everything offline, nothing trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from tests._checkpoints import save_with_tokenizer
from tests._models import byte_model


@pytest.fixture
def model() -> LlamaForCausalLM:
    return byte_model()


@pytest.fixture
def input_ids() -> torch.Tensor:
    return torch.randint(0, 256, (2, 90), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def checkpoint(model: LlamaForCausalLM, tmp_path: Path) -> str:
    """The model on disk with its tokenizer, trained for 512 tokens."""
    return str(save_with_tokenizer(model, tmp_path / "tiny"))
