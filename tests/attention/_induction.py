"""Scores of heads from all attention weights, by their definition."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor


def repeated(model: Any, seed: int = 0) -> Tensor:
    """The text that a model of 64 tokens reads: its first token where it has one, random tokens, and those again."""
    special = {value for name, value in vars(model.config).items() if name.endswith("_token_id")}
    ordinary = torch.tensor([token for token in range(model.config.vocab_size) if token not in special])
    first = [] if model.config.bos_token_id is None else [model.config.bos_token_id]
    order = torch.randperm(len(ordinary), generator=torch.Generator().manual_seed(seed))
    tokens = ordinary[order[: (64 - len(first)) // 2]].tolist()
    return torch.tensor([*first, *tokens, *tokens])


def by_definition(model: Any, text: Tensor, pairs: list[tuple[int, int]]) -> list[float]:
    """Scores from all attention weights, head by head: of pairs of a query and its twin."""
    model = copy.deepcopy(model).eval()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        layers = model(text[None], output_attentions=True, use_cache=False).attentions
    kv_heads = getattr(model.config, "num_key_value_heads", model.config.num_attention_heads)
    groups = []
    for layer in layers:
        each = [sum(float(head[i, j] + head[i, j + 1]) for i, j in pairs) / len(pairs) for head in layer[0].float()]
        per_group = len(each) // kv_heads
        groups += [max(each[group * per_group : (group + 1) * per_group]) for group in range(kv_heads)]
    return groups


def induction(model: Any, seed: int = 0) -> list[float]:
    """Scores by induction from all attention weights."""
    text = repeated(model, seed)
    half = len(text) // 2
    first = len(text) % 2
    return by_definition(model, text, [(first + half + i, first + i) for i in range(half - 1)])
