"""Progress of long forward passes, layer by layer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from torch import nn

from ctxext.surgery.wrappers import base_model

__all__ = ["SMALL_MODEL", "Progress", "pass_cost", "ticking", "turning_point"]

# Called with what is being done and the cost done since the last call, in the units of `pass_cost`.
Progress = Callable[[str, float], None]
# Tokens at which attention costs as much as all the rest, for the 135M checkpoint of the demo.
SMALL_MODEL = 4096


def pass_cost(tokens: int, turning_point: int = SMALL_MODEL) -> float:
    """Rough cost of one forward pass, for a progress bar only: linear layers plus quadratic attention.

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
def ticking(model: nn.Module, name: str, cost: float, progress: Progress) -> Iterator[None]:
    """Report progress after every layer: one pass over a long text takes too long for a bar that stands still.

    Args:
        model: whose layers are watched by hooks, which are gone at the end.
        name: of what is being done.
        cost: of each pass of the model.
        progress: called once with cost 0 at the start, then after every layer.
    """
    base = base_model(model)
    depth = base.config.get_text_config(decoder=True).num_hidden_layers
    stacks = [module for module in base.modules() if isinstance(module, nn.ModuleList) and len(module) == depth]
    ticks = list(stacks[0]) if stacks else [base.base_model]
    progress(name, 0.0)
    hooks = [tick.register_forward_hook(lambda *_: progress(name, cost / len(ticks))) for tick in ticks]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
