"""Run by test_step in its own process, in Triton's interpreter: texts read token by token through the kernel."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, StaticCache

import ctxext
from ctxext.caches.held import Reach
from ctxext.kernels import step

SHAPE = {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
METHODS: dict[str, dict[str, Any]] = {
    "self_extend": {"window": 8, "temperature": "logn"},
    "dual_chunk": {"chunk": 12, "local": 2},
    "rerope": {"window": 8, "leak": 0.125},
    "streaming": {"window": 8},
    "dpe": {"window": 8, "groups": [2, 4]},
    "retrieval_heads": {"heads": [0, 3], "window": 8, "temperature": "logn"},
}


@torch.no_grad()
def error(method: str, cache: Any) -> float:
    """Return the largest error of logits across the borders of a method, a padded row beside a full one."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE, **HEADS)).eval()
    ctxext.patch(model, method, factor=4, **METHODS[method])
    ids, keep = torch.randint(32, (2, 60)), torch.ones(2, 60, dtype=torch.long)
    keep[0, :5] = 0
    places = (keep.cumsum(1) - 1).clamp(min=0)

    def read(start: int, stop: int) -> torch.Tensor:
        given = {"attention_mask": keep[:, :stop], "position_ids": places[:, start:stop], "past_key_values": cache}
        return model(ids[:, start:stop], **given).logits

    step.runs_triton = lambda device: False
    whole = model(ids, attention_mask=keep, position_ids=places, use_cache=False).logits
    step.runs_triton = lambda device: True
    read(0, 29)
    Reach.spare = 2  # layers drop keys, and split, between these steps
    found = [read(29, 32), *(read(at, at + 1) for at in range(32, 48)), read(48, 50)]
    split = [getattr(layer, "near", None) is not None for layer in cache.layers]
    assert all(split) == any(split) == (method == "retrieval_heads" and isinstance(cache, DynamicCache)), split
    return float((torch.cat(found, 1) - whole[:, 29:50]).abs().max())


if __name__ == "__main__":
    torch.set_num_threads(1)
    for method in sys.argv[1:]:
        static = StaticCache(config=LlamaConfig(**SHAPE, **HEADS), max_cache_len=64)
        print(json.dumps([error(method, DynamicCache()), error(method, static)]))
