"""Models that run on a CUDA device that is not there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import ctxext
from ctxext.kernels import base, sdpa
from ctxext.methods import known_methods
from ctxext.methods.base import BiasMethod, RopeMethod
from ctxext.methods.encoding import EncodingMethod
from ctxext.methods.remap import RemapMethod
from ctxext.spec import RopeSpec
from tests._models import tiny
from tests.walk.tiny import TRAINED_LENGTH

SPEC = RopeSpec(rotary_dim=32, base=10000.0, trained_length=TRAINED_LENGTH)
LENGTH = TRAINED_LENGTH + 40
KINDS = (RopeMethod, BiasMethod, RemapMethod, EncodingMethod)
MODELS = [("llama", name) for name, cls in known_methods().items() if issubclass(cls, KINDS)]
MODELS += [("bloom", "alibi"), ("mpt", "alibi"), ("gpt_neox", "self_extend"), ("deepseek_v3", "yarn"), ("gpt2", "tile")]
MODELS += [("gemma3_text", "yarn"), ("qwen3", "dual_chunk"), ("mixtral", "yarn"), ("opt", "hierarchical")]
EXPERTS = ("deepseek_v3", "mixtral")


def set_capability(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    for module in (base, sdpa):
        monkeypatch.setattr(module, "capability_of", torch.cuda.get_device_capability)  # without what it remembers


def patched(model_type: str, name: str, dtype: torch.dtype) -> PreTrainedModel:
    if model_type in EXPERTS and dtype == torch.float32:
        pytest.skip("without data torch computes experts in bfloat16 only")
    model, cls = tiny(model_type).to(dtype), known_methods()[name]
    how: dict[str, Any] = {"growth": "doubling"} if name.startswith("dynamic_") else {}
    method: Any = cls.example(SPEC) if model_type == "llama" and not how else name
    length: dict[str, Any] = {} if isinstance(method, str) else {"trained_length": TRAINED_LENGTH}
    return ctxext.patch(model, method, **(length or {"factor": 4.0} | how))
