"""Loading and saving: checkpoints whose config carries the extension, and adapters that carry it beside them."""

from __future__ import annotations

import copy
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ctxext._adapters import (
    is_adapter,
    keep_extension,
    read_extension,
    require_trained_on,
    save_adapters,
    unwrapped,
)
from ctxext._api import architecture_of, base_model, patch, patched_state
from ctxext._checkpoint_source import checked_contents, checked_path, gguf_inside, read_any_config
from ctxext._defaults import own_defaults
from ctxext._edits import Edits
from ctxext._saved import (
    checked_extension,
    checked_trained_length,
    choices,
    differences,
    plain_config,
    saved_extension,
    saved_method,
)
from ctxext.architectures._alibi import GUARD, GUARDED_FIELD
from ctxext.architectures._hf import restoring
from ctxext.errors import CheckpointError, InvalidParameterError, PatchStateError, VerificationError
from ctxext.methods import METHODS, Method

__all__ = ["extended_config", "load", "save"]

# Arguments of from_pretrained that say where a checkpoint lies, not how its weights are loaded.
LOCATION = ("revision", "subfolder", "cache_dir", "token", "local_files_only", "force_download", "gguf_file")
# Arguments of PeftModel.from_pretrained.
ADAPTER = ("is_trainable", "adapter_name", "autocast_adapter_dtype", "ephemeral_gpu_offload", "low_cpu_mem_usage")


def load(
    path: str | os.PathLike[str],
    method: str | Method | None = None,
    *,
    factor: float | None = None,
    target_length: int | None = None,
    trained_length: int | None = None,
    sliding_window: str | None = None,
    scaling: str | None = None,
    attention: str | None = None,
    base: str | os.PathLike[str] | nn.Module | None = None,
    **loading: Any,
) -> Any:
    """Load a checkpoint extended: by ``method``, or as it was saved. Adapter directories bring their extension along.

    The config is extended before the weights are read, so that meta-device, quantised and sharded loading build the
    right model from the start. Weights are read from safetensors (or GGUF) only, and remote code runs only where
    ``trust_remote_code=True`` is passed.

    Args:
        path: a checkpoint or adapter directory, a ``.gguf`` file (which is dequantised), or a name on the hub.
        method: as for ``ctxext.patch``; None restores the extension that the checkpoint or adapter carries.
        factor: as for ``ctxext.patch``.
        target_length: as for ``ctxext.patch``.
        trained_length: as for ``ctxext.patch``.
        sliding_window: as for ``ctxext.patch``.
        scaling: as for ``ctxext.patch``.
        attention: as for ``ctxext.patch``.
        base: for an adapter: the base checkpoint, where it is not where the adapter says; or a model in memory that is
            extended as the adapter's was, which then carries the adapter.
        **loading: the method's own parameters; everything else goes to ``from_pretrained`` (``dtype``,
            ``device_map``, ``quantization_config``, ``gguf_file``, ...).

    Returns:
        The model (a ``PeftModel`` for an adapter directory), patched: ``describe`` and ``unpatch`` work on it.

    Raises:
        CheckpointError: nothing at ``path``, no config in it, or no extension to restore.
        VerificationError: the restored model does not have the frequencies that were saved.
    """
    where, loading = gguf_inside(path, loading)
    place = checked_path(where, loading)
    own = _method_parameters(method, loading)
    asked = {
        "factor": factor,
        "target_length": target_length,
        "trained_length": trained_length,
        "sliding_window": sliding_window,
    }
    if method is None:
        _refuse_without_method(asked | {"scaling": scaling})
    if is_adapter(place):
        if method is not None:
            raise CheckpointError(f"{place} is an adapter and was trained for its own extension; leave method out.")
        return _load_adapter(Path(place), base, attention, loading)
    if base is not None:
        given = type(base).__name__ if isinstance(base, nn.Module) else repr(os.fspath(base))
        raise InvalidParameterError(f"base={given} is for adapters, and {place} is a whole model.")
    config = _read_config(place, loading)
    saved = saved_extension(config, place)
    if method is None:
        if saved is None:
            raise CheckpointError(
                f"{place} carries no extension to restore. Say which one to apply, as in "
                f"ctxext.load({str(path)!r}, method='yarn', factor=4), or load it plain with AutoModelForCausalLM."
            )
        return attached(_read_model(place, config, loading), place, attention)
    if saved is not None:
        checked_trained_length(saved, trained_length)
        config = plain_config(config, saved)
        scaling = scaling or choices(saved)["scaling"]
    trusted = bool(loading.get("trust_remote_code", False))
    extended = extended_config(
        config, method, trust_remote_code=trusted, attention=attention, scaling=scaling, **asked, **own
    )
    return attached(_read_model(place, _buildable(extended, config), loading), place)


