"""``config.ctxext``: the saved form of an extension, written by ``patch`` and checked when it is read."""

from __future__ import annotations

import copy
from dataclasses import asdict, fields
from typing import Any

import torch
import transformers

import ctxext
from ctxext.architectures import Extension
from ctxext.architectures._old_form import drop_old_form
from ctxext.errors import CheckpointError
from ctxext.methods import METHODS, Method

__all__ = ["checked_extension", "choices", "plain_config", "saved_extension", "saved_form", "saved_method"]

FORMAT = 1
# What later code relies on; a file may have been damaged, or changed by hand.
KINDS = {
    "method": dict,
    "versions": dict,
    "original": dict,
    "notes": list,
    "fingerprint": str,
    "stored_as": str,
    "trained_length": int,
    "target_length": int,
}


def saved_form(chosen: Method, extension: Extension) -> dict[str, Any]:
    """What ``config.ctxext`` holds: plain JSON, enough to rebuild, to describe and to trace the extension."""
    versions = {"ctxext": ctxext.__version__, "transformers": transformers.__version__, "torch": torch.__version__}
    saved = asdict(extension) | {"notes": list(extension.notes)}
    return {"format": FORMAT, "method": chosen.to_dict(), **saved, "versions": versions}


def saved_extension(config: Any, place: str) -> dict[str, Any] | None:
    """The extension that a config carries, None where it is plain.

    Raises:
        CheckpointError: if it is not in a form that this version of ctxext reads.
    """
    saved = getattr(config, "ctxext", None)
    return None if saved is None else checked_extension(saved, place)


def checked_extension(saved: Any, place: str) -> dict[str, Any]:
    """``saved`` itself, if it is in the form that this version of ctxext reads and writes.

    Raises:
        CheckpointError: if it is not.
    """
    found = saved.get("format") if isinstance(saved, dict) else saved
    if not isinstance(saved, dict) or found != FORMAT:
        raise CheckpointError(
            f"The extension in {place} has format {found!r}; ctxext {ctxext.__version__} reads format {FORMAT}. It was "
            f"saved by another version of ctxext, or changed by hand."
        )
    needed = {"method", "versions", *(field.name for field in fields(Extension))}
    missing = sorted(needed - saved.keys())
    if missing:
        raise CheckpointError(f"The extension in {place} is incomplete, without {', '.join(missing)}.")
    for name, kind in KINDS.items():
        if not isinstance(saved[name], kind) or isinstance(saved[name], bool):
            raise CheckpointError(f"The extension in {place} is damaged: {name}={saved[name]!r} is no {kind.__name__}.")
    for name, part in (("method", "method"), ("versions", "ctxext")):
        if part not in saved[name]:
            raise CheckpointError(f"The extension in {place} is incomplete: {name} is without {part}.")
    return saved


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


def choices(saved: dict[str, Any], attention: str | None = None) -> dict[str, Any]:
    """What else ``patch`` was told; the attention backend may be another on another machine."""
    given = {key: saved[key] for key in ("trained_length", "sliding_window", "attention")}
    return given if attention is None else given | {"attention": attention}


def plain_config(config: Any, saved: dict[str, Any]) -> Any:
    """A copy of ``config`` as it was before the extension ``saved`` was written into it."""
    plain = copy.deepcopy(config)
    text = plain.get_text_config(decoder=True)
    drop_old_form(text)
    for name, value in saved["original"].items():
        if value is None and name in vars(text):
            delattr(text, name)
        elif value is not None:
            setattr(text, name, copy.deepcopy(value))
    del plain.ctxext
    return plain
