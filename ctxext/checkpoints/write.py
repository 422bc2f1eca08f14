"""Extend a checkpoint on disk: a new config with the same weights, which are copied and never loaded."""

from __future__ import annotations

import copy
import errno
import os
import secrets
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.modeling_utils import LoadStateDictConfig

from ctxext.checkpoints.card import write_card
from ctxext.checkpoints.classes import meta_model
from ctxext.checkpoints.encodings import encoding_weights
from ctxext.checkpoints.limits import copy_raised, reach_in
from ctxext.checkpoints.load import attached, load, load_saved, refuse_without_method, replaces_weights
from ctxext.checkpoints.read import refuse_unfit
from ctxext.checkpoints.save import save
from ctxext.checkpoints.source import (
    Contents,
    checked_contents,
    fetched,
    quantised_beside,
    read_any_config,
    read_tokenizer,
    refuse_source,
)
from ctxext.core.edits import Edits
from ctxext.core.old_form import put_old_form
from ctxext.core.patching import describe, patch
from ctxext.core.rebuild import restoring
from ctxext.core.saved import describe_saved, extended_texts, saved_method
from ctxext.core.scaling import same_rope, stated_length
from ctxext.core.subject import text_of
from ctxext.errors import (
    CheckpointError,
    CtxextError,
    IncompatibleError,
    InvalidParameterError,
    VerificationError,
)
from ctxext.files import (
    Progress,
    StrPath,
    copy_counted,
    ending_cleanly,
    followed,
    gguf_at,
    hidden_beside,
    is_choice,
    refuse_destination,
    remove_left,
    weights_of,
    whole_files,
)
from ctxext.methods import Method
from ctxext.models.refusals import building
from ctxext.spec import Description

# linux/fs.h: make a file share the blocks of another until either is written. Not in Python's own modules.
FICLONE = 0x40049409
# Errors that mean that the files cannot share blocks, so that a plain copy follows; any other error is raised.
CANNOT_CLONE = frozenset({errno.EXDEV, errno.EOPNOTSUPP, errno.ENOTTY, errno.ENOSYS, errno.EINVAL, errno.EPERM})
UNWRITTEN = (OSError, SafetensorError)


@dataclass(frozen=True, kw_only=True)
class Written:
    """The result of ``patch_checkpoint``.

    Args:
        linked: weight files that are hard links: they are the source's files under another name.
        cloned: weight files that share their blocks with the source until either is written.
        rewritten: True if the weights were loaded and written again, because the extension changes one of them.
        unpacked: True if the weights were dequantised out of a GGUF file.
        limits: Limits in small files that still cut texts below the new window, since it was not the old one.
        left_out: names in the source that do not belong to the extended checkpoint.
        draft: The result for the draft, which lies next to it.
    """

    directory: Path
    description: Description
    linked: int
    cloned: int
    copied: int
    rewritten: bool = False
    unpacked: bool = False
    changed: tuple[str, ...] = ()
    limits: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    draft: Written | None = None


