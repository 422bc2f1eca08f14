"""Loading and saving: checkpoints whose config carries the extension, and adapters that carry it beside them."""

from __future__ import annotations

import copy
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

import ctxext
from ctxext._adapters import is_adapter, read_extension, save_adapter
from ctxext._api import architecture_of, base_model, describe, patch
from ctxext.architectures._alibi import GUARD, GUARDED_FIELD
from ctxext.architectures._hf import restoring
from ctxext.errors import CheckpointError, PatchStateError, VerificationError
from ctxext.methods import METHODS, Method

__all__ = ["extended_config", "load", "save"]

# Arguments of from_pretrained that say where a checkpoint lies, not how its weights are loaded.
LOCATION = ("revision", "subfolder", "cache_dir", "token", "local_files_only", "force_download", "gguf_file")


def load(
    path: str | os.PathLike[str],
    method: str | Method | None = None,
    *,
    factor: float | None = None,
    target_length: int | None = None,
    trained_length: int | None = None,
    sliding_window: str | None = None,
    attention: str | None = None,
    base: str | os.PathLike[str] | None = None,
    **loading: Any,
) -> Any:
    """Load a checkpoint extended: by ``method``, or as it was saved. Adapter directories bring their extension along.

    The config is extended before the weights are read, so that meta-device, quantised and sharded loading build the
    right model from the start. Weights are read from safetensors (or GGUF) only, and remote code runs only where
    ``trust_remote_code=True`` is passed.

    Args:
        path: a checkpoint or adapter directory, or a name on the hub.
        method: as for ``ctxext.patch``; None restores the extension that the checkpoint or adapter carries.
        factor: as for ``ctxext.patch``.
        target_length: as for ``ctxext.patch``.
        trained_length: as for ``ctxext.patch``.
        sliding_window: as for ``ctxext.patch``.
        attention: as for ``ctxext.patch``.
        base: for an adapter: the base checkpoint, where it is not where the adapter says.
        **loading: the method's own parameters; everything else goes to ``from_pretrained`` (``dtype``,
            ``device_map``, ``quantization_config``, ``gguf_file``, ...).

    Returns:
        The model (a ``PeftModel`` for an adapter directory), patched: ``describe`` and ``unpatch`` work on it.

    Raises:
        CheckpointError: nothing at ``path``, no config in it, or no extension to restore.
        VerificationError: the restored model does not have the frequencies that were saved.
    """
    place = checked_path(path, loading)
    own = _method_parameters(method, loading)
    if is_adapter(place):
        if method is not None:
            raise CheckpointError(f"{place} is an adapter and was trained for its own extension; leave method out.")
        return _load_adapter(Path(place), base, loading)
    if not loading.get("gguf_file"):
        loading.setdefault("use_safetensors", True)
    location = {key: loading[key] for key in LOCATION if key in loading}
    trusted = bool(loading.get("trust_remote_code", False))
    config = _read_config(place, trusted, location)
    if method is not None:
        config = extended_config(
            config,
            method,
            factor=factor,
            target_length=target_length,
            trained_length=trained_length,
            sliding_window=sliding_window,
            attention=attention,
            trust_remote_code=trusted,
            **own,
        )
    elif not getattr(config, "ctxext", None):
        raise CheckpointError(
            f"{place} carries no extension to restore. Say which one to apply, as in "
            f"ctxext.load({str(path)!r}, method='yarn', factor=4), or load it plain with AutoModelForCausalLM."
        )
    with restoring():
        model = _model_class(config).from_pretrained(place, config=config, **loading)
    return _attach(model)


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
    loading it the plain way fails with a sentence that says what to do.

    Args:
        model: a patched model, or a PEFT wrapper around one.
        directory: where to write; created if it does not exist.

    Raises:
        PatchStateError: if the model is not extended.
    """
    inner = base_model(model)
    if not getattr(inner.config, "ctxext", None):
        raise PatchStateError(f"This {type(inner).__name__} is not extended; save it with save_pretrained.")
    if hasattr(model, "peft_config") and not isinstance(model, PreTrainedModel):
        save_adapter(model, inner.config.ctxext, Path(directory))
    else:
        inner.save_pretrained(directory)


def _read_config(place: str, trusted: bool, location: dict[str, Any]) -> Any:
    """Read a config, also one that ctxext saved so that stock code refuses it."""
    if not location.get("gguf_file"):
        raw, _ = PreTrainedConfig.get_config_dict(place, **location)
        if raw.get(GUARDED_FIELD) == GUARD:
            raw[GUARDED_FIELD] = raw["ctxext"]["original"][GUARDED_FIELD]
            return CONFIG_MAPPING[raw["model_type"]].from_dict(raw)
    return AutoConfig.from_pretrained(place, trust_remote_code=trusted, **location)


def checked_path(path: str | os.PathLike[str], loading: dict[str, Any]) -> str:
    """Refuse a local path that holds no checkpoint; a name on the hub passes.

    Raises:
        CheckpointError: with what is missing.
    """
    place = os.fspath(path)
    local = Path(place)
    if not local.exists():
        looks_local = place.startswith((".", "/", "~")) or place.count("/") > 1 or "\\" in place
        if looks_local:
            raise CheckpointError(f"There is no checkpoint at {place}: no such directory.")
        return place
    if not local.is_dir():
        raise CheckpointError(f"{place} is a file; give the directory that holds config.json and the weights.")
    if not is_adapter(place) and not loading.get("gguf_file") and not (local / "config.json").is_file():
        found = ", ".join(sorted(item.name for item in local.iterdir())[:6]) or "nothing"
        raise CheckpointError(
            f"{place} has no config.json (found: {found}). Give a directory saved by save_pretrained."
        )
    return place


def _method_parameters(chosen: str | Method | None, loading: dict[str, Any]) -> dict[str, Any]:
    """Take the method's own parameters out of the keyword arguments."""
    if not isinstance(chosen, str) or chosen not in METHODS:
        return {}
    names = {field.name for field in fields(METHODS[chosen])}
    return {name: loading.pop(name) for name in list(loading) if name in names}


