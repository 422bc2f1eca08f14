"""Read the config of a checkpoint, and its weights into the model of a config."""

from __future__ import annotations

import contextlib
from contextvars import ContextVar
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]
from safetensors import SafetensorError
from transformers import PreTrainedConfig, PreTrainedModel

from ctxext.attention.encodings import with_encodings
from ctxext.checkpoints.classes import config_of, model_class
from ctxext.checkpoints.source import (
    OF_DOWNLOAD,
    OF_REPOSITORY,
    LoadingOptions,
    NamedTensors,
    checked_contents,
    opened_gguf,
    quantised_beside,
    read_any_config,
)
from ctxext.core.rebuild import restoring
from ctxext.errors import (
    CheckpointError,
    CtxextError,
    InvalidParameterError,
    UnknownNameError,
    require_package,
    unwritable,
)
from ctxext.files import StrPath
from ctxext.methods import known_methods
from ctxext.models.refusals import running_code

# Arguments of from_pretrained that say where a checkpoint lies, not how its weights are loaded.
LOCATION = (*OF_REPOSITORY, *OF_DOWNLOAD, "gguf_file")
# Arguments of from_pretrained that are not fields, though configs have some of them.
NO_FIELDS = (
    *("dtype", "torch_dtype", "attn_implementation", "experts_implementation", "quantization_config"),
    *("trust_remote_code", "code_revision"),
)
REPORT: ContextVar[dict[str, Any]] = ContextVar("ctxext_loading_report")
"""What ``from_pretrained`` said of the weights that were loaded last."""


def read_config(place: str, loading: LoadingOptions) -> Any:
    """Read the config that is at ``place``, with the fields among the arguments for ``from_pretrained``.

    Raises:
        CheckpointError: no readable config, or weights that another program quantised.
    """
    if loading.get("gguf_file"):
        require_package("accelerate", "demo", f"Reading {loading['gguf_file']} needs", CheckpointError)
    location = {key: loading[key] for key in LOCATION if key in loading}
    trusted = bool(loading.get("trust_remote_code", False))
    given = {name: value for name, value in loading.items() if name not in (*LOCATION, *NO_FIELDS)}
    config = read_any_config(place, trust_remote_code=trusted, fields=given, **location)
    beside = None if location.get("gguf_file") else quantised_beside(Path(place, location.get("subfolder", "")), config)
    if beside is not None and "quantization_config" not in loading:
        raise CheckpointError(
            f"{place} says in a file that transformers does not read that its weights are quantised: {beside!s:.160}. "
            f"Write these fields into config.json, as quantization_config with the quant_method of that program."
        )
    return config


def read_model(
    place: str,
    config: PreTrainedConfig,
    loading: LoadingOptions,
    auto_class: Any = None,
    *,
    restored: bool = False,
    complete: bool = False,
) -> PreTrainedModel:
    """Load the weights into the model of ``config``, and the weights of an encoding if they were saved.

    A class that was asked for may have a head that is new, unless the weights must be ``complete``.

    Raises:
        CheckpointError: no safetensors weights there, or unreadable ones.
        UnknownNameError: an argument that from_pretrained does not know.
    """
    loading = {name: value for name, value in loading.items() if name in NO_FIELDS or not hasattr(config, name)}
    chosen = model_class(config, auto_class)
    config = config_of(config, chosen)
    stored = NamedTensors()
    built = with_encodings(chosen, config) if restored else chosen
    if not loading.get("gguf_file"):
        loading = {"use_safetensors": True, **loading}
        if loading["use_safetensors"] and Path(place).is_dir():
            stored = checked_contents(Path(place) / loading.get("subfolder", ""), copied=False).stored
    fitting = {"output_loading_info": True, "ignore_mismatched_sizes": True}
    gguf = opened_gguf(place, **{key: loading[key] for key in LOCATION if key in loading})
    reading = gguf.read_by_transformers() if gguf else contextlib.nullcontext()
    try:
        with restoring(), running_code(f"a {config.model_type}"), reading:
            model, report = built.from_pretrained(place, config=config, **loading | fitting)
    except (CtxextError, torch.OutOfMemoryError):
        raise
    except (OSError, HTTPError, SafetensorError, RuntimeError) as error:  # the last of shapes, and generation_config
        raise CheckpointError(f"The weights in {place} cannot be read: {error}{unwritable(error)}") from error
    except TypeError as error:  # what from_pretrained does not know it hands to the model, which takes a config alone
        unknown = [name for name in loading if f"unexpected keyword argument {name!r}" in str(error)]
        if not unknown:
            raise
        names = {field.name for method in known_methods().values() for field in fields(method)}
        names |= {"num_labels", *config.to_dict()}
        raise UnknownNameError.of("argument of ctxext.load", unknown[0], names) from error
    except (ValueError, AssertionError) as error:  # they name the argument and its values, or the missing device
        raise InvalidParameterError(f"transformers does not load {place} as it was asked to: {error}") from error
    if built is not chosen:
        model.__class__ = built.__base__
    REPORT.set(report)
    allowed = {"missing_keys": auto_class is not None and not complete}  # of a head that is new
    allowed["mismatched_keys"] = bool(loading.get("ignore_mismatched_sizes"))
    refuse_unfit(place, model, {name: () if allowed.get(name) else report[name] for name in report}, stored)
    inside = Path(place, loading.get("subfolder") or "", loading.get("gguf_file") or "")
    if inside.is_file():  # adapters will look for their base in this file, not in its directory
        model.name_or_path = str(inside)
    elif loading.get("subfolder") and inside.is_dir():
        model.name_or_path = model.config.name_or_path = str(inside)
    loaded: PreTrainedModel = model
    return loaded


def refuse_unfit(place: StrPath, model: PreTrainedModel, report: dict[str, Any], stored: NamedTensors) -> None:
    """Raise ``CheckpointError`` for weights that do not fit ``model``, which would keep random ones instead.

    Args:
        report: The loading info of ``from_pretrained``.
        stored: Tensors in the files, on the meta device.
    """
    if lacking := sorted(report["missing_keys"]):
        raise CheckpointError(
            f"The weights in {place} lack {lacking[0]}, which a {type(model).__name__} needs ({len(lacking)} such "
            f"tensors). Download them again, or name the class of these weights in config.json (architectures)."
        )
    for name, found, needed in sorted(report["mismatched_keys"]):
        raise CheckpointError(
            f"The weights in {place} do not fit its config.json: {name} has the shape {tuple(found)}, and a "
            f"{type(model).__name__} of that config needs {tuple(needed)}. Download both again."
        )
    for name, weight in model.named_parameters():
        if weight.is_floating_point() and name in stored and not stored[name].is_floating_point():
            raise CheckpointError(
                f"The weights in {place} hold {name} as whole numbers, and config.json says nothing of quantised "
                f"weights. Download both again."
            )
