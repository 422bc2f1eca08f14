"""Progress inside a forward pass: over a long text, one pass takes too long for a bar that stands still."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from torch import nn

from ctxext._api import base_model

__all__ = ["pass_cost", "ticking", "turning_point"]

# Where attention costs as much as the rest, for the 135M checkpoint of the demo.
SMALL_MODEL = 4096


def pass_cost(tokens: int, turning_point: int = SMALL_MODEL) -> float:
    """Rough cost of one forward pass, for progress and estimates only: linear layers plus quadratic attention.

    Args:
        tokens: in the pass.
        turning_point: tokens at which attention costs as much as all the rest.
    """
    return tokens * (1 + tokens / turning_point)


def turning_point(model: nn.Module) -> int:
    """Tokens at which a model's attention costs as much as all the rest of it.

    By operations: 2 per weight and token against 2 per layer, channel and visible key, half of the keys being visible
    on average; halved again because attention reaches about half the speed of matrix products.
    """
    base = base_model(model)
    config = base.config.get_text_config(decoder=True)
    embedding = base.get_input_embeddings().weight
    tied = bool(getattr(config, "tie_word_embeddings", False))
    weights = sum(parameter.numel() for parameter in base.parameters()) - (0 if tied else embedding.numel())
    return max(1, int(weights) // int(2 * config.num_hidden_layers * embedding.shape[-1]))


@contextlib.contextmanager
def ticking(model: nn.Module, cost: float, advance: Callable[[float], None]) -> Iterator[None]:
    """Call ``advance`` after every layer of every forward pass with the layer's share of ``cost``, that of one pass."""
    base = base_model(model)
    depth = base.config.get_text_config(decoder=True).num_hidden_layers
    stacks = [module for module in base.modules() if isinstance(module, nn.ModuleList) and len(module) == depth]
    ticks = list(stacks[0]) if stacks else [base.base_model]
    hooks = [tick.register_forward_hook(lambda *_: advance(cost / len(ticks))) for tick in ticks]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