def _attach(model: PreTrainedModel) -> PreTrainedModel:
    """Patch a model that was built extended, so that it is proven, complete and reversible."""
    saved = model.config.ctxext
    chosen = saved_method(saved)
    architecture_of(model).revert(model, saved["original"])
    del model.config.ctxext
    choices = {key: saved[key] for key in ("trained_length", "sliding_window", "attention")}
    patch(model, chosen, **choices)
    if describe(model).fingerprint != saved["fingerprint"]:
        raise VerificationError(
            f"The restored {chosen.name!r} has fingerprint {describe(model).fingerprint}, the checkpoint was saved "
            f"with {saved['fingerprint']}. Install ctxext {saved['versions']['ctxext']}."
        )
    return model


def saved_method(saved: dict[str, Any]) -> Method:
    """Rebuild the method of a saved extension.

    Raises:
        CheckpointError: if this version of ctxext does not know it.
    """
    stored = saved["method"]
    if stored["method"] not in METHODS:
        raise CheckpointError(
            f"The extension method {stored['method']!r} is unknown to ctxext {ctxext.__version__}; the checkpoint was "
            f"saved by ctxext {saved['versions']['ctxext']}. Install that version."
        )
    return METHODS[stored["method"]].from_dict(stored)


def _load_adapter(directory: Path, base: str | os.PathLike[str] | None, loading: dict[str, Any]) -> Any:
    from peft import PeftModel

    saved, config = read_extension(directory)
    place = os.fspath(base) if base is not None else config.base_model_name_or_path
    if not place:
        raise CheckpointError(f"{directory} does not say what its base checkpoint is; pass base=...")
    location = {key: loading[key] for key in LOCATION if key in loading}
    base_config = _read_config(place, bool(loading.get("trust_remote_code", False)), location)
    carried = getattr(base_config, "ctxext", None)
    if carried and carried["fingerprint"] != saved["fingerprint"]:
        raise CheckpointError(
            f"The adapter in {directory} was trained on {saved['method']['method']!r} (fingerprint "
            f"{saved['fingerprint']}), but its base {place} is saved extended by {carried['method']['method']!r} "
            f"(fingerprint {carried['fingerprint']}). Give the right base with base=..."
        )
    if carried:
        model = load(place, **loading)
    else:
        choices = {key: saved[key] for key in ("trained_length", "sliding_window", "attention")}
        model = load(place, saved_method(saved), **choices, **loading)
    if describe(model).fingerprint != saved["fingerprint"]:
        raise VerificationError(
            f"The base {place} extended as the adapter says has fingerprint {describe(model).fingerprint}, the adapter "
            f"was trained with {saved['fingerprint']}: it is not the same base model. Give the right one with base=..."
        )
    return PeftModel.from_pretrained(model, directory, config=config)