def patch_checkpoint(
    source: StrPath,
    destination: StrPath,
    method: str | Method | None = None,
    *,
    link: bool = False,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
    chosen: dict[str, Any] | None = None,
    results: str | None = None,
    **arguments: Any,
) -> Written:
    """Write an extended copy of a checkpoint directory, without loading its weights where they stay as they are.

    ``destination`` appears at the end, whole, or not at all: the work happens in a hidden directory next to it.

    Args:
        source: a directory with config.json and safetensors weights, a name on the hub, or a ``.gguf`` file, whose
            weights are dequantised to bfloat16; stays as it is. Of a file, no ``method`` makes a plain directory.
        destination: a path where nothing exists yet.
        link: hard-link the weights. It takes no space, and whatever writes into a weight file of ``destination``
            writes into the source's: safetensors before 0.8 does so when a model is saved over it. By default the
            weights are cloned where the file system can (btrfs, XFS), else copied.
        chosen: Record of how the method was found, as JSON values, kept in the config; see ``Choice.record``.

    Raises:
        CheckpointError: the source is not a safetensors checkpoint, or holds symbolic links that lead out of it; the
            destination is in the way; or the disk is full.
        IncompatibleError: the method cannot be right on this model.
        InvalidParameterError: ``link`` where the extension changes weights, or where they are in a GGUF file.
    """
    name, source, destination = str(source), fetched(Path(source)), Path(destination)
    if file := gguf_at(source):
        return _unpacked(file, destination, method, link, chosen, results, arguments)
    refuse_copy(source, destination)
    contents = checked_contents(source, copied=True)
    config = read_any_config(source, trust_remote_code=trust_remote_code)
    model = meta_model(config, trust_remote_code=trust_remote_code)
    _refuse_part(source, config, model)
    extended = patch(model, method, **arguments).config
    _refuse_unfit(source, config, contents, trust_remote_code)
    description = describe_saved(extended.ctxext, extended.model_type)
    is_rewritten = replaces_weights(model, extended.ctxext) or bool(encoding_weights(model))
    if link and is_rewritten:
        raise InvalidParameterError(
            f"link: the extension of this {config.model_type} changes some of its weights, so that they are written "
            f"anew ({description.stored_as}). Leave link out."
        )
    if chosen is not None:
        extended.ctxext = extended.ctxext | {"chosen": chosen}
    partial = hidden_beside(destination, f"{secrets.token_hex(4)}.partial")
    try:
        with ending_cleanly():
            try:
                remove_left(destination.parent, destination.name)
                partial.mkdir()
                if is_rewritten:
                    how = arguments | {"dtype": contents.dtype, "trust_remote_code": trust_remote_code}
                    _write_weights(load(source, method, **how), partial, contents)
                changed, limits = _write_small_files(source, partial, contents, extended)
                write_card(partial, model, name=destination.name, base=name, results=results, cuts=limits)
                _prove_readable(partial, extended, trust_remote_code)
                weights = contents.unread if is_rewritten else contents.weights
                linked, cloned = _place_weights(source, partial, weights, link, progress)
                _refuse_destination(source, destination)  # a rename would replace an empty directory made meanwhile
                partial.rename(destination)
            finally:
                if partial.exists():
                    shutil.rmtree(partial)
    except UNWRITTEN as error:
        raise _unwritten(source, destination, error) from error
    return Written(
        directory=destination,
        description=description,
        linked=linked,
        cloned=cloned,
        copied=len(weights) - linked - cloned,
        rewritten=is_rewritten,
        changed=tuple(changed),
        limits=tuple(limits),
        left_out=tuple(contents.left_out),
    )


def patch_with_draft(
    source: StrPath,
    destination: StrPath,
    method: str | Method | None = None,
    *,
    draft: StrPath,
    results: str | None = None,
    trained_length: int | None = None,
    **given: Any,
) -> Written:
    """Write extended copies of a checkpoint and of its draft, an EAGLE head or a small model, to the same length.

    The draft's copy lies next to the checkpoint's, with ``-draft`` behind its name. All else is as for
    ``patch_checkpoint``, for both.

    Raises:
        IncompatibleError: only the checkpoint was written, since the draft cannot follow; the message says why.
        InvalidParameterError: no ``method``, without which nothing is extended.
    """
    if method is None:
        raise InvalidParameterError(
            f"draft: {draft} is extended as far as {source}, which takes a method. Name it, or leave draft out."
        )
    beside = Path(destination).with_name(f"{Path(destination).name}-draft")
    refuse_destination(beside)
    written = patch_checkpoint(source, destination, method, results=results, trained_length=trained_length, **given)
    same_length = given | {"factor": None, "target_length": written.description.target_length}
    if not isinstance(method, str) or is_choice(method):  # which hold the parameters
        held = saved_method({"method": written.description.method})
        method = held.name
        same_length |= held.parameters()
    try:
        own = read_any_config(draft, trust_remote_code=given.get("trust_remote_code", False))
        if stated_length(text_of(own)) == trained_length:  # a scaled config must be told so, too
            same_length["trained_length"] = trained_length
        classes = own.architectures or ()
        if classes and not written.description.stock and not any(hasattr(transformers, name) for name in classes):
            raise IncompatibleError(
                f"Servers run {', '.join(classes)}, and only ctxext computes this extension. Extend both by a method "
                f"that config.json expresses, such as yarn."
            )
        return replace(written, draft=patch_checkpoint(draft, beside, method, **same_length))
    except CtxextError as error:
        raise IncompatibleError(f"{destination} was written, and no draft for it from {draft}. {error}") from error