def _buildable(extended: Any, config: Any) -> Any:
    """Take out of an extended config what only a live model, or stock code that must refuse it, is to see."""
    extended._attn_implementation_internal = config._attn_implementation_internal
    if getattr(extended, GUARDED_FIELD, None) == GUARD:
        setattr(extended, GUARDED_FIELD, extended.ctxext["original"][GUARDED_FIELD])
    return extended


def _refuse_without_method(asked: dict[str, Any]) -> None:
    given = [f"{name}={value!r}" for name, value in asked.items() if value is not None]
    if given:
        raise InvalidParameterError(
            f"{', '.join(given)} belongs to a method; without one, load restores what was saved. Name the method too."
        )


def _read_config(place: str, loading: dict[str, Any]) -> Any:
    location = {key: loading[key] for key in LOCATION if key in loading}
    return read_any_config(place, trust_remote_code=bool(loading.get("trust_remote_code", False)), **location)


def _read_model(place: str, config: PreTrainedConfig, loading: dict[str, Any]) -> PreTrainedModel:
    """Load the weights into the model that ``config`` says.

    Raises:
        CheckpointError: no safetensors weights there, or unreadable ones.
    """
    if not loading.get("gguf_file"):
        loading = {"use_safetensors": True} | loading
        if loading["use_safetensors"] and Path(place).is_dir():
            checked_contents(Path(place) / loading.get("subfolder", ""))
    try:
        with restoring():
            model: PreTrainedModel = _model_class(config).from_pretrained(place, config=config, **loading)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"The weights in {place} cannot be read: {error}") from error
    return model


def _model_class(config: PreTrainedConfig) -> Any:
    """What loads a config: the automatic class, or the saved one where that knows no causal model of this type."""
    mapping = AutoModelForCausalLM._model_mapping
    remote = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    saved = getattr(transformers, (config.architectures or [""])[0], None)
    if type(config) in mapping or remote or not (isinstance(saved, type) and issubclass(saved, PreTrainedModel)):
        return AutoModelForCausalLM
    return saved


def extended_config(config: Any, method: str | Method, *, trust_remote_code: bool = False, **arguments: Any) -> Any:
    """Return an extended copy of ``config``, proven on a model without weights; arguments as for ``ctxext.patch``."""
    with torch.device("meta"), restoring():
        chosen = _model_class(config)
        if chosen is AutoModelForCausalLM:
            model = chosen.from_config(copy.deepcopy(config), trust_remote_code=trust_remote_code)
        else:
            model = chosen(copy.deepcopy(config))
    return patch(model, method, **arguments).config


def save(model: Any, directory: str | os.PathLike[str]) -> None:
    """Save a model so that its extension cannot be lost.

    A whole model is what ``save_pretrained`` writes, whose config carries the extension. For a PEFT adapter, whose
    directory holds no config of the base model, the extension is written beside it and the adapter is marked so that
    PEFT and transformers refuse it with a sentence that says what to do. They cannot tell whether a base is extended,
    and refuse it on one that is, too: put it there with ``ctxext.load(path, base=model)``.

    Args:
        model: a patched model, or a PEFT wrapper around one.
        directory: where to write; created if it does not exist.

    Raises:
        PatchStateError: if the model is not extended.
    """
    inner = base_model(model)
    if not getattr(inner.config, "ctxext", None):
        raise PatchStateError(f"This {type(inner).__name__} is not extended; save it with save_pretrained.")
    adapted = next((wrapper for wrapper in unwrapped(model) if hasattr(wrapper, "peft_config")), None)
    if adapted is None:
        inner.save_pretrained(directory)
    else:
        save_adapters(adapted, Path(directory))


