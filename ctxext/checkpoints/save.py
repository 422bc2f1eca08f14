"""Save a model so that its extension cannot be lost, an adapter's included."""

from __future__ import annotations

import copy
import inspect
import os
import shutil
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.errors import (  # type: ignore[attr-defined]
    EntryNotFoundError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedModel

from ctxext.checkpoints.adapters import (
    ADAPTER_FILE,
    ENCODING_FILE,
    EXTENSION_FILE,
    WHOLE_WEIGHTS,
    save_adapters,
)
from ctxext.checkpoints.card import MODEL_CARD, read_card, tags_of, write_card
from ctxext.checkpoints.limits import raise_limits, reach_in, refuse_tokenizer
from ctxext.checkpoints.remote import REMOTE_CODE, auto_map
from ctxext.checkpoints.source import MISTRAL_FORMAT, REMOTE_MODULE
from ctxext.core.edits import Edits
from ctxext.core.old_form import put_old_form
from ctxext.core.patching import patched_state, require_own_config
from ctxext.core.rebuild import own_defaults
from ctxext.core.saved import GUARDED, extended_texts, extensions_in
from ctxext.core.subject import Subject, field_of
from ctxext.errors import (
    CheckpointError,
    CtxextError,
    InvalidParameterError,
    PatchStateError,
    refuse_unknown,
    shown,
)
from ctxext.files import StrPath, replaced_weights, whole_files
from ctxext.methods import RopeMethod, saved_class
from ctxext.mistakes import text_tokenizer
from ctxext.models import find_architecture
from ctxext.models.sinusoid import Sinusoids
from ctxext.models.table import LearnedTable
from ctxext.rope_types import GUARD
from ctxext.rotary.sites import find_places, require_as_configured

UNREACHED = (OSError, HTTPError)  # the second of a connection that fails
HUB_OPTIONS = ("repo_id", "commit_message", "create_pr", "private", "token")
OLDER_OPTIONS = ("safe_serialization", "save_function")  # of transformers 4; the first is PEFT's too
ADAPTER_FILES = (ENCODING_FILE, ADAPTER_FILE, EXTENSION_FILE)
PATCH_ANEW = (
    "One of them was changed after the extension, and no saved checkpoint could hold that. Call "
    "ctxext.unpatch(model), then ctxext.patch with the values that you want, then save."
)


def save(
    model: Any,
    directory: StrPath,
    *,
    tokenizer: Any = None,
    remote_code: bool = False,
    results: str | None = None,
    **saving: Any,
) -> None:
    """Save a model so that its extension cannot be lost.

    A whole model is written by ``save_pretrained``, and its config carries the extension. The fields that programs
    written for transformers 4 read (mlx-lm, exllamav3, TGI) are added wherever they can express the same. The directory
    of a PEFT adapter has no config of the base model: the extension is written next to the adapter, and the adapter is
    marked so that PEFT and transformers refuse it with an error that names the solution. They cannot tell whether a
    base is extended, so they also refuse an extended base: use ``ctxext.load(path, base=model)``.

    Args:
        model: a patched model, or a PEFT wrapper around one.
        directory: Folder to write into; created if it does not exist.
        tokenizer: tokenizer, or processor, to save with the model. Its ``model_max_length``, at which it truncates, is
            raised to the model's new length in the saved files; the object itself stays unchanged. Limits in files of a
            tokenizer, or of sentence-transformers, that are already in ``directory`` follow the new window too.
        remote_code: True to add a four-line module through which programs that take a path load the model like
            ``ctxext.load``, if they pass ``trust_remote_code=True`` to transformers and ctxext is installed. Other
            programs refuse the checkpoint as before.
        results: Report in Markdown on measurements of this model (``-o report.md`` of the measuring commands): it
            becomes part of the model card.
        **saving: arguments of ``save_pretrained``, such as ``max_shard_size``. ``push_to_hub=True`` uploads the
            files that were written, with ``repo_id`` (default the name of ``directory``), ``commit_message``,
            ``create_pr``, ``private`` and ``token``.

    The model card, README.md, says in a marked section how the model is extended, loaded and served. The rest of the
    card stays, here or on the hub.

    Files are moved into place when all of them are written: a full disk, or a kill, leaves no partial checkpoint.

    Raises:
        PatchStateError: if the model is not extended, or its config or its rotary modules were changed since.
        CheckpointError: if ``directory`` is a file, holds files that programs would read instead of the model or with
            it, or cannot be written, or its model card cannot be read; existing files are then unchanged. Or if the
            upload fails.
        UnknownNameError: an argument that nothing here takes, such as a misspelt ``tokenizer``.
        IncompatibleError: with ``remote_code``, a model that no ``AutoModel`` of transformers loads.
        InvalidParameterError: for a SentenceTransformer, which saves itself, for a tokenizer that pads with another
            token than the one that positions leave out, for a name that the hub does not take, for an adapter in
            another form than ``load`` reads, for ``results`` that are not text, or for ``remote_code`` with an adapter.
    """
    subject = Subject.of(model)
    inner, extension = subject.model, subject.saved
    require_own_config(inner)
    if extension is None:
        raise PatchStateError(f"This {type(inner).__name__} is not extended; save it with save_pretrained.")
    adapted = next((wrapper for wrapper in subject.chain if hasattr(wrapper, "peft_config")), None)
    _refuse_unknown(saving, inner, adapted)
    place, holder = Path(directory), subject.chain[0]
    if isinstance(holder, nn.Sequential) and not (place / "modules.json").is_file():  # of sentence-transformers
        raise InvalidParameterError(
            f"ctxext.save writes the {type(inner).__name__} of this {type(holder).__name__} alone, without its other "
            f"modules. Call save_pretrained of the {type(holder).__name__}, which keeps the extension."
        )
    _refuse_place(place, adapted, saving.get("variant"))
    if tokenizer is not None:
        require_padding(inner, text_tokenizer(tokenizer))
    hub: dict[str, Any] = {"repo_id": place.name, "token": saving.get("token")}
    hub |= {option: saving.pop(option) for option in HUB_OPTIONS if option in saving}
    is_published = saving.pop("push_to_hub", False) and saving.get("is_main_process", True)
    if is_published:
        try:
            validate_repo_id(hub["repo_id"])
        except HFValidationError as error:
            raise InvalidParameterError(f"repo_id={hub['repo_id']!r} is not a name on the hub: {error}") from error
    if results is not None and (not isinstance(results, str) or os.path.isfile(results)):
        raise InvalidParameterError(
            f"results must be the text of a report, found {shown(results)}. Give pathlib.Path(FILE).read_text()."
        )
    if adapted is inner and not saving.get("save_peft_format", True):
        raise InvalidParameterError(
            "save_peft_format=False: ctxext reads adapters by the names that PEFT gives their weights. Leave it out."
        )
    if adapted not in (None, inner) and not saving.get("safe_serialization", True):
        raise InvalidParameterError(
            "safe_serialization=False: ctxext reads adapters from safetensors alone, such as the file of an earlier "
            "save. Leave it out."
        )
    if remote_code and adapted is not None:
        raise InvalidParameterError("remote_code=True is for whole models: merge the adapter into its base first.")
    module = {"auto_map": auto_map(inner)} if remote_code else {}
    try:
        _require_unchanged(subject)  # which builds rotary modules from a config in a temporary file
        with whole_files(place, last=("config.json",) if adapted is None else ADAPTER_FILES) as half:
            if has_card := (place / MODEL_CARD).is_file():  # PEFT adds to it, too
                shutil.copyfile(place / MODEL_CARD, half / MODEL_CARD)
            hub |= {"unreached": _ask_hub(hub, None if has_card else half / MODEL_CARD)} if is_published else {}
            tags = tags_of(read_card(half / MODEL_CARD))
            if adapted is None:
                _save_whole(inner, half, module, saving)
            else:
                save_adapters(adapted, half, **saving)
            if tokenizer is not None:
                longer = copy.deepcopy(tokenizer)
                text = text_tokenizer(longer)
                state, limit, reach = patched_state(inner), text.model_max_length, extension["target_length"]
                falls = state is not None and limit == state.former  # the reach of the extension taken off
                text.model_max_length = reach if falls else max(limit, reach)
                longer.save_pretrained(half)
            lengths = extension["trained_length"], extension["target_length"]
            write_card(
                half,
                inner,
                name=hub["repo_id"] if is_published else place.name,
                base=inner.name_or_path,
                results=results,
                adapter=adapted is not None,
                trusted=remote_code,
                cuts=raise_limits(place, half, *lengths, reach_in(place)),
                tags=tags,
                destination=place,
            )
            written = [path.relative_to(half).as_posix() for path in half.rglob("*") if path.is_file()]
    except CtxextError:
        raise
    except ValueError as error:  # transformers and PEFT name the argument and its values
        raise InvalidParameterError(
            f"This {type(model).__name__} is not saved as it was asked to be: {error} What lay in {place} before is as "
            f"it was."
        ) from error
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(
            f"Could not save to {place}: {reason}. What lay there before is as it was. Make room, or take another "
            f"place."
        ) from error
    if is_published:
        _publish(place, written, hub, adapted, saving.get("variant"))


def _refuse_unknown(saving: dict[str, Any], *saved: Any) -> None:
    """Raise ``UnknownNameError`` for an argument that no ``save_pretrained`` takes: it would be passed over."""
    takers = [save, PreTrainedModel.save_pretrained, *(type(one).save_pretrained for one in saved if one is not None)]
    known = {*HUB_OPTIONS, *OLDER_OPTIONS}.union(*(inspect.signature(taker).parameters for taker in takers))
    refuse_unknown("argument of ctxext.save", saving, known - {"self", "save_directory", "saving", "kwargs"})


def _refuse_place(place: Path, adapted: Any, variant: str | None) -> None:
    """Raise ``CheckpointError`` for a place that cannot be a folder, or holds files that would be read too."""
    if place.is_symlink() and not place.exists():
        raise CheckpointError(f"{place} is a symbolic link to {place.readlink()}, where nothing is. Remove it first.")
    if place.exists() and not place.is_dir():
        raise CheckpointError(f"{place} is a file; give a directory to save into, or a new name for one.")
    # An unreadable folder has none; writing fails below.
    if other := _in_the_way({path.name for path in place.glob("*")}, adapted, variant):
        raise CheckpointError(
            f"{place} holds {other}, which programs would read instead of the saved model, or together with it. "
            f"Give another directory, or remove that file."
        )


def _in_the_way(names: set[str], adapted: Any, variant: str | None) -> str | None:
    """Return the name of a file that programs would read instead of the saved model or with it; None for none."""
    patterns = [ADAPTER_FILE, *MISTRAL_FORMAT] if adapted is None else []
    if adapted is not None and "config.json" in names and "default" in adapted.peft_config:  # others have own folders
        patterns += WHOLE_WEIGHTS
    others = [name for pattern in patterns for name in sorted(names) if fnmatch(name, pattern)]
    if variant is not None:
        others += [name for name in sorted(names) if fnmatch(name, WHOLE_WEIGHTS[0]) and f".{variant}" not in name]
    return next(iter(others), None)


def _ask_hub(hub: dict[str, Any], card: Path | None) -> Exception | None:
    """Complete the name of a repository, and copy its model card to a path; return the error of a hub that fails."""
    try:
        if "/" not in hub["repo_id"]:
            hub["repo_id"] = f"{HfApi(token=hub['token']).whoami()['name']}/{hub['repo_id']}"
        if card is not None:
            shutil.copyfile(hf_hub_download(hub["repo_id"], MODEL_CARD, token=hub["token"]), card)
    except LocalEntryNotFoundError as error:  # there may be one, which the upload would replace
        return error
    except (EntryNotFoundError, RepositoryNotFoundError):
        return None
    except UNREACHED as error:
        return error
    return None


def _publish(place: Path, files: list[str], hub: dict[str, Any], adapted: Any, variant: str | None) -> None:
    """Upload these files of a directory, and nothing else that lies there; weights that they replace go.

    Raises:
        CheckpointError: if the hub fails, or failed before, or holds files that would be read too.
    """
    try:
        if (unreached := hub.get("unreached")) is not None:
            raise unreached
        api = HfApi(token=hub["token"])
        repository = api.create_repo(hub["repo_id"], private=hub.get("private"), exist_ok=True).repo_id
        there = {name for name in api.list_repo_files(repository) if "/" not in name}
        if other := _in_the_way(there, adapted, variant):
            raise CheckpointError(
                f"{place} is saved, but was not uploaded: {repository} holds {other}, which programs would read "
                f"instead of the saved model, or together with it. Remove it there, or give another repo_id."
            )
        api.upload_folder(
            repo_id=repository,
            folder_path=place,
            allow_patterns=files,
            delete_patterns=replaced_weights(there, {*files}) or None,
            commit_message=hub.get("commit_message", "Upload model"),
            create_pr=hub.get("create_pr", False),
        )
    except UNREACHED as error:
        raise CheckpointError(f"{place} is saved, but was not uploaded to {hub['repo_id']}: {error}") from error


@own_defaults()
def _require_unchanged(subject: Subject) -> None:
    """Raise ``PatchStateError`` where the positions of an extended model no longer agree with its config."""
    for name, side in extensions_in(subject.config.ctxext).items():
        part = subject.sides[name] if name else subject
        architecture = find_architecture(part)
        if isinstance(architecture, LearnedTable | Sinusoids):
            architecture.tables(part)  # which compares the padding that their rows are counted from
        is_rotary = architecture is not None and architecture.positions == "rotary"
        if is_rotary and issubclass(saved_class(side["method"]["method"]), RopeMethod):  # others replace rotation
            require_as_configured(part, find_places(part)[0], side["trained_length"], PATCH_ANEW)


def _save_whole(model: PreTrainedModel, directory: Path, module: dict[str, Any], saving: dict[str, Any]) -> None:
    edits, config, saved = Edits(), model.config, model.config.ctxext
    try:
        put_old_form(extended_texts(config), edits)
        for name in saved.get("original", {}).keys() & set(GUARDED):
            if (value := getattr(config, name)) != GUARD:  # set since, as a dropout for training: it is kept behind it
                edits.set(config, "ctxext", saved | {"original": saved["original"] | {name: value}})
                edits.set_unchecked(config, name, GUARD)
        for name, value in module.items():
            edits.set(model.config, name, value)
            (directory / f"{REMOTE_MODULE}.py").write_text(REMOTE_CODE, encoding="utf-8")
        model.save_pretrained(directory, **saving)
    finally:
        edits.undo()


def require_padding(model: PreTrainedModel, tokenizer: Any) -> None:
    """Raise ``InvalidParameterError`` for a tokenizer that pads with another token than positions leave out."""
    subject = Subject.of(model)
    architecture = find_architecture(subject)
    if not isinstance(architecture, LearnedTable | Sinusoids):
        return
    for table in architecture.tables(subject):
        if table.skips_padding:
            refuse_tokenizer(tokenizer, field_of(subject.config, table.field)[0])
