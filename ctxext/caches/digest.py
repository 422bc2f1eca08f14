"""Digits by which checkpoints differ, from samples of their weights; and weights that engines share out."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ctxext.core.saved import identity
from ctxext.core.subject import Subject

UNKNOWN = "unknown"
"""Digest of a model whose weights processes share."""


def is_zero3(model: nn.Module) -> bool:
    """Tell whether DeepSpeed ZeRO-3 has shared a model's weights out: it puts an id on each."""
    return any(hasattr(weight, "ds_id") for weight in model.parameters())


def is_fsdp(model: nn.Module) -> bool:
    """Tell whether FSDP 2 manages a part of a model: it gives the classes of its modules a state."""
    return any(hasattr(module, "_get_fsdp_state") for module in model.modules())


def is_shared_out(model: nn.Module) -> bool:
    """Tell whether ZeRO-3 or FSDP has shared a model's weights out between processes."""
    return is_zero3(model) or any(isinstance(weight, DTensor) for weight in model.parameters())


def is_hooked(model: nn.Module) -> bool:
    """Tell whether hooks of accelerate bring weights of a model from a disk or another device."""
    return any(hasattr(module, "_hf_hook") for module in model.modules())


def shares_heads(model: nn.Module) -> bool:
    """Tell whether tensor parallelism gives a process a part of the heads, which a plan of experts alone does not."""
    # Transformers 5.16 tells the number of processes in the config alone. Its plan may be one of experts.
    spread = getattr(getattr(model, "config", None), "distributed_config", None)
    size = getattr(model, "_tp_size", None) or getattr(spread, "tp_size", None) or 1
    return int(size) > 1 and any("att" in place.lower() for place in getattr(model, "tp_plan", None) or ())


# Values taken from each tensor for a digest: training moves nearly all of them, so a few are enough.
SAMPLED = 64


def weights_digest(model: nn.Module, *, alone: bool = False) -> str:
    """Return 12 hex digits that identify a checkpoint: its config, and its tensors' names, shapes and samples.

    Cheap: 64 values of each tensor, spread over it, so that a fine-tuned copy with the same shapes has another digest.
    The dtype counts, since it rounds the weights, and so do the adapters in use. Where ZeRO-3 or FSDP has shared the
    weights out, ``UNKNOWN``.

    Args:
        alone: True to leave out the config, whose fields another version of transformers may change.
    """
    if is_shared_out(model):
        return UNKNOWN
    config = {} if alone else Subject.of(model).config.to_dict()
    for noise in ("_name_or_path", "transformers_version"):
        config.pop(noise, None)
    if "ctxext" in config:
        config["ctxext"] = identity(config["ctxext"])  # its other fields are versions and notes
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(sample(tensor, tensor.dtype))
    if adapters := _adapters_in_use(model):
        digest.update(repr(adapters).encode())
    return digest.hexdigest()[:12]


def _adapters_in_use(model: nn.Module) -> list[Any]:
    """Return what a user may switch in the layers with PEFT's adapters: their names, whether they count, how much."""
    switches = ("active_adapters", "disable_adapters", "merged_adapters", "scaling")
    # Of a whole model of transformers this is a method.
    layers = (module for module in model.modules() if isinstance(getattr(module, "disable_adapters", None), bool))
    return [[getattr(layer, name, None) for name in switches] for layer in layers]


def sample(tensor: Tensor, dtype: torch.dtype) -> bytes:
    """Return a few values of a tensor, spread over it, in this dtype."""
    if tensor.device.type == "meta" or not tensor.numel():
        return b""
    flat = tensor.detach().reshape(-1)
    picked = flat[:: max(1, flat.numel() // SAMPLED)].to(dtype).contiguous().cpu()
    return bytes(picked.view(torch.uint8).numpy())
