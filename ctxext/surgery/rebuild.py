"""Twins: what stock transformers would build from a config.

An in-place patch must leave the model as a reload of its own saved config would build it. Instead of knowing which
attributes each of two hundred classes derives from its config, we let transformers build the model twice without
memory (on the meta device), from the old config and from the new one, and carry over what differs.
"""

from __future__ import annotations

import contextlib
import copy
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from ctxext.errors import IncompatibleError
from ctxext.surgery.edits import Edits
from ctxext.surgery.old_form import drop_old_form

__all__ = [
    "carry_over",
    "changed_scalars",
    "meta_twin",
    "own_defaults",
    "rotaries",
    "rotary_twin",
    "round_trip",
    "twin_config",
]

Scalar = int | float | str | bool | None


def round_trip(config: Any, fields: dict[str, Any]) -> Any:
    """Return a new config as it would be read back from disk after ``fields`` were set on its text part."""
    changed = copy.deepcopy(config)
    text = changed.get_text_config(decoder=True)
    drop_old_form(text)
    for name, value in fields.items():
        setattr(text, name, copy.deepcopy(value))
    with tempfile.TemporaryDirectory() as directory:
        changed.to_json_file(Path(directory) / "config.json")
        return type(config).from_pretrained(directory)


def rotary_twin(rotary: nn.Module, text_config: Any) -> nn.Module:
    """Build the rotary module's class from ``text_config``, on the CPU, in float32."""
    with torch.device("cpu"):
        return type(rotary)(config=copy.deepcopy(text_config))


def twin_config(model: PreTrainedModel, path: str, config: Any) -> Any:
    """The config that transformers would give to the rotary module at ``path`` of a model built from ``config``.

    Almost always its text part itself; some models hand their modules changed copies of it.
    """
    live = model.get_submodule(path)
    if live.config is model.config.get_text_config(decoder=True):
        return config.get_text_config(decoder=True)
    return meta_twin(model, config).get_submodule(path).config


def meta_twin(model: PreTrainedModel, config: Any) -> PreTrainedModel:
    """Build the model's class from ``config`` without allocating its weights."""
    with torch.inference_mode(False), torch.device("meta"):
        return type(model)(copy.deepcopy(config))


def changed_scalars(old: nn.Module, new: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """Yield ``(module path, attribute, new value)`` for plain attributes that differ between two twins."""
    olds = dict(old.named_modules())
    for path, module in new.named_modules():
        before = olds[path].__dict__
        for name, value in module.__dict__.items():
            if _is_plain(value) and _is_plain(before.get(name)) and before.get(name) != value:
                yield path, name, value


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return bool(value) and all(isinstance(item, Scalar) for item in (*value, *value.values()))
    return isinstance(value, Scalar)


def carry_over(model: PreTrainedModel, config: Any, fields: Iterable[str], edits: Edits) -> None:
    """Make the live model what transformers would build from ``config``, which differs from its own in ``fields``."""
    old = meta_twin(model, round_trip(model.config, {}))
    try:
        new = meta_twin(model, config)
    except (AttributeError, KeyError, ValueError, TypeError) as error:
        raise IncompatibleError(
            f"transformers {transformers.__version__} cannot build {type(model).__name__} from its extended config: "
            f"{type(error).__name__}: {error}"
        ) from error
    text, new_text = model.config.get_text_config(decoder=True), config.get_text_config(decoder=True)
    for path, name, value in changed_scalars(old, new):
        edits.set(model.get_submodule(path), name, value)
    for name in fields:
        edits.set(text, name, getattr(new_text, name))
    for path, rotary in rotaries(model):
        rotary_config = new_text
        if rotary.config is not text:
            rotary_config = new.get_submodule(path).config
            if rotary_config.to_dict() == old.get_submodule(path).config.to_dict():
                continue
            edits.set(rotary, "config", rotary_config)  # a changed copy of the text config, made when it was built
        for name, buffer in rotary_twin(rotary, rotary_config).named_buffers(recurse=False):
            edits.set(rotary, name, buffer.to(getattr(rotary, name).device))
        for name in [name for name in vars(rotary) if name.endswith("long_inv_freq")]:
            edits.delete(rotary, name)  # stock code caches it from the config it saw first


def rotaries(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module with rotary frequencies that transformers' own rope types control, with its path."""
    for path, module in model.named_modules():
        has_frequencies = any(name.endswith("original_inv_freq") for name in module._buffers)
        if has_frequencies and hasattr(module, "rope_type") and hasattr(module, "config"):
            yield path, module


@contextlib.contextmanager
def own_defaults() -> Iterator[None]:
    """Make tensors that name no device or dtype on the CPU, in float32, as transformers' and our proofs expect.

    Entered where a verb begins, so that no line below it has to think of it; ``torch.device`` entered inside wins.
    """
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(dtype)
