"""Extend a checkpoint on disk: a new config beside the same weights, which are linked or copied and never loaded."""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctxext._api import describe_saved
from ctxext._checkpoint_source import Contents, checked_contents, read_config, read_json, refuse_source
from ctxext._load import extended_config
from ctxext.architectures._old_form import same_rope
from ctxext.errors import CheckpointError, VerificationError
from ctxext.methods import Method
from ctxext.spec import Description

__all__ = ["Written", "patch_checkpoint"]

# What os.link answers where a hard link is impossible, rather than wrong.
CANNOT_LINK = frozenset({errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOSYS, errno.EOPNOTSUPP})
CHUNK = 16 * 2**20

Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class Written:
    """What ``patch_checkpoint`` wrote.

    Args:
        directory: the new checkpoint.
        description: its extension.
        linked: weight files that share their bytes with the source.
        copied: weight files that were copied.
        why_copied: why links were not possible, where they were tried.
        changed: small files that were rewritten, and how.
        left_out: names in the source that do not belong to the extended checkpoint.
    """

    directory: Path
    description: Description
    linked: int
    copied: int
    why_copied: str | None = None
    changed: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


def patch_checkpoint(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    method: str | Method,
    *,
    link: bool | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
    **arguments: Any,
) -> Written:
    """Write an extended copy of a checkpoint directory, without loading its weights.

    ``destination`` appears at the end, whole, or not at all: the work happens in a hidden directory beside it.

    Args:
        source: a directory with config.json and safetensors weights; stays as it is.
        destination: a path where nothing exists yet.
        method: as for ``ctxext.patch``.
        link: hard-link the weights (True), copy them (False), or link where the file system can (None).
        trust_remote_code: allow a config that names Python code in the checkpoint to run that code.
        progress: called with (bytes copied, bytes to copy) while weights are copied.
        **arguments: ``factor``, ``target_length``, ``trained_length``, ``sliding_window`` and the method's own
            parameters, as for ``ctxext.patch``.

    Raises:
        CheckpointError: the source is not a safetensors checkpoint, the destination is in the way, or the disk is full.
        IncompatibleError: the method cannot be right on this model.
    """
    source, destination = Path(source), Path(destination)
    refuse_source(source)
    _refuse_destination(source, destination)
    contents = checked_contents(source)
    config = read_config(source, trust_remote_code=trust_remote_code)
    extended = extended_config(config, method, trust_remote_code=trust_remote_code, **arguments)
    description = describe_saved(extended.ctxext, extended.model_type)
    partial = destination.with_name(f".{destination.name}.{secrets.token_hex(4)}.partial")
    try:
        partial.mkdir()
        changed = _write_small_files(source, partial, contents, extended, description)
        _prove_readable(partial, extended, trust_remote_code)
        linked, why_copied = _place_weights(source, partial, contents.weights, link, progress)
        _refuse_destination(source, destination)  # a rename would replace an empty directory made in the meantime
        partial.rename(destination)
    except OSError as error:
        raise CheckpointError(
            f"Could not write {destination}: {error.strerror or error}. Nothing was left behind; {source} is unchanged."
        ) from error
    finally:
        if partial.exists():
            shutil.rmtree(partial)
    return Written(
        directory=destination,
        description=description,
        linked=linked,
        copied=len(contents.weights) - linked,
        why_copied=why_copied,
        changed=tuple(changed),
        left_out=tuple(contents.left_out),
    )


def _refuse_destination(source: Path, destination: Path) -> None:
    if os.path.lexists(destination):
        raise CheckpointError(f"{destination} already exists and is never overwritten. Give a new name, or remove it.")
    if not destination.parent.is_dir():
        raise CheckpointError(f"{destination} cannot be created: there is no directory {destination.parent}.")
    if source.resolve() in destination.resolve().parents:
        raise CheckpointError(f"{destination} lies inside the checkpoint that it is made from. Give a place outside.")


def _write_small_files(
    source: Path, target: Path, contents: Contents, extended: Any, description: Description
) -> list[str]:
    (target / "config.json").write_text(extended.to_json_string(use_diff=True), encoding="utf-8")
    changed = []
    for path in contents.others:
        place = target / path.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        if path == source / "tokenizer_config.json":
            changed += _copy_tokenizer_config(path, place, description.target_length)
        else:
            shutil.copyfile(path, place)
    return changed


def _copy_tokenizer_config(path: Path, place: Path, target_length: int | None) -> list[str]:
    """Tokenizers cut at ``model_max_length`` when asked to truncate, so a value below the new length is raised."""
    settings = read_json(path)
    limit = settings.get("model_max_length")
    if not isinstance(limit, int | float) or target_length is None or limit >= target_length:
        shutil.copyfile(path, place)
        return []
    settings["model_max_length"] = target_length
    place.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return [f"{path.name}: model_max_length {limit:g} -> {target_length}"]


def _prove_readable(directory: Path, extended: Any, trust_remote_code: bool) -> None:
    read = read_config(directory, trust_remote_code=trust_remote_code)
    for name in ("rope_parameters", "max_position_embeddings"):
        found, meant = (getattr(part.get_text_config(decoder=True), name, None) for part in (read, extended))
        if not same_rope(found, meant):
            raise VerificationError(f"config.json would read back as {name}={found}, not as {meant}.")
    if read.ctxext != extended.ctxext:
        raise VerificationError("config.json would not read back the extension that was written into it.")


def _place_weights(
    source: Path, target: Path, weights: list[Path], link: bool | None, progress: Progress | None
) -> tuple[int, str | None]:
    """Link or copy the weights; return how many were linked, and why the others were not."""
    why_copied = None if link is not False else "--copy"
    to_copy = list(weights)
    if link is not False:
        to_copy, why_copied = _link(source, target, weights, required=bool(link))
    total, done = sum(path.stat().st_size for path in to_copy), 0
    for path in to_copy:
        with path.open("rb") as reading, (target / path.relative_to(source)).open("wb") as writing:
            while chunk := reading.read(CHUNK):
                writing.write(chunk)
                done += len(chunk)
                if progress is not None:
                    progress(done, total)
    return len(weights) - len(to_copy), why_copied


def _link(source: Path, target: Path, weights: list[Path], *, required: bool) -> tuple[list[Path], str | None]:
    """Hard-link the weights; return those that must be copied instead, and why."""
    for done, path in enumerate(weights):
        try:
            os.link(path.resolve(), target / path.relative_to(source))  # a hub cache holds symbolic links
        except OSError as error:
            if required or error.errno not in CANNOT_LINK:
                raise
            return weights[done:], error.strerror
    return [], None
