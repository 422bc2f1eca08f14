"""Caches: rows that are read through one in passes, each held against itself, read alone in one pass."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ctxext.caches.records import empty
from tests._models import logits, tokens


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


class Reading:
    """A text in progress.

    Args:
        model: the model that reads.
        length: tokens of a row, padding included.
        padding: slots in front of each row that hold none of its tokens.
        cache: a cache without tokens; None makes a growing one.
    """

    def __init__(self, model: PreTrainedModel, length: int, padding: list[int], cache: Any = None) -> None:
        self.model, self.cache, self.at = model, DynamicCache() if cache is None else cache, 0
        self.ids = tokens(length, rows=len(padding))
        self.keep = torch.arange(length)[None] >= torch.tensor(padding)[:, None]
        self.alone = [
            torch.nn.functional.pad(logits(model, self.ids[row : row + 1, start:])[0], (0, 0, start, 0))
            for row, start in enumerate(padding)
        ]
        self.rows = list(range(len(padding)))

    def read(self, *steps: int) -> None:
        """Read passes of so many tokens, and require that each row is as it is alone."""
        keep = self.keep[self.rows]
        for step in steps:
            found = read(self.model, self.cache, self.ids[self.rows], [step], None if keep.all() else keep)
            for place, row in enumerate(self.rows):
                here = self.keep[row, self.at : self.at + step]
                wanted = self.alone[row][self.at : self.at + step]
                error = (found[place][here] - wanted[here]).abs()
                least = 1e-6 if found.dtype == torch.float64 else 1e-4
                most = least * max(1.0, float(self.alone[row].abs().max()))
                assert not len(error) or float(error.max()) < most, (self.at, step, row)
            self.at += step

    def crop(self, count: int | Tensor) -> None:
        self.cache.crop(-count)
        self.at -= int(count)

    def copy(self) -> None:
        """Go on with a copy that went through a file."""
        self.cache = pickle.loads(pickle.dumps(copy.deepcopy(self.cache)))

    def pick(self, rows: list[int]) -> None:
        self.cache.reorder_cache(torch.tensor(rows))
        self.rows = [self.rows[row] for row in rows]

    def repeat(self) -> None:
        self.cache.batch_repeat_interleave(2)
        self.rows = [row for row in self.rows for _ in range(2)]

    def empty(self) -> None:
        empty(self.cache)
        self.at = 0
