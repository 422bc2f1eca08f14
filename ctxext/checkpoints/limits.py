"""Limits of the length of texts, on a live model and in files next to its config (tokenizers, generate, pipelines)."""

from __future__ import annotations

import contextlib
import json
import shutil
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from ctxext.core.edits import Edits
from ctxext.core.steps import ExtendedPart, Moment, Step, Work, register, register_description
from ctxext.core.subject import Subject
from ctxext.errors import CheckpointError, InvalidParameterError
from ctxext.files import read_json
from ctxext.spec import Description, Extension

# Fields of files next to a config that may hold the window. The first is a bound of the tokenizer, whose value means
# the window; the others may hold a choice.
BOUND = ("tokenizer_config.json", ("model_max_length",))
FIELDS = (
    BOUND,
    ("tokenizer_config.json", ("max_length",)),
    ("tokenizer.json", ("truncation", "max_length")),
    ("generation_config.json", ("max_length",)),
    ("sentence_*_config.json", ("max_seq_length",)),
)
LOADED = "_original_object_hash"
"""Attribute by which transformers knows settings of ``generate`` that are as they were loaded."""


@dataclass(frozen=True)
class Limit:
    """A limit of texts in a file next to a model.

    Args:
        is_bound: True if the value can mean nothing but the window; other limits may be choices of a user.
    """

    file: str
    field: tuple[str, ...]
    value: int | float
    is_bound: bool

    def __str__(self) -> str:
        return f"{self.file}: {'.'.join(self.field)} {self.value:g}"


def limits_in(path: Path) -> list[Limit]:
    """Read the limits that a file holds; none for files of other names."""
    limits, fields = [], [(name, field) for name, field in FIELDS if fnmatch(path.name, name)]
    settings = read_json(path) if fields else {}
    for name, field in fields:
        value: Any = settings
        for part in field:
            value = value.get(part) if isinstance(value, dict) else None
        if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
            limits.append(Limit(path.name, field, value, (name, field) == BOUND))
    return limits


def reach_in(folder: Path) -> int | None:
    """Return the window in tokens of the extension that a folder's config carries; None where it carries none."""
    saved = None
    with contextlib.suppress(CheckpointError, OSError):  # none there, or a damaged one, which saving replaces
        saved = read_json(folder / "config.json").get("ctxext")
    return saved.get("target_length") if isinstance(saved, dict) else None


def _was_window(value: float, trained: int, target: int, former: int | None) -> bool:
    """Return whether a limit was the window before: the trained length, or the reach of the extension taken off."""
    return value != target and value in (trained, former)


def copy_raised(path: Path, place: Path, trained: int, target: int, former: int | None) -> tuple[list[str], list[str]]:
    """Copy a file that lies next to a model, and raise a limit in it from the old window to the new one.

    A tokenizer's bound is raised wherever it is below the new window. The others may also hold a choice, and then stay.
    A limit at the window of the extension before, ``former``, becomes the new one, also where it falls.

    Returns:
        The changes, a line each; and the limits that still cut texts, a line each.
    """
    if place != path:
        shutil.copyfile(path, place)
    limits = limits_in(path)
    short = [limit for limit in limits if limit.value < target]
    raised = [
        limit
        for limit in limits
        if _was_window(limit.value, trained, target, former) or (limit.is_bound and limit in short)
    ]
    if raised:
        settings = read_json(path)
        for limit in raised:
            inner = settings
            for part in limit.field[:-1]:
                inner = inner[part]
            inner[limit.field[-1]] = target
        place.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    stays = [f"{limit} is below {target}" for limit in short if limit not in raised]
    return [f"{limit} -> {target}" for limit in raised], stays


def raise_limits(old: Path, new: Path, trained: int, target: int, former: int | None) -> list[str]:
    """Raise the limits of the length of texts in the files next to a model, and return the ones that still cut texts.

    Files in ``old`` stay as they are. A file that lies in ``new`` already is raised itself.
    """
    stays = list[str]()
    names = {path.name for place in (old, new) if place.is_dir() for path in place.iterdir() if path.is_file()}
    for name in sorted(names):
        path = (new if (new / name).is_file() else old) / name
        if path.parent == new or limits_in(path):
            stays += copy_raised(path, new / name, trained, target, former)[1]
    return stays


def refuse_tokenizer(tokenizer: Any, config: Any) -> None:
    """Refuse a tokenizer whose padding is not the model's, where rows of its table of positions are counted from that.

    The model of ``config`` gives tokens which are padding by their id no position.

    Raises:
        InvalidParameterError: with both ids.
    """
    model_id, tokenizer_id = config.pad_token_id, getattr(tokenizer, "pad_token_id", None)
    if tokenizer_id is not None and model_id is not None and tokenizer_id != model_id:
        raise InvalidParameterError(
            f"This tokenizer pads with the token {tokenizer_id} ({tokenizer.pad_token!r}), and the model counts "
            f"positions of all tokens but {model_id} (config.pad_token_id): padded texts would stand at other "
            f"positions than they do alone. Give the tokenizer of this checkpoint, or set tokenizer.pad_token to its "
            f"token {model_id}."
        )