def _unpacked(
    source: Path,
    destination: Path,
    method: str | Method | None,
    link: bool,
    chosen: dict[str, Any] | None,
    results: str | None,
    arguments: dict[str, Any],
) -> Written:
    """Write a checkpoint of safetensors out of a GGUF file, its tokenizer included, extended if there is a method."""
    _refuse_destination(source, destination)
    if link:
        raise InvalidParameterError(f"link: the weights in {source} are written anew. Leave link out.")
    if method is None:
        refuse_without_method(arguments, "a GGUF file is unpacked as it is")
        for name, value in {"results": results, "chosen": chosen}.items():
            if value is not None:
                raise InvalidParameterError(
                    f"{name}: it is kept with an extension, and without a method {source} is unpacked as it is. Name "
                    f"the method too, or leave {name} out."
                )
        model: Any = load_saved(source, plain_class=AutoModelForCausalLM, dtype=torch.bfloat16)
    else:
        model = load(source, method, dtype=torch.bfloat16, **arguments)
    if chosen is not None:  # the record of the choice goes into the config with the extension
        model.config.ctxext = model.config.ctxext | {"chosen": chosen}
    tokenizer = read_tokenizer(source.parent, gguf_file=source.name)
    if method is None:
        try:
            with whole_files(destination, last=["config.json"]) as partial:
                model.save_pretrained(partial)
                tokenizer.save_pretrained(partial)
        except UNWRITTEN as error:
            raise _unwritten(source, destination, error) from error
    else:
        save(model, destination, tokenizer=tokenizer, results=results)
    return Written(directory=destination, description=describe(model), linked=0, cloned=0, copied=0, unpacked=True)


def _unwritten(source: Path, destination: Path, error: Exception) -> CheckpointError:
    """Return the error of a copy that could not be written."""
    reason = getattr(error, "strerror", None) or error
    return CheckpointError(f"Could not write {destination}: {reason}. Nothing was left behind; {source} is unchanged.")


def _refuse_part(source: Path, config: Any, model: PreTrainedModel) -> None:
    """Refuse a model class that keeps another config than the checkpoint's, as of its text part alone."""
    kept = model.config
    if type(kept) is not type(config):
        raise IncompatibleError(
            f"{source} holds a {config.model_type}, whose model keeps a config of the type {kept.model_type}: "
            f"ctxext would write the config of a part beside the weights of the whole. Load it and extend it in "
            f"memory: ctxext.load({str(source)!r}, method=...)."
        )


def _refuse_unfit(source: Path, config: Any, contents: Contents, trust_remote_code: bool) -> None:
    """Refuse weights that the model of the config could not be loaded with, by loading it on the meta device.

    transformers alone knows which names and layouts it translates. Quantised weights need the packages of their
    programs. The steps are as in ``from_pretrained``, which itself needs accelerate where a device is named.
    """
    quantised = {"quantization_config", "compression_config"} & vars(config).keys()
    if not quantised and not quantised_beside(source, config):
        model = meta_model(config, trust_remote_code=trust_remote_code)
        if type(model).__name__ not in (config.architectures or [type(model).__name__]):
            return  # a draft head, of a class that transformers does not have: its weights are copied as they are
        with building(f"a {type(model).__name__} with the weights of {source}"), restoring():
            how = LoadStateDictConfig(
                ignore_mismatched_sizes=True,
                device_map={"": "meta"},
                weight_mapping=get_model_conversion_mapping(model),
            )
            report, _ = model._load_pretrained_model(model, contents.stored, None, how)
            contents.unexpected = {*report.unexpected_keys}  # the next line leaves old buffers out, as inv_freq
            model._finalize_model_loading(model, how, report)
        refuse_unfit(source, model, report.to_dict(), contents.stored)


