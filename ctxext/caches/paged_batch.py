"""The requests of a pass under continuous batching (``generate_batch``), as documents of one row or as rows.

transformers puts the new tokens of all requests end to end into one row, and its paged cache returns the keys of all
requests end to end. So a request is one span of a layout: its queries are the newest of its tokens. Where each request
has one new token, requests are the rows of a batch with padding on the left, which takes as few kernel calls as one
request. Keys lie in the cache as the model rotated them, so that requests may share the blocks of a prefix.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers.generation.continuous_batching import (
    ContinuousBatchingManager,
    PagedAttentionCache,
    RequestState,
)
from transformers.generation.continuous_batching.requests import FutureRequestState

from ctxext.caches.guards import guards_of
from ctxext.caches.layout_mask import LayoutMask
from ctxext.errors import PatchStateError
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
                indices[allocator.index] = pad_sequence(
                    indices[allocator.index].split(counts),
                    batch_first=True,
                    padding_value=allocator.read_trash_index,
                    padding_side="left",
                ).flatten()
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
            replaced: dict[str, Any] = {
                "batch_size": layout.batch,
                "q_length": layout.query_length,
                "kv_length": layout.key_length,
                "q_offset": 0,
                "kv_offset": 0,
                "mask_function": lambda row, head, query, key: layout.visible(window)[row, query, key],
                "attention_mask": None,
                "allow_is_causal_skip": False,
                "use_vmap": False,
                "device": query.device,
                "dtype": query.dtype,
                "config": module.config,
            }
            self._masks[kind] = LayoutMask(layout, window=window, replaced=replaced)
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


class PagedManager(ContinuousBatchingManager):  # type: ignore[misc]
    """Manager of continuous batching for a patched model, which declares how long each request may become.

    It serves the model under the extension under which it was made, and no other.
    """

    continuous_batching_config: Any

    def __init__(self, batching: Any, **settings: Any) -> None:
        self._batching = batching
        self._extension = guards_of(batching.subject.model)[0].extension
        super().__init__(batching.subject.model, **settings)

    def _require_extended(self) -> None:
        """Raise ``PatchStateError`` if the extension of the model changed after this manager was made."""
        guards = guards_of(self.model)
        if not guards or guards[0].extension != self._extension:
            raise PatchStateError(
                f"This manager of continuous batches was made while the model was extended by "
                f"{self._extension.said}. Now it is extended otherwise, or not at all, so keys in its "
                f"cache have other positions. Make a new one: model.init_continuous_batching()."
            )

    def _create_batch_processor(self) -> Any:
        """Create what holds the paged cache, and record the extension on that."""
        self._require_extended()
        processor = super()._create_batch_processor()
        guards_of(self.model)[0].claim(processor.cache)
        return processor

    def switch_to_cb_friendly_attn(self, *args: Any, **kwargs: Any) -> None:
        """Keep ctxext's attention; a model without it goes on transformers' paged one."""
        if not self._batching.by_layout:
            super().switch_to_cb_friendly_attn(*args, **kwargs)

    def add_request(self, input_ids: list[int], *args: Any, max_new_tokens: int | None = None, **kwargs: Any) -> Any:
        """Add a request as transformers does; a dynamic method needs its number of new tokens."""
        self._require_extended()
        self._batching.require_limit(
            self.generation_config.max_new_tokens if max_new_tokens is None else max_new_tokens
        )
        return super().add_request(input_ids, *args, max_new_tokens=max_new_tokens, **kwargs)

    def try_a_pass(self) -> None:
        """Run a pass over two tokens in a small cache, in the thread of the caller, who sees its failure."""
        settings = self.continuous_batching_config
        small = {"page_size": 4, "num_blocks": self._batching.subject.text.num_hidden_layers}
        small |= {"max_batch_tokens": 4, "max_requests_per_batch": 1, "cpu_offload_space": 0.0}
        self.continuous_batching_config = copy.copy(settings)
        vars(self.continuous_batching_config).update(small)
        self.batch_processor = processor = self._create_batch_processor()
        request = RequestState("trial", [0, 0], max_new_tokens=1, tokens_to_process=[0, 0])
        processor.cache.can_store_request_tokens(request, 2)
        inputs = processor.inputs_and_outputs
        requests = [FutureRequestState(request, has_new_token=True, complete_blocks={}, query_length=2)]
        sizes = {"use_decode_fast_path": False, "num_q_tokens": 2, "max_kv_read": 0, "use_padding": False}
        inputs.prepare_batch_tensors(requests, self.logit_processor, **sizes)
        self._declare()
        with torch.no_grad():
            self.model(**inputs.get_model_kwargs())
        self.batch_processor, self.continuous_batching_config = None, settings

    def restore_attention(self) -> None:
        """Give the model back the attention that it had before this manager."""
        if self._original_attn_impl is not None:
            self.model.set_attn_implementation(self._original_attn_impl)

    def _declare(self) -> None:
        """Record on the cache how long each request of the next pass may become."""
        if self._batching.method.dynamic:
            states = [request.state for request in self.batch_processor.inputs_and_outputs.requests_in_batch]
            reaches = [len(state.initial_tokens) + state.max_new_tokens for state in states]
            setattr(self.batch_processor.cache, REACHES, reaches)

    def _generation_step(self) -> None:
        """Run a pass over the requests of a batch."""
        self._require_extended()  # a pause lets another thread change the model while requests wait
        self._declare()
        super()._generation_step()
