"""Choose which activations a training step keeps, computes again, or moves to the host."""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import numbers
import os
import platform
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ctxext.core.edits import Edits
from ctxext.core.override import ForwardOverride
from ctxext.core.subject import Subject
from ctxext.errors import IncompatibleError, InvalidParameterError
from ctxext.methods.parameters import checked_tokens, require
from ctxext.models.unknown import towers_of
from ctxext.training.loss import chunk_loss

ATTENTION_KERNELS = frozenset(
    {
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "flash_attn::_flash_attn_forward",
        "flash_attn::_flash_attn_varlen_forward",
        "flash_attn_3::_flash_attn_forward",
        "flex_attention",
    }
)
"""Operations that return an attention's output and its log-sum-exp, of torch, flash-attn 2 and 3, FlexAttention."""

MOST_KEPT = 32 * 2**20
"""Bytes of the largest block that glibc may keep, ``DEFAULT_MMAP_THRESHOLD_MAX`` in its malloc.c for 64 bits."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Storage of the activations of a training step. The defaults suit up to about 100K tokens on 80 GB.

    Savings for Llama-3.1-8B in bfloat16 (computed; 290 KiB per token remain with all options except ``offload``):
    ``loss_chunk`` 1.5 MiB per token, ``checkpointing`` about 10 MiB, ``offload`` 256 KiB, ``mlp_tile`` 200 KiB.

    Args:
        loss_chunk: tokens whose logits exist at a time, see ``chunk_loss``; None computes the loss as the model does.
        checkpointing: True to keep only the input of each layer and to recompute the layer in the backward pass: a
            third more time.
        save_attention: with ``checkpointing``, True to also keep the attention's output and log-sum-exp, so that
            attention, the largest part of a layer beyond 32K tokens, is not recomputed. 16 percent less time at 16K
            tokens of SmolLM2-135M on CPU (measured); costs about as much memory as ``checkpointing`` keeps, on the
            device even with ``offload``.
        offload: with ``checkpointing``, True to move the inputs of the layers to pinned host memory. CUDA only.
        mlp_tile: tokens that pass through an MLP at a time, over all rows. The MLP's inner activations, up to 7 times
            as wide as the hidden states, exist for one tile only. It costs one more forward pass of the MLP. Useful
            once ``offload`` has removed the rest; not on a CPU.

    Raises:
        InvalidParameterError: for a number below 1, or options that need ``checkpointing`` without it.
    """

    loss_chunk: int | None = 1024
    checkpointing: bool = True
    save_attention: bool = False
    offload: bool = False
    mlp_tile: int | None = None

    def __post_init__(self) -> None:
        for name in ("loss_chunk", "mlp_tile"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, checked_tokens(name, value))
        for name in ("save_attention", "offload"):
            if getattr(self, name) and not self.checkpointing:
                raise InvalidParameterError(f"{name} requires checkpointing=True.")

    def apply(self, model: nn.Module) -> contextlib.ExitStack:
        """Let a model train this way from now on.

        Call it before the model is handed to a Trainer, and leave ``TrainingArguments.activation_checkpointing``
        (``gradient_checkpointing`` in older transformers) off: the Trainer would replace this setting.

        Returns:
            What undoes it: ``close()``, or the end of a ``with`` block.

        Raises:
            IncompatibleError: the model cannot do it; nothing was changed then.
            PatchStateError: see ``chunk_loss``.
        """
        base = Subject.of(model).model
        if self.offload and base.device.type == "cpu":
            raise IncompatibleError(
                "offload moves activations from an accelerator to the host, and this model is on the CPU, where they "
                "are already. Set offload=False."
            )
        with contextlib.ExitStack() as undo:
            if self.loss_chunk is not None:
                undo.enter_context(chunk_loss(base, chunk=self.loss_chunk))
            if self.mlp_tile is not None:
                undo.callback(_tile_mlps(base, self.mlp_tile).undo)
            if self.checkpointing:
                self._enable_checkpointing(base)
                disable = getattr(base, "activation_checkpointing_disable", None)
                undo.callback(disable or base.gradient_checkpointing_disable)
            return undo.pop_all()

    def _enable_checkpointing(self, base: PreTrainedModel) -> None:
        if not base.supports_gradient_checkpointing:
            raise IncompatibleError(
                f"{type(base).__name__} does not support activation checkpointing in transformers. Set "
                f"checkpointing=False."
            )
        settings: dict[str, Any] = {"use_reentrant": False}
        if self.save_attention:
            settings["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_attention)
        # Older transformers know it as gradient checkpointing.
        enable = getattr(base, "activation_checkpointing_enable", None) or base.gradient_checkpointing_enable
        if self.offload and "offload" not in inspect.signature(enable).parameters:
            raise IncompatibleError(
                f"offload is done by transformers 5.17 or newer, and {transformers.__version__} is installed. "
                f"Update it, or set offload=False."
            )
        enable(settings, **({"offload": True} if self.offload else {}))


def _keep_attention(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Policy of selective checkpointing."""
    keep = operation.name() in ATTENTION_KERNELS
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


@dataclass
class TiledForward(ForwardOverride):
    """Replacement of the ``forward`` of a module that treats every token alike; computes one tile at a time."""

    tile: int = 1

    def __call__(self, *args: Tensor) -> Tensor:
        """Return the module's output for a tensor ``[batch, positions, width]``."""
        batch, positions = args[0].shape[:2]
        size = max(1, self.tile // batch)
        if positions <= size or not torch.is_grad_enabled():
            whole: Tensor = self.run(*args)
            return whole
        # Conv1D takes a tile of several rows only where it lies in one piece.
        tiles = zip(*([tile.contiguous() for tile in torch.split(arg, size, dim=1)] for arg in args), strict=True)
        return torch.cat([checkpoint(self.run, *tile, use_reentrant=False) for tile in tiles], dim=1)


def _tile_mlps(base: PreTrainedModel, tile: int) -> Edits:
    """Tile the MLP of every layer.

    Raises:
        IncompatibleError: a layer has none, as in mixtures of experts, where tokens pass through different experts; or
            as ``layers_of``.
    """
    with Edits() as edits:
        for layer in layers_of(base):
            mlps = [child for child in layer.children() if type(child).__name__.endswith(("MLP", "FeedForward"))]
            if not mlps or any("expert" in name for mlp in mlps for name, _ in mlp.named_modules()):
                raise IncompatibleError(
                    f"{type(layer).__name__} of {type(base).__name__} has no plain MLP to tile (found "
                    f"{', '.join(type(child).__name__ for child in layer.children())}). Set mlp_tile=None."
                )
            for mlp in mlps:
                edits.set(mlp, "forward", TiledForward(mlp, vars(mlp).get("forward"), tile=tile))
    return edits


def layers_of(model: PreTrainedModel, *, towers: bool = False) -> list[nn.Module]:
    """Return the decoder layers, in order; with ``towers`` also the layers that read pictures or sound.

    Raises:
        IncompatibleError: the model has no layers that transformers can compute again in a backward pass.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise IncompatibleError(f"{type(model).__name__} has no decoder layers that transformers can checkpoint.")
    apart = set[nn.Module]() if towers else towers_of(model)
    return [layer for layer in layers if layer not in apart] or layers


def return_freed_memory(*, above: int = 2**20) -> bool:
    """Let glibc give memory back to the system as soon as it is freed. Affects this whole process, from now on.

    glibc keeps freed blocks of up to 32 MiB for later, and with the sizes that training asks for it can rarely use them
    again: a LoRA step of SmolLM2-135M at 16K tokens peaks at 5.48 GiB instead of 1.71 GiB (measured). With this
    function, all blocks of ``above`` bytes and more become separate mappings. In return, the system has to provide and
    clear their pages again and again: from 1 MiB on, a step of 4K tokens takes up to 60 percent longer, one of 16K
    tokens 7 percent (measured). From twice the size of a layer's hidden states on, most of the memory is returned at
    little cost, see docs/evidence/training-cpu.md. Call it at the start of a program that trains on the CPU, unless
    there is memory to spare; on CUDA, where torch manages memory, it is not needed.

    Args:
        above: bytes, up to 32 MiB.

    Returns:
        Whether it took effect: not with another C library, nor where ``MALLOC_MMAP_THRESHOLD_`` or
        ``GLIBC_TUNABLES`` say something else.

    Raises:
        InvalidParameterError: ``above`` out of range.
    """
    is_inside = isinstance(above, numbers.Integral) and 0 < above <= MOST_KEPT
    require(is_inside, "above", above, f"1 to {MOST_KEPT} bytes (32 MiB, glibc's limit)")
    decided = "MALLOC_MMAP_THRESHOLD_" in os.environ or "mmap_threshold" in os.environ.get("GLIBC_TUNABLES", "")
    if platform.libc_ver()[0] != "glibc" or decided:
        return False
    mmap_threshold = -3  # M_MMAP_THRESHOLD in malloc.h
    return bool(ctypes.CDLL(None).mallopt(mmap_threshold, int(above)))


def peak_memory(device: torch.device) -> int:
    """Bytes: of the GPU's memory, or the largest resident size of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource  # here, as Windows has none

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
