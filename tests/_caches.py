"""Caches that drop keys: read a text through one in passes, and what beams and batches do to its rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel


@torch.no_grad()
def read(model: PreTrainedModel, cache: Any, ids: Tensor, steps: list[int], keep: Tensor | None = None) -> Tensor:
    """Logits of the tokens after those in the cache, read in passes of so many tokens."""
    found, at = [], int(cache.get_seq_length())
    for step in steps:
        mask = {}
        if keep is not None:
            places = (keep.long().cumsum(1) - 1).clamp(min=0)
            mask = {"attention_mask": keep[:, : at + step], "position_ids": places[:, at : at + step]}
        found.append(model(ids[:, at : at + step], past_key_values=cache, **mask).logits)
        at += step
    return torch.cat(found, 1)


# What beams and batches do to the rows of a cache of two, and the rows that it then has.
OF_ROWS: list[tuple[Callable[[DynamicCache], None], list[int]]] = [
    (lambda cache: cache.reorder_cache(torch.tensor([1, 0])), [1, 0]),
    (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1]),
    (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
]
