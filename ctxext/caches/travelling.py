"""Store numbers of each token in a cache of transformers, as further dimensions of the token's key.

A cache can grow, be cropped, be reordered for beams and be offloaded. Further dimensions of its keys go through all of
that with them, so ctxext needs no further cache class.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import Cache, QuantizedLayer

from ctxext.errors import IncompatibleError

QUANTIZED = getattr(cache_utils, "BaseQuantizedLayer", QuantizedLayer)  # newer ones have fp8 too
PIECES = 3
"""Number of values in the keys' dtype that hold a wider one: three of bfloat16 hold all digits of float32."""


@dataclass(eq=False)
class Travelling:
    """The numbers of an encoding for each token, in one layer and one call.

    Args:
        numbers: numbers of the call's tokens; after an update of the cache, of all its tokens. ``heads`` counts the
            heads of queries or of keys.
    """

    numbers: Float[Tensor, "batch heads seq numbers"]

    def through(self, cache: Any) -> _CarryingCache:
        """Wrap a cache for one layer in one call, so that it stores numbers with keys and returns plain keys."""
        return _CarryingCache(cache, self)


class _CarryingCache:
    """Wrapper of a cache while one attention layer runs; everything except ``update`` is the cache's own."""

    def __init__(self, cache: Cache, travels: Travelling) -> None:
        self._cache, self._travels = cache, travels

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_cache"], name)

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Update the cache as transformers does, and return keys without the numbers."""
        numbers = self._travels.numbers
        packed = _packed(numbers, keys)
        wide = torch.cat([keys, packed], -1)
        _make_room(self._cache, layer_idx, wide, values)
        cached, values = self._cache.update(wide, values, layer_idx, *args, **kwargs)
        if isinstance(self._cache.layers[layer_idx], QUANTIZED):
            raise IncompatibleError(
                "A quantized cache would round the numbers that this model's encoding stores with its keys. Take a "
                "plain cache."
            )
        cached, packed = cached.split([keys.shape[-1], packed.shape[-1]], -1)
        self._travels.numbers = _unpacked(packed, numbers)
        return cached, values


def _make_room(cache: Cache, layer_idx: int, keys: Tensor, values: Tensor) -> None:
    """Allocate an empty cache layer again if its memory has no room for the numbers.

    Raises:
        IncompatibleError: if the layer holds keys without numbers.
    """
    layer: Any = cache.layers[layer_idx] if layer_idx < len(cache.layers) else None
    if layer is None or not layer.is_initialized or layer.keys is None or layer.keys.ndim != 4:
        return
    if layer.keys.shape[-1] == keys.shape[-1]:
        return
    if layer.get_seq_length() > 0:
        raise IncompatibleError(
            f"Keys in this cache have {layer.keys.shape[-1]} dimensions, but those of this model, with the numbers of "
            f"its encoding, have {keys.shape[-1]}. It was filled by another model, or before ctxext.patch, or in "
            f"another dtype. Start with a new cache."
        )
    layer.lazy_initialization(keys, values)


def _packed(
    numbers: Float[Tensor, "batch heads seq numbers"], keys: Float[Tensor, "batch kv_heads seq head_dim"]
) -> Float[Tensor, "batch kv_heads seq packed"]:
    """Pack the numbers into dimensions of keys, side by side for query heads that share a key head."""
    batch, kv_heads, seq, _ = keys.shape
    by_head = numbers.reshape(batch, kv_heads, -1, *numbers.shape[2:])
    shared = by_head.transpose(2, 3).reshape(batch, kv_heads, seq, -1)
    if torch.promote_types(shared.dtype, keys.dtype) == keys.dtype:
        return shared.to(keys.dtype)
    pieces, rest = [shared.to(keys.dtype)], shared.detach()  # the first one carries the gradient of all
    for _ in range(1, PIECES):
        rest = rest - pieces[-1].detach().to(rest.dtype)
        pieces.append(rest.to(keys.dtype))
    return torch.cat(pieces, -1)


def _unpacked(
    packed: Float[Tensor, "batch kv_heads key packed"], like: Float[Tensor, "batch heads seq numbers"]
) -> Float[Tensor, "batch heads key numbers"]:
    """Unpack the numbers of ``_packed``, with the heads and the dtype of ``like``."""
    batch, kv_heads, key, _ = packed.shape
    each, wide = like.shape[1] // kv_heads * like.shape[3], torch.promote_types(like.dtype, packed.dtype)
    numbers = packed.to(wide).reshape(batch, kv_heads, key, -1, each).sum(-2).to(like.dtype)
    by_head = numbers.reshape(batch, kv_heads, key, -1, like.shape[3]).transpose(2, 3)
    return by_head.reshape(batch, -1, key, like.shape[3])
