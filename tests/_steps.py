"""A step of decoding: what it launches, and the same step as a graph. Benchmarks use it too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import StaticCache


class _Operators(TorchDispatchMode):
    """Count the operators that compute, or bring numbers from the host: neither views nor memory only set aside."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given, made = (
            {leaf.untyped_storage()._cdata for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)}
            for tree in ((args, kwargs), result)
        )
        name, changes = func._schema.name, func._schema.is_mutable
        is_view = bool(made) and made <= given and not changes and "lift_fresh" not in name  # of torch.tensor
        self.count += bool(made) and not (is_view or "empty" in name)
        return result


def launches(call: Callable[[], object], device: str) -> int:
    """Return how many kernels and copies ``call`` starts on CUDA; on a CPU, how many operators it dispatches."""
    if device != "cuda":
        with _Operators() as operators:
            call()
        return operators.count
    for _ in range(2):  # the first starts CUDA's own profiler
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
            call()
            torch.cuda.synchronize()
    return sum(event.device_type.name == "CUDA" for event in recorded.events())


def launches_a_layer(step_of: Callable[[int], Callable[[], object]], device: str, layers: tuple[int, int]) -> float:
    """Return the launches that each further layer adds to a step.

    Args:
        step_of: makes a model of so many layers, warms it up, and returns its step.
        device: where it runs.
        layers: a smaller and a larger number.
    """
    few, many = (launches(step_of(count), device) for count in layers)
    return (many - few) / (layers[1] - layers[0])


@torch.no_grad()
def compiled_step(model: Any, ids: Tensor, longest: int) -> Callable[[Tensor], Tensor]:
    """Read a text into a static cache, and return the compiled step that reads the next tokens to their logits.

    It is compiled as ``generate`` compiles it on CUDA, but that a break of the graph is an error; on a CPU torch only
    takes the graph, and computes it as it is.
    """
    cache = StaticCache(config=model.config, max_cache_len=longest)
    model.base_model(ids, past_key_values=cache)
    how: dict[str, Any] = {"mode": "reduce-overhead"} if model.device.type == "cuda" else {"backend": "eager"}
    forward = torch.compile(model.forward, fullgraph=True, **how)
    place = torch.tensor([[ids.shape[1]]], device=model.device)

    @torch.no_grad()
    def step(token: Tensor) -> Tensor:
        logits: Tensor = forward(token, position_ids=place.clone(), past_key_values=cache).logits.clone()
        place.add_(1)
        return logits

    return step
