"""Rebuild a model from a changed config, on the meta device, and carry the differences over to the live model.

A patched model must be as a reload of its saved config would build it. Instead of knowing what each of two hundred
classes derives from its config, ctxext builds the model from the old config and from the new one, and compares.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import re
import tempfile
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from ctxext.core.edits import Edits, own_attributes
from ctxext.core.old_form import drop_old_form
from ctxext.core.saved import without_guard
from ctxext.core.scaling import REFUSALS
from ctxext.core.subject import Subject, text_of
from ctxext.errors import CtxextError, IncompatibleError

Scalar = int | float | str | bool | None
COPIES = re.compile(r"\.(original_module|modules_to_save\.[^.]+)(?![^.])")
"""Parts of a path by which PEFT tells the copies of a module apart, one for each adapter."""

# Errors that a model's own code may raise when it is called in a way that its authors did not expect.
FAILURES = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError, OSError, RuntimeError),
    *(StopIteration, SyntaxError, TypeError, ValueError),
)


@contextlib.contextmanager
def running(code: type) -> Iterator[None]:
    """Turn errors of a model's rotary class into an ``IncompatibleError``, while that class is built or called.

    Keep ctxext's own code out of the block, so that a defect of ctxext is not reported as one of the model.
    """
    try:
        yield
    except CtxextError:
        raise
    except FAILURES as error:
        raise IncompatibleError(
            f"{code.__name__} ({code.__module__}) fails when ctxext builds it from its config and calls it with "
            f"positions: {type(error).__name__}: {error}. If it reads keys that rope_parameters lacks, add them to the "
            f"config. Otherwise this model cannot be extended."
        ) from error


def reread(config: Any) -> Any:
    """Return the config that its class reads back from a file; raise one of ``REFUSALS`` where it does not."""
    kind: Any = type(config)
    return copy.deepcopy(_read_back(kind, config.to_json_string()))


@functools.lru_cache(maxsize=64)  # one extension reads the same config back three times
def _read_back(kind: Any, text: str) -> Any:
    # A config class may convert fields only when it reads a file, so a copy in memory would not be what a reload reads.
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(text, encoding="utf-8")
        return kind.from_pretrained(directory)


class Rebuild:
    """The model that transformers would build from a live model's config with changed fields, saved and read back.

    ``fields`` has new values of fields in the text part of its config. The model is built on first use, and ``apply``
    alone changes the live model.

    Raises:
        REFUSALS: if the config's class does not accept the fields.
    """

    def __init__(self, subject: Subject, fields: dict[str, Any] | None = None) -> None:
        self.subject, self.fields = subject, fields or {}
        changed = copy.deepcopy(subject.config)
        text = text_of(changed)
        drop_old_form(text)
        without_guard(changed)
        for name, value in self.fields.items():
            setattr(text, name, copy.deepcopy(value))
        self.config = reread(changed)
        self.text = text_of(self.config)

    @functools.cached_property
    def whole(self) -> PreTrainedModel:
        """The whole model, on the meta device."""
        return without_weights(type(self.subject.model), self.config)

    def rotary_config(self, path: str) -> Any:
        """Return the config that transformers gives to the rotary module at ``path``.

        Nearly always this is the text part itself; some models hand changed copies of it to their modules.
        """
        if self.subject.model.get_submodule(path).config is self.subject.text:
            return self.text
        return self.whole.get_submodule(path).config

    def rotary(self, path: str) -> nn.Module:
        """Build the rotary module at ``path`` on the CPU, in float32, with its real numbers; see ``running``."""
        kind, config = type(self.subject.model.get_submodule(path)), copy.deepcopy(self.rotary_config(path))
        with torch.device("cpu"), restoring(), running(kind):
            built: nn.Module = kind(config=config)
        return built

    def changes(self, before: Rebuild) -> Iterator[tuple[str, str, Any, Any]]:
        """Yield ``(module path, attribute, old value, new value)`` of plain attributes that differ from ``before``."""
        # Compare two rebuilt models: the live one may also differ by changes of its user, which have to stay.
        olds = dict(before.whole.named_modules())
        for path, module in self.whole.named_modules():
            for name, new in own_attributes(module).items():
                old = vars(olds[path]).get(name)
                if _is_plain(new) and _is_plain(old) and old != new:
                    yield path, name, old, new

    def apply(self, edits: Edits) -> None:
        """Change the live model into the rebuilt one, through ``edits``.

        Raises:
            IncompatibleError: if transformers cannot build the model.
        """
        subject, model, before = self.subject, self.subject.model, Rebuild(self.subject)
        try:
            _ = self.whole
        except REFUSALS as error:
            raise IncompatibleError(
                f"transformers {transformers.__version__} cannot build {type(model).__name__} from its extended "
                f"config: {type(error).__name__}: {error}"
            ) from error
        places: dict[str, list[nn.Module]] = {}
        for path, module in model.named_modules():
            places.setdefault(COPIES.sub("", path), []).append(module)
        text = subject.text
        for path, name, _, value in self.changes(before):
            for module in places.get(path) or [built_module(model, path)]:
                edits.set(module, name, value)
        for name in self.fields:
            # The value as it was read back, which the class may have converted.
            edits.set(text, name, getattr(self.text, name))
        for path, rotary in subject.rotaries:
            if rotary.config is not text:  # a changed copy of the text config, made when it was built
                config = self.rotary_config(path)
                if config.to_dict() == before.rotary_config(path).to_dict():
                    continue
                edits.set(rotary, "config", config)
            # Tensors of the whole rebuilt model are on the meta device, so this module alone is built again, with
            # numbers.
            for name, buffer in self.rotary(path).named_buffers(recurse=False):
                edits.set(rotary, name, buffer.to(getattr(rotary, name).device))
                if name.endswith("original_inv_freq") and "longrope" in str(rotary.rope_type):
                    edits.delete(rotary, name.replace("original", "long"))  # kept from the first config that met it


def built_module(model: nn.Module, path: str) -> nn.Module:
    """Return a module of a live model by its path, or raise ``IncompatibleError`` where layers were taken out."""
    try:
        return model.get_submodule(path)
    except AttributeError as error:
        raise IncompatibleError(
            f"This {type(model).__name__} has no {path}, for which its config asks. If layers were taken out, correct "
            f"their number in the config (num_hidden_layers) first."
        ) from error


def without_weights(kind: type[PreTrainedModel], config: Any) -> PreTrainedModel:
    """Build a class of models from a copy of ``config`` on the meta device.

    The copy has dtypes as ``from_pretrained`` sets them, instead of the names that ``save_pretrained`` leaves (Apertus
    makes a tensor of it). Sub-configs have none, or a part would be built in another dtype than the rest.
    """
    config = copy.deepcopy(config)
    for name in config.sub_configs:
        if getattr(config, name, None) is not None:
            getattr(config, name).dtype = None
    for part in (config, text_of(config)):
        if isinstance(dtype := vars(part).get("dtype"), str):
            part.dtype = getattr(torch, dtype)
    with torch.inference_mode(False), on_meta():
        return kind(config)


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return bool(value) and all(isinstance(item, Scalar) for item in (*value, *value.values()))
    return isinstance(value, Scalar)


RESTORING: ContextVar[bool] = ContextVar("ctxext_restoring", default=False)


@contextlib.contextmanager
def restoring() -> Iterator[None]:
    """Allow building a model whose dynamic method, or whose attention, is attached afterwards."""
    token = RESTORING.set(True)
    try:
        yield
    finally:
        RESTORING.reset(token)


FILLS = ("kaiming_uniform_", "normal_", "uniform_", "trunc_normal_", "zero_", "fill_", "copy_")


class Unfilled(TorchFunctionMode):
    """Function mode that leaves meta tensors alone where code initialises weights: it takes time and has no effect."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in FILLS:
            filled = args[0] if args else kwargs["tensor"]
            if filled.is_meta:
                return filled
        return func(*args, **kwargs)


@contextlib.contextmanager
def on_meta() -> Iterator[None]:
    """Build models on the meta device, also if their method is attached afterwards."""
    with torch.device("meta"), Unfilled(), restoring():
        yield


def fill_in(rotary: nn.Module, names: list[str], device: torch.device) -> None:
    """Compute buffers of a rotary module again, from its config, that left the meta device without their numbers."""
    with restoring(), torch.device("cpu"):
        computed = type(rotary)(rotary.config)
    for name in names:
        rotary.register_buffer(name, computed.get_buffer(name).to(device), persistent=False)


_ONE_AT_A_TIME = threading.RLock()


@contextlib.contextmanager
def own_defaults() -> Iterator[None]:
    """Create tensors without a stated device or dtype on the CPU, in float32, as the proofs expect, for a whole verb.

    A ``torch.device`` entered inside wins. The default dtype belongs to the process, so threads wait for one another.
    """
    with _ONE_AT_A_TIME:
        dtype = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        try:
            with torch.device("cpu"):
                yield
        finally:
            torch.set_default_dtype(dtype)
