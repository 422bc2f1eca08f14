"""``config.ctxext``: the saved form of an extension, written by ``patch`` and checked when it is read."""

from __future__ import annotations

import copy
import reprlib
from dataclasses import MISSING, asdict, fields
from typing import Any

import torch
import transformers

import ctxext
from ctxext.architectures import Extension
from ctxext.architectures._old_form import drop_old_form
from ctxext.architectures._scaling import SCALED
from ctxext.errors import CheckpointError, PatchStateError
from ctxext.methods import METHODS, Method

__all__ = [
    "checked_extension",
    "checked_trained_length",
    "choices",
    "differences",
    "identity",
    "plain_config",
    "saved_extension",
    "saved_form",
    "saved_method",
]

FORMAT = 1
# What no logit depends on: who wrote it and how it is expressed, what to tell a user, how to undo it, which of several
# exact kernels computes it, and what follows from the rest. Whatever else a saved form holds, now or later, counts.
NOT_IDENTITY = ("format", "versions", "stored_as", "stock", "notes", "original", "attention", "target_length")
OPTIONAL = {field.name: field.default for field in fields(Extension) if field.default is not MISSING}
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
    """``saved``, if it is in the form that this version of ctxext reads and writes, with every choice in it.

    A choice that did not exist yet when it was saved has its default: that is how the model was extended then.

    Raises:
        CheckpointError: if it is not.
    """
    found = saved.get("format") if isinstance(saved, dict) else saved
    if not isinstance(saved, dict) or found != FORMAT:
        raise CheckpointError(
            f"The extension in {place} has format {found!r}; ctxext {ctxext.__version__} reads format {FORMAT}. It was "
            f"saved by another version of ctxext, or changed by hand."
        )
    needed = {"method", "versions", *(field.name for field in fields(Extension) if field.name not in OPTIONAL)}
    missing = sorted(needed - saved.keys())
    if missing:
        raise CheckpointError(f"The extension in {place} is incomplete, without {', '.join(missing)}.")
    for name, kind in KINDS.items():
        if not isinstance(saved[name], kind) or isinstance(saved[name], bool):
            raise CheckpointError(f"The extension in {place} is damaged: {name}={saved[name]!r} is no {kind.__name__}.")
    for name, part in (("method", "method"), ("versions", "ctxext")):
        if part not in saved[name]:
            raise CheckpointError(f"The extension in {place} is incomplete: {name} is without {part}.")
    return _complete(saved)


def _complete(saved: dict[str, Any]) -> dict[str, Any]:
    """With every choice that did not exist yet when it was saved, as the model was extended then."""
    return OPTIONAL | {"scaling": _scaling_before(saved)} | saved


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


def identity(saved: dict[str, Any]) -> dict[str, Any]:
    """Every choice in a saved extension that logits depend on: the same weights compute the same where this is equal.

    Args:
        saved: ``config.ctxext`` of a model, or what was stored of it.
    """
    rest = {name: value for name, value in _complete(saved).items() if name not in (*NOT_IDENTITY, "method")}
    kept = {"sliding_window": rest.get("sliding_window") or "keep"}  # leaving it out is to keep what there is
    return saved_method(saved).to_dict() | rest | kept


def differences(there: dict[str, Any] | None, here: dict[str, Any] | None) -> str:
    """How two saved extensions differ in what logits depend on, with both values; empty where they are one.

    Args:
        there: what was saved, None for a model that was not extended.
        here: what is compared with it, None for a model that is not extended.
    """
    one, other = (None if saved is None else identity(saved) for saved in (there, here))
    if one is None or other is None:
        names = ["not extended" if choice is None else f"method {choice['method']!r}" for choice in (one, other)]
        return "" if one == other else f"{names[0]} there, {names[1]} here"
    # Two methods differ in which parameters they have; two versions of ctxext in which choices they know.
    known = [name for name in one | other if one["method"] == other["method"] or (name in one and name in other)]
    different = [name for name in known if one.get(name) != other.get(name)]
    if len(different) > 1 and "fingerprint" in different:  # which follows from the others
        different.remove("fingerprint")
    return "; ".join(
        f"{name} {reprlib.repr(one.get(name))} there, {reprlib.repr(other.get(name))} here" for name in different
    )


def choices(saved: dict[str, Any], attention: str | None = None) -> dict[str, Any]:
    """What else ``patch`` was told; the attention backend may be another on another machine."""
    full = _complete(saved)
    given = {key: full[key] for key in ("trained_length", "sliding_window", "scaling", "attention")}
    return given if attention is None else given | {"attention": attention}


def _scaling_before(saved: dict[str, Any]) -> str | None:
    """What an extension did to a scaling before that was said: it replaced it."""
    rope = saved["original"].get("rope_parameters") or {}
    kinds = {part.get("rope_type", "default") for part in (rope, *rope.values()) if isinstance(part, dict)}
    return "replace" if kinds & set(SCALED) else None


def checked_trained_length(saved: dict[str, Any], trained_length: int | None) -> None:
    """Refuse to extend anew what is saved extended, unless the length that its weights were trained for is said.

    Raises:
        PatchStateError: without a length, or with another one than was saved.
    """
    known, name = saved["trained_length"], saved["method"]["method"]
    if trained_length is None:
        raise PatchStateError(
            f"This checkpoint is already extended (ctxext {name}, trained_length={known}). Say which length its "
            f"weights were trained for before that extension: trained_length={known}; the new method then replaces the "
            f"old one."
        )
    if trained_length != known:
        raise PatchStateError(
            f"This checkpoint is already extended (ctxext {name}, trained_length={known}), and "
            f"trained_length={trained_length} contradicts that. Pass trained_length={known}; the new method then "
            f"replaces the old one."
        )


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
