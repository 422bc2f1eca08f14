"""The checkpoint that a run begins from: on the device of the run, quantised where the settings say so."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig
from transformers.integrations import deepspeed as zero
from transformers.integrations import is_fsdp_enabled

from ctxext.checkpoints.adapters import base_of, is_adapter
from ctxext.checkpoints.load import refuse_drawn_anew
from ctxext.checkpoints.source import checked_path, read_any_config
from ctxext.core import patching
from ctxext.core.saved import saved_extension, saved_method
from ctxext.errors import BackendUnavailableError, CheckpointError, IncompatibleError, install_line
from ctxext.measuring.checkpoint import Checkpoint, emulates_bf16, load_checkpoint
from ctxext.training.lora import attach_lora, reattach_lora
from ctxext.training.memory import Memory
from ctxext.training.parallel import is_sharded
from ctxext.training.settings import Settings


def require_device(settings: Settings) -> str:
    """Return the kind of device that a run trains on, ``cpu`` or ``cuda``, before anything is loaded.

    Raises:
        BackendUnavailableError: the settings need a GPU, or bitsandbytes, and there is none.
    """
    has_cuda = torch.cuda.is_available()
    wishes = {
        "device: cuda": settings.device == "cuda",
        f"quantisation: {settings.quantisation}": settings.quantisation is not None,
        "memory.offload: true": settings.memory.offload,
    }
    needs = [name for name, wished in wishes.items() if wished]
    if needs and (not has_cuda or settings.device == "cpu"):
        why = "the device is set to cpu" if has_cuda else f"torch {torch.__version__} sees no CUDA device here"
        raise BackendUnavailableError(
            f"This run is meant for a GPU ({', '.join(needs)}), but {why}. Run it on a machine with one, or take a "
            f"config for the CPU, such as smollm2-135m-16k-yarn-pose.yaml. --device cpu makes one of others."
        )
    if settings.quantisation is not None and importlib.util.find_spec("bitsandbytes") is None:
        raise BackendUnavailableError(
            f"quantisation: {settings.quantisation} needs bitsandbytes. Run {install_line('qlora')}, "
            f"or set quantisation to null."
        )
    return "cuda" if has_cuda and settings.device != "cpu" else "cpu"


def in_fast_dtype(settings: Settings, device: str) -> Settings:
    """Replace the dtype ``auto`` by the one that a device computes fast in."""
    fast = "fp32" if device == "cpu" and emulates_bf16() else "bf16"
    return settings.model_copy(update={"dtype": fast}) if settings.dtype == "auto" else settings


def load_base(settings: Settings, device: torch.device, *, tokenizer: Any = None, weights: bool = True) -> Checkpoint:
    """Load the model to train, unextended, with its tokenizer.

    From a checkpoint that was saved extended, the extension is taken off where ``extension.trained_length`` is given:
    the run's own replaces it, as in ``ctxext.patch``. So a run can go on from what another one merged.

    Args:
        tokenizer: Tokenizer of the checkpoint, where it has been read already.
        weights: False for a model on the meta device, see ``load_checkpoint``.

    Raises:
        CheckpointError: as ``load_checkpoint``; also for an adapter, or for a checkpoint that was saved extended where
            no trained length is given.
        IncompatibleError: the launcher has one process read the weights for all.
    """
    _require_whole(settings)
    if is_fsdp_enabled():
        raise IncompatibleError(
            "fsdp_cpu_ram_efficient_loading leaves all processes but one without weights until training begins. Each "
            "of them checks and measures its model before: set it to false, as recipes/accelerate/fsdp2.yaml does."
        )
    if not weights:
        with _without_deepspeed():
            return _load_plain(settings, device, weights=False)
    if settings.quantisation is None:
        return _load_plain(settings, device, tokenizer=tokenizer)
    dtype = torch.bfloat16 if settings.dtype == "bf16" else torch.float32
    packed = BitsAndBytesConfig(**four_bits(settings.quantisation, dtype))
    loaded = _load_plain(settings, device, tokenizer=tokenizer, quantization_config=packed, device_map={"": device})
    return replace(loaded, dtype_note=f"{settings.quantisation}, computed in {settings.dtype}")


def four_bits(kind: str, dtype: torch.dtype) -> dict[str, Any]:
    """Return the options that hold weights in 4 bits of a kind, and compute with them in ``dtype``."""
    options = {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": kind,
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": dtype,
    }
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() in ("1", "true"):
        # FSDP shards only tensors of floating numbers: bytes would lie whole on every device (accelerate 1.15,
        # utils/fsdp_utils.py:792).
        options["bnb_4bit_quant_storage"] = dtype
    return options


def _load_plain(settings: Settings, device: torch.device | str, **loading: Any) -> Checkpoint:
    """Load the run's checkpoint, and take off the extension that it was saved with, if there is one."""
    dtype = settings.dtype if settings.table is None else "fp32"  # it is held in float32, as all that is trained
    masked = settings.data.masked is not None
    checkpoint = load_checkpoint(settings.checkpoint, dtype=dtype, device=device, masked=masked, **loading)
    if (state := patching.patched_state(checkpoint.subject.model)) is None:
        return checkpoint
    asked = {"method": {"method": settings.extension.method}}
    refuse_drawn_anew(str(settings.checkpoint), checkpoint.model, state.saved_form(), asked)
    patching.unpatch(checkpoint.model)
    return replace(checkpoint, sha256="")  # which counts the config too


