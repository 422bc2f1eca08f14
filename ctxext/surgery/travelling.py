"""Numbers of each token that travel with its key through a cache of transformers.

A cache knows how to grow, to be cropped, to be reordered for beams, to be offloaded. What is stored in it as a few more
dimensions of the keys goes through all of that with them, and needs no cache of ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers.cache_utils import Cache, QuantizedLayer

from ctxext.errors import IncompatibleError

PIECES = 3
"""In how many numbers of the keys' dtype a wider one is kept: three of bfloat16 hold all digits of one of float32."""


@dataclass(eq=False)
class Travelling:
    """What an encoding has for each token of one layer, in one call.

    Args:
        numbers: those of the call's own tokens, and of all tokens of the cache once it was asked for their keys;
            ``heads`` are those of queries or of keys.
    """

    numbers: Float[Tensor, "batch heads seq numbers"]

    def through(self, cache: Any) -> _CarryingCache:
        """``cache``, for one layer in one call: it keeps the numbers with the keys, and gives keys without them."""
        return _CarryingCache(cache, self)


class _CarryingCache:
    """Stands in for a cache while one attention layer runs. Whatever is not ``update`` is the cache's own."""

    def __init__(self, cache: Cache, travels: Travelling) -> None:
        self._cache, self._travels = cache, travels

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_cache"], name)

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As the cache's own."""
        numbers = self._travels.numbers
        packed = _packed(numbers, keys)
        wide = torch.cat([keys, packed], -1)
        _make_room(self._cache, layer_idx, wide, values)
        found, values = self._cache.update(wide, values, layer_idx, *args, **kwargs)
        if isinstance(self._cache.layers[layer_idx], QuantizedLayer):
            raise IncompatibleError(
                "This model keeps numbers of its encoding with its keys, and a quantized cache would round them. "
                "Take a cache that keeps keys as they are."
            )
        found, packed = found.split([keys.shape[-1], packed.shape[-1]], -1)
        self._travels.numbers = _unpacked(packed, numbers)
        return found, values


def _make_room(cache: Cache, layer_idx: int, keys: Tensor, values: Tensor) -> None:
    """Let a cache whose memory was laid out for keys alone lay it out anew.

    Raises:
        IncompatibleError: if it holds keys of a model without this encoding.
    """
    layer: Any = cache.layers[layer_idx] if layer_idx < len(cache.layers) else None
    if layer is None or not layer.is_initialized or layer.keys is None or layer.keys.ndim != 4:
        return
    if layer.keys.shape[-1] == keys.shape[-1]:
        return
    if layer.get_seq_length() > 0:
        raise IncompatibleError(
            f"Keys in this cache have {layer.keys.shape[-1]} dimensions and those of this model, with the numbers of "
            f"its encoding, {keys.shape[-1]}: it was filled by another model, or before ctxext.patch. Begin a new one."
        )
    layer.lazy_initialization(keys, values)


def _packed(
    numbers: Float[Tensor, "batch heads seq numbers"], keys: Float[Tensor, "batch kv_heads seq head_dim"]
) -> Float[Tensor, "batch kv_heads seq packed"]:
    """The numbers as more dimensions of keys, those of the query heads that share a key head side by side."""
    batch, kv_heads, seq, _ = keys.shape
    by_head = numbers.reshape(batch, kv_heads, -1, *numbers.shape[2:])
    shared = by_head.transpose(2, 3).reshape(batch, kv_heads, seq, -1)
    if torch.promote_types(shared.dtype, keys.dtype) == keys.dtype:
        return shared.to(keys.dtype)
    pieces, rest = [shared.to(keys.dtype)], shared.detach()  # the first one passes on the gradient of all
    for _ in range(1, PIECES):
        rest = rest - pieces[-1].detach().to(rest.dtype)
        pieces.append(rest.to(keys.dtype))
    return torch.cat(pieces, -1)


def _unpacked(
    packed: Float[Tensor, "batch kv_heads key packed"], like: Float[Tensor, "batch heads seq numbers"]
) -> Float[Tensor, "batch heads key numbers"]:
    """What ``_packed`` put there, with the heads and in the dtype of ``like``."""
    batch, kv_heads, key, _ = packed.shape
    each, wide = like.shape[1] // kv_heads * like.shape[3], torch.promote_types(like.dtype, packed.dtype)
    found = packed.to(wide).reshape(batch, kv_heads, key, -1, each).sum(-2).to(like.dtype)
    by_head = found.reshape(batch, kv_heads, key, -1, like.shape[3]).transpose(2, 3)
    return by_head.reshape(batch, -1, key, like.shape[3])
