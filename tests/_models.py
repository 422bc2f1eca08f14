"""Tiny random models for all tests, built as the walk over every architecture builds them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import PreTrainedModel

sys.path.insert(0, str(Path(__file__).parents[1]))  # scripts/ is not part of the installed package

from scripts.walk.check import State
from scripts.walk.tiny import TRAINED_LENGTH, tiny_config, tiny_model

__all__ = ["MODELS", "RECENT", "TRAINED_LENGTH", "State", "logits", "tiny", "tokens"]

# The newest transformers that ctxext is developed on; a few tests meet defects of older ones, each named there.
RECENT = Version(transformers.__version__) >= Version("5.23")

# One of each structure that the contract names: what its config needs to be told.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {},
    "gemma3_text": {},
    "deepseek_v3": {},
}


def tiny(model_type: str = "llama", seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random model of a type, trained for 64 tokens, in evaluation mode; ``changes`` are fields of its config."""
    return tiny_model(tiny_config(model_type, **(MODELS.get(model_type, {}) | changes)), seed)


def tokens(length: int = 3 * TRAINED_LENGTH, rows: int = 1) -> Tensor:
    """Random tokens, none of them special; the first row of more rows is the only row of one."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(40, 128, (rows, length), generator=generator)


@torch.no_grad()
def logits(model: Any, inputs: Tensor, **arguments: Any) -> Tensor:
    """Logits of one forward pass without a cache."""
    result: Tensor = model(inputs, use_cache=False, **arguments).logits
    return result