def _require_whole(settings: Settings) -> None:
    """Refuse what a run cannot begin from, before it is loaded: an adapter, or an extension that stays."""
    source = settings.checkpoint
    if source is None or source.endswith(".gguf"):
        return
    if is_adapter(source):
        raise CheckpointError(
            f"{source} is an adapter on {base_of(source)}, perhaps of another extension. A run begins from a whole "
            f"checkpoint: name that one itself, or merge the adapter into it first (PEFT's merge_and_unload, then "
            f"save_pretrained). To go on with the run that wrote it, --resume."
        )
    checked_path(source, {})
    saved = saved_extension(read_any_config(source), source)
    if saved is None:
        return
    method = saved_method(saved)  # refuses an encoder-decoder of two extended sides, which no run here trains
    if settings.extension.trained_length != saved["trained_length"]:
        raise CheckpointError(
            f"{source} was saved extended by {method.name}, and extensions are never stacked. Begin from "
            f"the original checkpoint; or replace that extension and keep its weights: extension.trained_length "
            f"{saved['trained_length']}."
        )


def try_step(outline: nn.Module, settings: Settings, memory: Memory) -> None:
    """Train a copy of a model without weights as far as that goes: with an adapter, and with activations held.

    Args:
        memory: Way in which the model of the run will hold its activations.

    Raises:
        IncompatibleError: the model cannot be trained so, which is known before texts and weights are read.
    """
    trial = copy.deepcopy(outline)
    with _without_deepspeed(), torch.random.fork_rng(devices=[]):  # the run's own adapter is drawn by its seed
        if settings.table is None:
            trial = attach_lora(trial, **settings.lora.model_dump())
        replace(memory, offload=False).apply(trial)  # nothing is moved where there is nothing to move


def with_found(settings: Settings, model: nn.Module) -> Settings:
    """Return the settings with the method that ``patch`` made of theirs, where it read the weights to find heads.

    The stages of a run, its resumption and its merged model then have the heads of the beginning: trained weights would
    give others.
    """
    extension, state = settings.extension, patching.patched_state(model)
    if state is None or not state.method.reads_weights(extension.parameters):
        return settings
    found = extension.model_copy(update={"parameters": state.method.parameters()})
    return settings.model_copy(update={"extension": found})


def with_all_weights(model: Any, settings: Settings, adapter: Path) -> Any:
    """Return the trained model to merge, built again on the CPU where this process has only a part of its weights."""
    if not is_sharded(model) and settings.quantisation is None:  # 4-bit weights would be rounded once more
        return model
    with _without_deepspeed():
        plain = _load_plain(settings, "cpu").model
    patching.patch(plain, settings.extension.method, **settings.extension.arguments())
    return reattach_lora(plain, adapter)


@contextlib.contextmanager
def _without_deepspeed() -> Iterator[None]:
    """Let transformers load whole weights although ZeRO-3 is running, which it would share them out for."""
    running = zero.is_deepspeed_zero3_enabled() and zero._hf_deepspeed_config_weak_ref()
    zero.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        if running:
            zero.set_hf_deepspeed_config(running)