def refuse_copy(source: Path, destination: Path) -> None:
    """Refuse a source without a whole model, and a destination that is in the way or inside the source."""
    refuse_source(source)
    _refuse_destination(source, destination)


def _refuse_destination(source: Path, destination: Path) -> None:
    refuse_destination(destination)
    if source.resolve() in destination.resolve().parents:
        raise CheckpointError(f"{destination} lies inside the checkpoint that it is made from. Give a place outside.")


def _write_weights(extended: PreTrainedModel, target: Path, contents: Contents) -> None:
    """Write the weights of an extended model, with a new index where they fill several files.

    They stay in the dtype that they had, whatever the config says: of several, in one that rounds none.
    """
    extended.save_pretrained(target)
    contents.others = [path for path in contents.others if not weights_of(path.name).endswith(".safetensors")]
    contents.left_out += sorted(contents.tensors.keys() - contents.read - {path.name for path in contents.unread})


def with_old_form(config: Any) -> Any:
    """Return a copy of an extended config with the fields of transformers 4 that its class reads too."""
    copied = copy.deepcopy(config)
    put_old_form(extended_texts(copied), Edits())
    return copied


def _write_small_files(source: Path, target: Path, contents: Contents, extended: Any) -> tuple[list[str], list[str]]:
    (target / "config.json").write_text(with_old_form(extended).to_json_string(use_diff=True), encoding="utf-8")
    lengths = extended.ctxext["trained_length"], extended.ctxext["target_length"], reach_in(source)
    changed, limits = list[str](), list[str]()
    for path in contents.others:
        place = target / path.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        real = followed(path, source)
        if path.parent != source:
            shutil.copyfile(real, place)
        else:
            raised, stays = copy_raised(path, place, *lengths)
            changed, limits = changed + raised, limits + stays
    return changed, limits


def _prove_readable(directory: Path, extended: Any, trust_remote_code: bool) -> None:
    read = read_any_config(directory, trust_remote_code=trust_remote_code)
    if (type(read), read.architectures) != (type(extended), extended.architectures):
        raise VerificationError(f"config.json would read back as a {read.model_type} of {read.architectures}.")
    for text, meant_text in zip(extended_texts(read), extended_texts(extended), strict=True):
        for name in ("rope_parameters", "max_position_embeddings"):
            value, meant = (getattr(part, name, None) for part in (text, meant_text))
            if not same_rope(value, meant):
                raise VerificationError(f"config.json would read back as {name}={value}, not as {meant}.")
    if read.ctxext != extended.ctxext:
        raise VerificationError("config.json would not read back the extension that was written into it.")
    attached(meta_model(read, trust_remote_code=trust_remote_code), str(directory))  # as loading it will do


def _place_weights(
    source: Path, target: Path, weights: list[Path], link: bool, progress: Progress | None
) -> tuple[int, int]:
    """Link, clone or copy the weights; return how many were linked, and how many cloned."""
    if link:
        for path in weights:
            os.link(followed(path, source), target / path.name)  # a hub cache holds symbolic links
        return len(weights), 0
    to_copy = [path for path in weights if not _clone(followed(path, source), target / path.name)]
    total, done = sum(path.stat().st_size for path in to_copy), 0
    for path in to_copy:
        with followed(path, source).open("rb") as reading, (target / path.name).open("wb") as writing:
            done = copy_counted(reading, writing, total, progress, done)
    return 0, len(weights) - len(to_copy)


def _clone(path: Path, place: Path) -> bool:
    """Make ``place`` share the blocks of ``path`` until either is written; False where the file system cannot."""
    if sys.platform != "linux":
        return False
    import fcntl

    with path.open("rb") as reading, place.open("wb") as writing:
        try:
            fcntl.ioctl(writing.fileno(), FICLONE, reading.fileno())
        except OSError as error:
            if error.errno not in CANNOT_CLONE:
                raise
            return False
    return True
