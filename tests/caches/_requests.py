"""Requests of uneven rows, and their steps one by one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, StaticCache

import ctxext
from ctxext.methods.longrope import LongRoPE
from tests._models import tiny, tokens
from tests.walk.tiny import TRAINED_LENGTH

LONG_SET = tuple(1 + number / 4 for number in range(16))
LONGROPE = LongRoPE(short_factor=(1.0,) * 16, long_factor=LONG_SET, factor=4.0, growth="request")
METHODS: dict[str, dict[str, Any]] = {
    "dynamic_ntk": {"method": "dynamic_ntk", "factor": 2.0, "growth": "request"},
    "dynamic_yarn": {"method": "dynamic_yarn", "factor": 4.0, "growth": "request"},
    "dynamic_pi": {"method": "dynamic_pi", "factor": 4.0, "growth": "request"},
    "longrope": {"method": LONGROPE},
}
EVERY = [*(("llama", method) for method in METHODS), ("bloom", "dynamic_pi")]
EVERY += [("gemma3_text", "dynamic_yarn"), ("gemma3n_text", "dynamic_pi")]
PROMPT, NEW = TRAINED_LENGTH - 4, 12
TOTAL = PROMPT + NEW


def build(method: str, model_type: str = "llama", **changes: Any) -> PreTrainedModel:
    return ctxext.patch(tiny(model_type, **changes), trained_length=TRAINED_LENGTH, **METHODS[method])


def padded(width: int = PROMPT, short: int = 20) -> tuple[Tensor, Tensor]:
    """A row of so many tokens, and one of ``short`` tokens behind padding."""
    ids = tokens(width, rows=2)
    mask = torch.ones_like(ids)
    mask[1, : width - short] = 0
    return ids.masked_fill(mask == 0, 0), mask


def prepared(model: Any, ids: Tensor, cache: StaticCache, **options: Any) -> dict[str, Any]:
    """Arguments of the call that reads the last of ``ids``, as ``generate`` prepares them."""
    mask, new = torch.ones_like(ids), ids.shape[1] - int(cache.get_seq_length())
    options |= {"attention_mask": mask, "position_ids": mask.cumsum(1) - 1, "past_key_values": cache}
    given: dict[str, Any] = model.prepare_inputs_for_generation(ids, new, **options)
    return given


@torch.no_grad()
def stepped(model: Any, ids: Tensor, cache: StaticCache, run: Any = None, **options: Any) -> Tensor:
    """Logits behind the last of ``ids``, by the model or in the form ``run``."""
    found: Tensor = (model if run is None else run)(**prepared(model, ids, cache, **options)).logits[:, -1]
    return found
