"""What spreads a run over processes, and what of it an engine cannot carry."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule

__all__ = ["is_fsdp", "is_sharded"]


def is_sharded(model: nn.Module) -> bool:
    """Whether each process holds a part of the weights: FSDP 2, or DeepSpeed ZeRO-3, which puts an id on them."""
    return is_fsdp(model) or any(hasattr(weight, "ds_id") for weight in model.parameters())


def is_fsdp(model: nn.Module) -> bool:
    """Whether FSDP 2 holds the weights."""
    return any(isinstance(module, FSDPModule) for module in model.modules())
