"""The requests of a pass under continuous batching (``generate_batch``), as documents of one row or as rows.

transformers puts the new tokens of all requests end to end into one row, and its paged cache returns the keys of all
requests end to end. So a request is one span of a layout: its queries are the newest of its tokens. Where each request
has one new token, requests are the rows of a batch with padding on the left, which takes as few kernel calls as one
request. Keys lie in the cache as the model rotated them, so that requests may share the blocks of a prefix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers.generation.continuous_batching import PagedAttentionCache

from ctxext.caches.layout_mask import LayoutMask
from ctxext.kernels import Layout

# Attribute of a paged cache: the tokens that each request of the running pass may have in the end.
REACHES = "_ctxext_reaches"


@dataclass(frozen=True)
class PagedBatch:
    """The requests of one pass, whose tokens lie end to end in one row.

    Args:
        queries: tokens of each request in this pass.
        lengths: tokens of each request so far, including this pass.
        keys: by type of attention layer, the keys of each request that the cache returns, its newest.
    """

    cache: PagedAttentionCache
    queries: Sequence[int]
    lengths: Sequence[int]
    keys: Mapping[str, Sequence[int]]
    _masks: dict[str, LayoutMask] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, cache: PagedAttentionCache, given: Mapping[str, Any], *, by_layout: bool) -> PagedBatch:
        """Return the batch of a pass, from its decoder's arguments; ``by_layout``, let its cache return padded rows."""
        ends = given["cu_seq_lens_q"].tolist()
        last = given["position_ids"][0, [end - 1 for end in ends[1:]]].tolist()
        keys = {kind: _counts(ends_of_keys.tolist()) for kind, ends_of_keys in given["cu_seq_lens_k"].items()}
        batch = cls(cache, _counts(ends), [position + 1 for position in last], keys)
        for kind, counts in keys.items() if by_layout else ():
            allocator, indices = cache.cache_allocators[kind], given["read_index"]
            if batch.are_rows(kind) and min(counts) < max(counts):
                parts = indices[allocator.index].split(counts)
                empty = {"padding_value": allocator.read_trash_index, "padding_side": "left"}
                indices[allocator.index] = pad_sequence(parts, batch_first=True, **empty).flatten()
        return batch

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Places of each request in the row, as (start, stop)."""
        return list(pairwise(accumulate(self.queries, initial=0)))

    @property
    def reaches(self) -> Sequence[int]:
        """Tokens that each request may have in the end."""
        reaches: Sequence[int] = getattr(self.cache, REACHES)
        return reaches

    def are_rows(self, kind: str) -> bool:
        """Return whether attention of a type gets a row for each request: one query each, and not too much padding."""
        keys, device = self.keys[kind], self.cache.cache_tensor.device
        return max(self.queries) == 1 and pads_little(len(keys), max(keys), sum(keys), device)

    def mask(self, module: nn.Module, query: Tensor) -> LayoutMask:
        """Return the layout for an attention layer, shared by all layers of its type."""
        allocator = self.cache.layer_to_allocator[module.layer_idx]
        kind, window = allocator.layer_type, getattr(allocator, "sliding_window", None)
        if kind not in self._masks:
            layout = self._layout(kind, query.device)
            sizes = {"batch_size": layout.batch, "q_length": layout.query_length, "kv_length": layout.key_length}
            given: dict[str, Any] = {"attention_mask": None, "allow_is_causal_skip": False, "use_vmap": False}
            given |= {"device": query.device, "dtype": query.dtype, "config": module.config}
            given["mask_function"] = lambda row, head, query, key: layout.visible(window)[row, query, key]
            given |= sizes | {"q_offset": 0, "kv_offset": 0}
            self._masks[kind] = LayoutMask(layout, window=window, replaced=given)
        return self._masks[kind]

    def _layout(self, kind: str, device: torch.device) -> Layout:
        keys = self.keys[kind]
        if not self.are_rows(kind):
            return Layout.packed(self.lengths, queries=self.queries, keys=keys, device=device)
        if min(keys) == max(keys):
            return Layout.causal(len(keys), 1, keys[0], device=device)
        padding = max(keys) - torch.tensor(keys, device=device)[:, None]
        return Layout.padded(torch.arange(max(keys), device=device) >= padding, query=1, analyse=False)


def pads_little(rows: int, keys: int, tokens: int, device: torch.device) -> bool:
    """Return whether single queries are computed faster as padded rows of ``keys`` keys than row by row.

    On a CPU they are while padding at most doubles the tokens. Elsewhere kernels without a mask take rows of different
    lengths one by one: there is to be no padding.
    """
    return rows * keys <= (2 if device.type == "cpu" else 1) * tokens


def _counts(ends: Sequence[int]) -> list[int]:
    """Return the number of tokens of each request, from cumulative numbers."""
    return [stop - start for start, stop in pairwise(ends)]
