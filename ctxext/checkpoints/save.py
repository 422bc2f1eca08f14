"""Save a model so that its extension cannot be lost, an adapter's included."""

from __future__ import annotations

import copy
import os
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import PreTrainedModel

from ctxext.adapters import ADAPTER_FILE, ENCODING_FILE, EXTENSION_FILE, save_adapters
from ctxext.architectures import find_architecture
from ctxext.architectures.sinusoid import Sinusoids
from ctxext.architectures.table import LearnedTable
from ctxext.checkpoints.limits import raise_limits, refuse_tokenizer
from ctxext.checkpoints.remote import REMOTE_CODE, auto_map
from ctxext.checkpoints.source import REMOTE_MODULE
from ctxext.errors import CheckpointError, InvalidParameterError, PatchStateError
from ctxext.files import whole_files
from ctxext.methods import RopeMethod, saved_class
from ctxext.saved import put_old_form, saved_sides
from ctxext.surgery.edits import Edits
from ctxext.surgery.rebuild import own_defaults
from ctxext.surgery.rotary import require_as_patched
from ctxext.surgery.subject import Subject, base_model, unwrapped

MODEL_CARD = "README.md"
ADAPTER_FILES = (ENCODING_FILE, ADAPTER_FILE, EXTENSION_FILE)


def save(
    model: Any,
    directory: str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    remote_code: bool = False,
    **saving: Any,
) -> None:
    """Save a model so that its extension cannot be lost.

    A whole model is what ``save_pretrained`` writes, whose config carries the extension; beside it stand, wherever they
    can say the same, the fields that programs written for transformers 4 read (mlx-lm, exllamav3, TGI). For a PEFT
    adapter, whose directory holds no config of the base model, the extension is written beside it and the adapter is
    marked so that PEFT and transformers refuse it with a sentence that says what to do. They cannot tell whether a base
    is extended, and refuse it on one that is, too: put it there with ``ctxext.load(path, base=model)``.

    Args:
        model: a patched model, or a PEFT wrapper around one.
        directory: where to write; created if it does not exist.
        tokenizer: saved beside the model, and allowed as many tokens as the model now is: a tokenizer cuts texts at
            its own ``model_max_length`` where it is asked to truncate. The object itself stays as it is. Limits in
            files of a tokenizer, or of sentence-transformers, that already lie in ``directory`` are raised too.
        remote_code: write a module of four lines beside a whole model, by which programs that take a path load it as
            ``ctxext.load`` does: those that pass ``trust_remote_code=True`` to transformers, and have ctxext installed.
            Without that argument they refuse the checkpoint as they did.
        **saving: arguments of ``save_pretrained``, such as ``max_shard_size`` or ``push_to_hub``.

    The files take their places when all of them are written: a full disk, or a kill, leaves no half of a checkpoint.

    Raises:
        PatchStateError: if the model is not extended, or its config or its rotary modules were changed since.
        CheckpointError: if ``directory`` is a file, or cannot be written; what lay there before is as it was.
        IncompatibleError: with ``remote_code``, a model that no ``AutoModel`` of transformers loads.
        InvalidParameterError: for a tokenizer that pads with another token than the one that positions leave out, or
            for ``remote_code`` beside an adapter.
    """
    inner = base_model(model)
    if not getattr(inner.config, "ctxext", None):
        raise PatchStateError(f"This {type(inner).__name__} is not extended; save it with save_pretrained.")
    place = Path(directory)
    if place.exists() and not place.is_dir():
        raise CheckpointError(f"{place} is a file; give a directory to save into, or a new name for one.")
    if tokenizer is not None:
        require_padding(inner, tokenizer)
    if saving.get("push_to_hub"):
        saving = {"repo_id": place.name} | saving
    extension = inner.config.ctxext
    adapted = next((wrapper for wrapper in unwrapped(model) if hasattr(wrapper, "peft_config")), None)
    if remote_code and adapted is not None:
        raise InvalidParameterError("remote_code=True is for whole models: merge the adapter into its base first.")
    module = {"auto_map": auto_map(inner)} if remote_code else {}
    try:
        _require_unchanged(inner)  # which builds rotary modules from a config in a temporary file
        with whole_files(place, last=("config.json",) if adapted is None else ADAPTER_FILES) as half:
            if adapted is None:
                _save_whole(inner, half, module, saving)
            else:
                if (place / MODEL_CARD).is_file():  # PEFT adds to it
                    shutil.copyfile(place / MODEL_CARD, half / MODEL_CARD)
                save_adapters(adapted, half, **saving)
            if tokenizer is not None:
                longer = copy.deepcopy(tokenizer)
                longer.model_max_length = max(longer.model_max_length, extension["target_length"])
                longer.save_pretrained(half)
            raise_limits(place, half, extension["trained_length"], extension["target_length"])
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(
            f"Could not save to {place}: {reason}. What lay there before is as it was. Make room, or take another "
            f"place."
        ) from error


@own_defaults()
def _require_unchanged(model: PreTrainedModel) -> None:
    """Raise ``PatchStateError`` where the positions of an extended model are no longer those that its config says."""
    subject, sides = Subject.of(model), saved_sides(model.config.ctxext)
    for name, side in sides.items() or [("", model.config.ctxext)]:
        part = subject.sides[name] if name else subject
        architecture = find_architecture(part)
        is_rotary = architecture is not None and architecture.positions == "rotary"
        if is_rotary and issubclass(saved_class(side["method"]["method"]), RopeMethod):  # others replace rotation
            require_as_patched(part, side["trained_length"])


def _save_whole(model: PreTrainedModel, directory: Path, module: dict[str, Any], saving: dict[str, Any]) -> None:
    edits = Edits()
    try:
        put_old_form(model.config, edits)
        for name, value in module.items():
            edits.set(model.config, name, value)
            (directory / f"{REMOTE_MODULE}.py").write_text(REMOTE_CODE, encoding="utf-8")
        model.save_pretrained(directory, **saving)
    finally:
        edits.undo()


def counts_from_padding(model: PreTrainedModel) -> bool:
    """Return whether positions of tokens depend on which id is padding."""
    subject = Subject.of(model)
    architecture = find_architecture(subject)
    if not isinstance(architecture, LearnedTable | Sinusoids):
        return False
    return any(table.skips_padding for table in architecture.tables(subject))


def require_padding(model: PreTrainedModel, tokenizer: Any) -> None:
    """Raise ``InvalidParameterError`` for a tokenizer that pads with another token than positions leave out."""
    if counts_from_padding(model):
        refuse_tokenizer(tokenizer, model.config)
