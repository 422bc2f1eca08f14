"""The requests of a pass under continuous batching (``generate_batch``), as documents of one row.

transformers puts the new tokens of all requests end to end into one row, and its paged cache returns the keys of all
requests end to end. So a request is one span of a layout: its queries are the newest of its tokens. Keys lie in the
cache as the model rotated them, so that requests may share the blocks of a prefix.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor, nn
from transformers.generation.continuous_batching import PagedAttentionCache

from ctxext.attention import Layout
from ctxext.surgery.layout_mask import LayoutMask

# Attribute of a paged cache: the tokens that each request of the running pass may have in the end.
REACHES = "_ctxext_reaches"


@dataclass(frozen=True)
class PagedBatch:
    """The requests of one pass, whose tokens lie end to end in one row.

    Args:
        cache: the paged cache.
        queries: tokens of each request in this pass.
        lengths: tokens of each request so far, those of this pass included.
        keys: by type of attention layer, the keys of each request that the cache returns, its newest.
    """

    cache: PagedAttentionCache
    queries: Sequence[int]
    lengths: Sequence[int]
    keys: Mapping[str, Sequence[int]]
    _masks: dict[str, LayoutMask] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, cache: PagedAttentionCache, given: Mapping[str, Any]) -> PagedBatch:
        """Return the batch of a pass, from the arguments of its decoder."""
        ends = given["cu_seq_lens_q"].tolist()
        last = given["position_ids"][0, [end - 1 for end in ends[1:]]].tolist()
        keys = {kind: _counts(ends_of_keys.tolist()) for kind, ends_of_keys in given["cu_seq_lens_k"].items()}
        return cls(cache, _counts(ends), [position + 1 for position in last], keys)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Places of each request in the row, as (start, stop)."""
        return list(pairwise(accumulate(self.queries, initial=0)))

    @property
    def reaches(self) -> Sequence[int]:
        """Tokens that each request may have in the end."""
        reaches: Sequence[int] = getattr(self.cache, REACHES)
        return reaches

    def mask(self, module: nn.Module, query: Tensor) -> LayoutMask:
        """Return the layout for an attention layer, shared by all layers of its type."""
        allocator = self.cache.layer_to_allocator[module.layer_idx]
        kind, window = allocator.layer_type, getattr(allocator, "sliding_window", None)
        if kind not in self._masks:
            keys = self.keys[kind]
            layout = Layout.packed(self.lengths, queries=self.queries, keys=keys, device=query.device)
            sizes = {"batch_size": 1, "q_length": query.shape[2], "kv_length": sum(keys), "q_offset": 0, "kv_offset": 0}
            shown = functools.partial(_shows, layout, window)
            how = {"mask_function": shown, "attention_mask": None, "allow_is_causal_skip": False, "use_vmap": False}
            place = {"device": query.device, "dtype": query.dtype, "config": module.config}
            self._masks[kind] = LayoutMask(layout, window=window, replaced=sizes | how | place)
        return self._masks[kind]


def _counts(ends: Sequence[int]) -> list[int]:
    """Return the number of tokens of each request, from cumulative numbers."""
    return [stop - start for start, stop in pairwise(ends)]


def _shows(layout: Layout, window: int | None, row: Any, head: Any, query: Tensor, key: Tensor) -> Tensor:
    """Return whether queries see keys, both given by their places, as a mask function of transformers."""
    assert layout.query_documents is not None
    assert layout.key_documents is not None
    distance = layout.query_positions[0, query] - layout.key_positions[0, key]
    seen = (distance >= 0) & (layout.query_documents[0, query] == layout.key_documents[0, key])
    return seen if window is None else seen & (distance < window)