def length_limits(subject: Subject) -> list[tuple[Any, str, int]]:
    """Find the limits at which the wrappers cut their texts: the object, the attribute and its value.

    Such limits are ``max_seq_length`` of older versions of sentence-transformers, and ``model_max_length`` of a
    tokenizer, which newer ones, their CrossEncoder and transformers' pipelines go by.
    """
    limits: list[tuple[Any, str, int]] = []
    for holder in subject.wrappers:
        places = [(getattr(holder, "tokenizer", None), "model_max_length")]
        places += [(holder, name) for name in ("max_seq_length", "max_length") if name in vars(holder)]
        for owner, name in places:
            value = getattr(owner, name, None)
            if isinstance(value, int) and not any(owner is other and name == known for other, known, _ in limits):
                limits.append((owner, name, value))
    return limits


def _written(work: Work) -> Extension:
    """Return the extension of the text that ``generate`` writes."""
    return work.sides["decoder"].extension if "decoder" in work.sides else work.extension


def _raise_generation(work: Work) -> None:
    """Set the limit of ``generate`` to the new window, where it was the window before.

    A model that was loaded extended is plain once it is unpatched, and then has the trained length as its limit.
    """
    settings, extension = work.subject.model.generation_config, _written(work)
    if work.is_restored:
        _set_length(settings, extension.trained_length, Edits())
    _set_length(settings, extension.target_length, work.edits)


def _set_length(settings: Any, length: int, edits: Edits) -> None:
    """Set the limit of ``generate`` in its settings.

    transformers saves settings with faults, as of many published checkpoints, only where they are as they were loaded.
    """
    is_as_loaded = getattr(settings, LOADED, None) == hash(settings)
    edits.set(settings, "max_length", length)
    if is_as_loaded:
        edits.set(settings, LOADED, hash(settings))


def _is_window(value: int, work: Work, extension: Extension) -> bool:
    """Return whether a limit of a live object was the window before, or is the one of a restored extension."""
    is_saved = work.is_restored and value == extension.target_length
    return is_saved or _was_window(value, extension.trained_length, extension.target_length, work.former)


def _raise_wrappers(work: Work) -> None:
    """Set the limits of the wrappers to the new window, where they were the window before; others were chosen."""
    for owner, name, value in length_limits(work.subject):
        if _is_window(value, work, work.extension):
            work.edits.set(owner, name, work.extension.target_length)


def _note_limits(part: ExtendedPart, description: Description) -> Description:
    """Note where the texts of a whole model are cut below its new window."""
    length = part.extension.target_length
    if part.subject.place or length <= part.extension.trained_length:
        return description
    limits = length_limits(part.subject)
    notes = [
        f"Texts are cut at {name}={value} of this {type(owner).__name__}, a choice that was not the trained length. "
        f"Set it to {length} for the whole window."
        for owner, name, value in limits
        if value < length
    ]
    if not limits:
        notes = [
            f"A tokenizer that truncates cuts at its own limit: set tokenizer.model_max_length = {length}, and save it "
            f"with the model: ctxext.save(model, path, tokenizer=tokenizer)."
        ]
    return replace(description, notes=(*description.notes, *notes))


def _note_short_config(work: Work) -> None:
    """Note in the extension that the config goes on naming a shorter length, at which other programs cut."""
    note = (
        f"The config goes on saying max_position_embeddings={work.subject.text.max_position_embeddings}, from which "
        f"stock code counts. Programs cut texts there unless told otherwise after each load: lm-eval by "
        f"max_length={work.extension.target_length}, sentence-transformers by "
        f"max_seq_length={work.extension.target_length}."
    )
    work.extension = replace(work.extension, notes=(*work.extension.notes, note))


register(
    Step(
        Moment.MODULES,
        _note_short_config,
        applies=lambda work: (
            not work.sides
            and isinstance(named := getattr(work.subject.text, "max_position_embeddings", None), int)
            and named < work.extension.target_length
        ),
    )
)
register(
    Step(
        Moment.CONFIG,
        _raise_generation,
        applies=lambda work: (
            (not work.sides or "decoder" in work.sides)
            and (limit := getattr(getattr(work.subject.model, "generation_config", None), "max_length", None))
            is not None
            and _is_window(limit, work, _written(work))
        ),
    )
)
register(Step(Moment.CONFIG, _raise_wrappers, applies=lambda work: work.subject.wrappers))
register_description(_note_limits)
