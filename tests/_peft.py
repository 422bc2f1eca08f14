"""Adapters of a tiny Llama, and whether transformers' own (``add_adapter``) take the PEFT that is installed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from packaging.version import Version
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.integrations.peft import MIN_PEFT_VERSION

import ctxext

TOO_OLD = Version(peft.__version__) < Version(MIN_PEFT_VERSION)

through_transformers = pytest.mark.skipif(
    TOO_OLD, reason=f"transformers' own adapters need PEFT {MIN_PEFT_VERSION}, found {peft.__version__}"
)


def refusal(sentence: str) -> str:
    """A pattern of what transformers' own adapters fail with: ``sentence``, or that PEFT is too old for them."""
    return re.escape(sentence) + (rf"|please use a version >= {re.escape(MIN_PEFT_VERSION)}" if TOO_OLD else "")


ALL = ["q_proj", "k_proj", "v_proj", "o_proj"]


def base_of(directory: Path) -> Any:
    """Load the model that an adapter is for."""
    return AutoModelForCausalLM.from_pretrained(directory).eval()


def lora(**more: Any) -> peft.LoraConfig:
    """Return a config of LoRA on all of attention; ``more`` are fields of it."""
    return peft.LoraConfig(**{"task_type": "CAUSAL_LM", "target_modules": ALL} | more)


def shake(model: nn.Module) -> None:
    """Change the weights that can be trained, as training would."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)


EXTENSION = {"method": "yarn", "factor": 4}


def extended(model: Any, **more: Any) -> Any:
    """Return the model, extended."""
    return ctxext.patch(model, **EXTENSION, **more)


def trained(model: Any, config: Any = None) -> Any:
    """The model with an adapter that changes its logits, as training would leave it."""
    torch.manual_seed(2)
    adapted = peft.get_peft_model(model, config or lora())
    shake(adapted)
    return adapted.eval()
