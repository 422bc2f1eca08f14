"""Caches: rows that are read through one in passes, each held against itself, read alone in one pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests._models import logits


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


def require_one_pass(model: PreTrainedModel, cache: Any, ids: Tensor, *steps: int, padding: int = 0) -> None:
    """Hold what is read in passes of so many tokens to one pass of each row alone; the last row may be padded in front.

    A cache that holds tokens goes on with those behind them in ``ids``.
    """
    keep, at = torch.ones_like(ids), int(cache.get_seq_length())
    keep[-1, :padding] = 0
    found = read(model, cache, ids, list(steps), keep if padding else None)
    for row, start in enumerate([0] * (len(ids) - 1) + [padding]):
        right = logits(model, ids[row : row + 1, start : at + sum(steps)])[0]
        here, stop = max(at, start), at + sum(steps)
        error = float((found[row, here - at :] - right[here - start : stop - start]).abs().max())
        assert error < (1e-6 if right.dtype == torch.float64 else 1e-4) * max(1.0, float(right.abs().max())), (
            row,
            error,
        )