def _method_parameters(chosen: str | Method | None, loading: dict[str, Any]) -> dict[str, Any]:
    """Take the method's own parameters out of the keyword arguments."""
    if not isinstance(chosen, str) or chosen not in METHODS:
        return {}
    names = {field.name for field in fields(METHODS[chosen])}
    return {name: loading.pop(name) for name in list(loading) if name in names}


@own_defaults()
def attached(model: PreTrainedModel, place: str, attention: str | None = None) -> PreTrainedModel:
    """Patch a model that was built extended, so that it is proven, complete and reversible."""
    text = model.config.get_text_config(decoder=True)
    saved, rope = checked_extension(model.config.ctxext, place), getattr(text, "rope_parameters", None)
    chosen = saved_method(saved)
    architecture_of(model).revert(model, saved["original"], Edits())
    del model.config.ctxext
    patch(model, chosen, **choices(saved, attention))
    different = differences(saved, model.config.ctxext)
    if different:
        raise VerificationError(
            f"The {chosen.name!r} restored from {place} is not the one that was saved: {different}. Either its "
            f"config.json was changed by hand, or ctxext {saved['versions']['ctxext']} that saved it computed "
            f"otherwise."
        )
    if getattr(text, "rope_parameters", None) != rope:
        raise VerificationError(
            f"The config of {place} contradicts itself: its ctxext entry stands for rope_parameters="
            f"{text.rope_parameters}, but it holds {rope}. Load the original checkpoint and extend that."
        )
    return model


def _load_adapter(
    directory: Path, base: str | os.PathLike[str] | nn.Module | None, attention: str | None, loading: dict[str, Any]
) -> Any:
    from peft import PeftModel

    saved, adapter = read_extension(directory)
    for_adapter = {name: loading.pop(name) for name in ADAPTER if name in loading}
    if isinstance(base, nn.Module):
        extra = [*loading, *(["attention"] if attention is not None else [])]
        if extra:
            raise InvalidParameterError(f"{', '.join(extra)}: base is a model in memory, which is loaded already.")
        require_trained_on(saved, directory, base)
        model: nn.Module = base
    else:
        place = os.fspath(base) if base is not None else adapter.base_model_name_or_path
        if not place:
            raise CheckpointError(f"{directory} does not say what its base checkpoint is; pass base=...")
        if base is None and adapter.revision is not None:
            loading.setdefault("revision", adapter.revision)
        model = _load_base(directory, place, saved, attention, loading, named=base is None)
    wrapped = PeftModel.from_pretrained(model, directory, config=adapter, **for_adapter)
    patched = patched_state(base_model(model))
    keep_extension(wrapped, Edits() if patched is None else patched.edits)
    return wrapped


def _load_base(
    directory: Path, place: str, saved: dict[str, Any], attention: str | None, loading: dict[str, Any], *, named: bool
) -> PreTrainedModel:
    """The base model of an adapter, extended as the adapter says; ``named`` where the adapter says which it is."""
    place, loading = gguf_inside(place, loading)
    try:
        checked_path(place, loading)
    except CheckpointError as error:
        raise CheckpointError(
            f"The adapter in {directory} needs its base checkpoint: {error} Where it lies elsewhere now, pass base=..."
        ) from error
    config = _read_config(place, loading)
    carried = saved_extension(config, place)
    if carried is not None and not differences(saved, carried):
        model: PreTrainedModel = load(place, attention=attention, **loading)
    elif carried is None or named:  # trained on what that one's weights are, with its own extension in its place
        model = load(place, saved_method(saved), **choices(saved, attention), **loading)
    else:
        raise CheckpointError(
            f"The adapter in {directory} was trained on another extension than its base {place} has: "
            f"{differences(saved, carried)}. Give the right base with base=..."
        )
    different = differences(saved, model.config.ctxext)
    if different:
        raise VerificationError(
            f"The base {place}, extended as the adapter says, is not what it was trained on: {different}; it is not "
            f"the same base model. Give the right one with base=..."
        )
    return model
