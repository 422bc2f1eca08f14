"""A tiny random model and tokens for it: everything offline, nothing trained."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaForCausalLM

from tests._models import byte_model


@pytest.fixture
def model() -> LlamaForCausalLM:
    return byte_model()


@pytest.fixture
def input_ids() -> torch.Tensor:
    return torch.randint(0, 256, (2, 90), generator=torch.Generator().manual_seed(1))
