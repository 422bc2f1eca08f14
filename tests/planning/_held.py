"""Models whose memory is counted while they run."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig

import ctxext
from tests._checkpoints import SHAPE
from tests._models import tiny

HIDDEN, INNER, VOCABULARY, HEADS, KV_HEADS, HEAD_DIM, LENGTH = 64, 96, 128, 4, 2, 16, 1024
# Weights of one layer's linear layers, as (inputs, outputs).
LINEAR = [(HIDDEN, HIDDEN), *2 * [(HIDDEN, KV_HEADS * HEAD_DIM)], (HIDDEN, HIDDEN), *2 * [(HIDDEN, INNER)]]
LINEAR += [(INNER, HIDDEN)]


def llama(layers: int, **changes: Any) -> LlamaConfig:
    return LlamaConfig(**(SHAPE | {"num_hidden_layers": layers} | changes))


class Held(TorchDispatchMode):
    """The most bytes that storages made meanwhile held at once, on real tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in self.known:
                storage = tensor.untyped_storage()
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                self.known.add(storage.data_ptr())
                weakref.finalize(storage, self.gone, storage.data_ptr(), storage.nbytes())
        return result

    def gone(self, place: int, size: int) -> None:
        self.known.discard(place)
        self.now -= size


def held_by(model: nn.Module, call: Any) -> int:
    held = Held()
    held.known = {t.untyped_storage().data_ptr() for part in (model.parameters, model.buffers) for t in part()}
    with held:
        call()
    return held.most


FULL = "full_attention"
MODELS: dict[str, Any] = {
    "llama": lambda: tiny(num_hidden_layers=4),
    "sliding": lambda: tiny("gemma3_text", num_hidden_layers=6, layer_types=[*5 * ["sliding_attention"], FULL]),
    "latent": lambda: tiny("deepseek_v3", first_k_dense_replace=2),
    "masks without a cache": lambda: tiny("moshi"),  # its masks tell packed sequences where no cache is given
    "bloom": lambda: tiny("bloom", num_hidden_layers=3),
    "bloom extended": lambda: ctxext.patch(tiny("bloom", num_hidden_layers=3), "alibi", factor=16),
}
