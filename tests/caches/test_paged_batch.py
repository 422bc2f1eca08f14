"""Steps of decoding of many requests in one pass, against a formula in float64 for each request alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.generation.continuous_batching import PagedAttentionCache

import ctxext
from ctxext.caches import call
from ctxext.caches.paged_batch import PagedBatch
from tests._models import tiny

WINDOW, GROUP, THINNING = 24, 128, 0.5
KIND = "full_attention"


def cache_of(lengths: list[int], kind: str = KIND) -> tuple[Any, Tensor, dict[str, Any]]:
    """A paged cache in name only, the slots of all keys in their order, and what its decoder is given for a step."""
    allocator = SimpleNamespace(index=0, layer_type=kind, read_trash_index=0)
    cache = object.__new__(PagedAttentionCache)
    parts = {"cache_allocators": {kind: allocator}, "layer_to_allocator": {0: allocator}}
    vars(cache).update(parts, cache_tensor=torch.empty(0))
    slots = 1 + torch.randperm(sum(lengths), generator=torch.Generator().manual_seed(0))
    given = {"cu_seq_lens_q": torch.arange(len(lengths) + 1), "position_ids": torch.tensor([lengths]) - 1}
    ends = torch.tensor([0, *lengths]).cumsum(0)
    return cache, slots, given | {"cu_seq_lens_k": {kind: ends}, "read_index": [slots]}


def self_extended(q: Tensor, k: Tensor, v: Tensor, inv_freq: Tensor) -> Tensor:
    """Self-Extend of the newest token, from unrotated ``[heads, tokens, head_dim]``; the first token is not thinned."""
    newest, groups = k.shape[1] - 1, q.shape[0] // k.shape[0]
    keys = torch.arange(newest + 1)
    far = newest // GROUP + WINDOW - WINDOW // GROUP - keys // GROUP
    apart = torch.where(newest - keys < WINDOW, newest - keys, far)
    weight = torch.ones(len(keys), dtype=torch.float64)
    weight[(newest - keys >= WINDOW) & (keys >= 1)] = GROUP**-THINNING
    q, k = (torch.complex(*x.double().chunk(2, -1)) for x in (q, k))
    turned = torch.polar(torch.ones(len(keys), len(inv_freq), dtype=torch.float64), apart[:, None] * inv_freq)
    scores = (q * k.repeat_interleave(groups, 0).conj() * turned).sum(-1).real * (2 * q.shape[-1]) ** -0.5
    shares = scores.exp() * weight
    return (shares[..., None] * v.double().repeat_interleave(groups, 0)).sum(1) / shares.sum(1, keepdim=True)


def rotated(x: Tensor, places: Tensor, inv_freq: Tensor) -> Tensor:
    angles = places[:, None] * inv_freq
    turned = torch.complex(*x.double().chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], -1).to(x.dtype)


@pytest.mark.parametrize("lengths", [[1, 3000], [700, 1, 655, 710, 30, 690], [300] * 3, [1, 2, 3000], [1, 1]], ids=str)
@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-11), (torch.float32, 2e-5), (torch.bfloat16, 4e-2)])
def test_requests_of_any_lengths_decode_as_alone(
    lengths: list[int], dtype: torch.dtype, error: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("llama", num_key_value_heads=2)
    settings = {"window": WINDOW, "group": GROUP, "thinning": THINNING, "sinks": 1, "exact": False}
    ctxext.patch(model, ctxext.methods.SelfExtend(factor=64.0, **settings))
    layer, inv_freq = model.model.layers[0].self_attn, model.model.rotary_emb.inv_freq.double()
    heads, wide = model.config.num_attention_heads, layer.head_dim
    generator = torch.Generator().manual_seed(1)
    texts = [[torch.randn(n, length, wide, generator=generator).to(dtype) for n in (heads, 2, 2)] for length in lengths]
    places = [torch.arange(length).double() for length in lengths]
    q = torch.cat([rotated(q, at, inv_freq)[:, -1:] for (q, _, _), at in zip(texts, places, strict=True)], 1)
    keys = torch.cat([rotated(k, at, inv_freq) for (_, k, _), at in zip(texts, places, strict=True)], 1)
    cache, slots, given = cache_of(lengths)
    batch = PagedBatch.of(cache, given, by_layout=True)
    stored = [x.new_full((x.shape[0], 1 + x.shape[1], wide), 9) for x in (keys, keys)]
    for storage, x in zip(stored, (keys, torch.cat([v for _, _, v in texts], 1)), strict=True):
        storage[:, slots] = x
    k, v = (storage[None, :, given["read_index"][0]] for storage in stored)
    assert batch.are_rows(KIND) == (lengths != [1, 2, 3000])
    monkeypatch.setattr(call.current, "call", call.DecoderCall(None, None, batch=batch))
    with torch.no_grad():
        out, _ = AttentionInterface()["ctxext"](layer, q[None], k, v, None, scaling=wide**-0.5)
    wanted = [self_extended(q[:, -1:], k, v, inv_freq) for q, k, v in texts]
    assert out.dtype == dtype
    assert float((out[0] - torch.stack(wanted)).abs().max()) < error


def test_padding_takes_no_more_memory_than_the_keys() -> None:
    for lengths, are_rows in (([100_000, *[100] * 7], False), ([1000, 500, 400], True)):
        cache, slots, given = cache_of(lengths)
        batch = PagedBatch.of(cache, given, by_layout=True)
        longest = max(lengths) * len(lengths)
        assert batch.are_rows(KIND) == are_rows
        assert given["read_index"][0].numel() == (longest if are_rows else sum(lengths))
        assert longest <= 2 * sum(lengths) or given["read_index"][0] is slots


def test_other_attention_reads_keys_end_to_end() -> None:
    cache, slots, given = cache_of([5, 4])
    PagedBatch.of(cache, given, by_layout=False)
    assert given["read_index"][0] is slots


def test_layers_with_a_window_see_no_padding() -> None:
    """The mask of an attention of the model's own, written out for three requests of 3, 5 and 9 tokens."""
    cache, _, given = cache_of([3, 5, 4], "sliding_attention")
    cache.layer_to_allocator[0].sliding_window = 4
    given["position_ids"] = torch.tensor([[2, 4, 8]])
    batch = PagedBatch.of(cache, given, by_layout=True)
    module = nn.Module()
    module.layer_idx, module.config = 0, tiny().config
    mask = batch.mask(module, torch.zeros(1, 1, 3, 8)).under("sdpa")
    rows = [[0, 0, 1, 1, 1], [0, 1, 1, 1, 1], [0, 1, 1, 1, 1]]
    assert mask.tolist() == torch.tensor(rows, dtype=torch.bool)[:, None, None].tolist()
