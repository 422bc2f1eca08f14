"""Read a checkpoint directory without its weights: its config, and which of its files belong to an extended copy."""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]
from safetensors import SafetensorError, safe_open
from transformers import CONFIG_MAPPING, AutoConfig, AutoTokenizer, PreTrainedConfig
from transformers.utils import LEGACY_PROCESSOR_CHAT_TEMPLATE_FILE, cached_file

from ctxext.checkpoints.adapters import ADAPTER_FILE, commit_in_cache, is_adapter
from ctxext.checkpoints.gguf_file import GGUFFile
from ctxext.checkpoints.gguf_positions import read_positions
from ctxext.core.old_form import OLD_GUARD, lacks_old_form
from ctxext.core.saved import checked_extension
from ctxext.core.scaling import published_text
from ctxext.core.subject import path_to, text_of
from ctxext.errors import CheckpointError, CtxextError, unwritable
from ctxext.files import (
    OTHER_WEIGHTS,
    JsonObject,
    StrPath,
    files_below,
    followed,
    gguf_at,
    is_weight,
    lfs_advice,
    nearest_name,
    read_json,
    read_json_as,
    refuse_missing,
    refuse_no_config,
    refuse_no_weights,
    weights_of,
)
from ctxext.models.refusals import UNFIT, check_config, refuse_lost_fields, refuse_two_stories, running_code
from ctxext.rope_types import GUARD

LoadingOptions = dict[str, Any]
"""Arguments of ``from_pretrained``, by name."""
NamedTensors = dict[str, torch.Tensor]
"""Tensors of a file, on the meta device, by name."""
# vLLM prefers these to config.json where it finds them, and would serve the checkpoint unextended.
MISTRAL_FORMAT = ("params.json", "consolidated*.safetensors", "consolidated*.index.json")
WHOLE = "model.safetensors"  # which transformers prefers to an index
# Name that save_pretrained gives to one file of several. A variant (model.fp16-...) has an index of another name.
SHARD = re.compile(r"model-\d+-of-(\d+)\.safetensors")

# Arguments of from_pretrained that say which files of a repository, and how they are downloaded.
OF_REPOSITORY = ("revision", "subfolder")
OF_DOWNLOAD = ("cache_dir", "token", "local_files_only", "force_download")

# Module in a checkpoint through which programs that take a path load it: see ``remote.py``.
REMOTE_MODULE = "ctxext_remote"


@dataclass
class Contents:
    """The files of a checkpoint directory, sorted: weights and small files, and what an extended copy leaves out.

    ``tensors`` holds the tensors of each weight file on the meta device, without numbers; ``named`` the files that the
    model is read from, by an index; ``unexpected`` the tensors in them that the model does not have.
    """

    weights: list[Path] = field(default_factory=list)
    named: set[str] = field(default_factory=set)
    others: list[Path] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    tensors: dict[str, NamedTensors] = field(default_factory=dict)
    unexpected: set[str] = field(default_factory=set)

    @property
    def read(self) -> set[str]:
        """The names of the weight files that the model is read from."""
        return self.named | ({WHOLE} & self.tensors.keys()) or {*self.tensors}

    @property
    def stored(self) -> NamedTensors:
        """The tensors that transformers reads: of one file, if it has the name of all weights."""
        files = [WHOLE] if WHOLE in self.tensors else sorted(self.read)
        return {name: tensor for file in files for name, tensor in self.tensors[file].items()}

    @property
    def unread(self) -> list[Path]:
        """The weight files of parts that another program adds; copies of the model in another dtype are none."""
        stored = self.stored.keys()
        return [
            path for path in self.weights if path.name not in self.read and not self.tensors[path.name].keys() & stored
        ]

    @property
    def dtype(self) -> torch.dtype:
        """The narrowest dtype that rounds no weight which the model has."""
        kept = (tensor for name, tensor in self.stored.items() if name not in self.unexpected)
        floating = {tensor.dtype for tensor in kept if tensor.is_floating_point()}
        return functools.reduce(torch.promote_types, floating) if floating else torch.float32


def read_any_config(
    place: StrPath,
    *,
    trust_remote_code: bool = False,
    fields: dict[str, Any] | None = None,
    **location: Any,
) -> Any:
    """Read the config of any model, also one that ctxext saved so that stock code refuses it.

    Of a GGUF file (``gguf_file`` in ``location``) it holds the positions that the file says, which transformers by
    itself reads in part. Values in ``fields`` replace fields that the config has, as in ``from_pretrained``.

    Raises:
        CheckpointError: unreadable, unknown to transformers, damaged, in need of remote code that was not allowed, or
            with an extension that this version of ctxext does not read; or it names positions that transformers loses.
        IncompatibleError: a rope dict without its base.
        VerificationError: somebody changed one of the two forms in which an extended config says its positions.
    """
    where, path = os.fspath(place), Path(place) / location.get("subfolder", "") / "config.json"
    has_config = path.is_file() and not location.get("gguf_file")  # a GGUF file has a config inside
    raw = PreTrainedConfig._decode_special_floats(read_json(path)) if has_config else {}
    if "auto_map" in raw and raw.get("model_type") not in CONFIG_MAPPING and not trust_remote_code:
        raise CheckpointError(
            f"The config in {place} names Python code of its own (auto_map={raw['auto_map']}), which ctxext does not "
            f"run unless you say so: --trust-remote-code (trust_remote_code=True), after reading it. transformers "
            f"{transformers.__version__} has no code for its model_type, {raw.get('model_type')!r}."
        )
    fields = fields or {}
    try:
        file = opened_gguf(place, **location)
        if not raw and file is None:
            raw, _ = PreTrainedConfig.get_config_dict(place, **location)
        guarded = [name for name, value in raw.items() if value == GUARD]
        if guarded:
            original = checked_extension(raw.get("ctxext"), where)["original"]
            raw = raw | {name: original[name] for name in guarded}
            config = CONFIG_MAPPING[raw["model_type"]].from_dict(raw, **fields)
        else:
            with running_code(f"the config of {place}"), file.read_by_transformers() if file else nullcontext():
                config = AutoConfig.from_pretrained(place, trust_remote_code=trust_remote_code, **location, **fields)
        if not isinstance(text := text_of(config), PreTrainedConfig):
            raise TypeError(f"a {config.model_type} has no text_config or decoder; remove it, or mend model_type.")
        if file is not None:
            read_positions(text, file)
    except CtxextError:
        raise
    except (*UNFIT, HTTPError) as error:  # the last of a connection that fails
        named = Path(place, location.get("gguf_file") or "") if Path(place).exists() else place
        raise CheckpointError(_misplaced(place, raw, error) or _unreadable(named, error)) from error
    if REMOTE_MODULE in str(getattr(config, "auto_map", "")):  # ctxext itself loads without this code
        del config.auto_map
    if getattr(config, "_commit_hash", None) is None:  # which transformers before 5.24 or so keeps itself
        name = PurePosixPath(location.get("subfolder") or "", location.get("gguf_file") or "config.json").as_posix()
        commit = commit_in_cache(where, name, cache_dir=location.get("cache_dir"))
        config._commit_hash = location.get("revision") or commit
    if has_config and location.get("subfolder"):  # transformers keeps the folder above, where another config may lie
        config._name_or_path = str(path.parent)
    _lift_extension(config, where)
    check_config(config, where)
    if "ctxext" in raw:
        refuse_two_stories(config, raw, where)
    elif not location.get("gguf_file"):
        refuse_lost_fields(config, where, raw | fields)
    return config


def _parts_of(config: Any) -> Iterator[Any]:
    """Yield the configs of the parts of a model, at any depth."""
    for value in list(vars(config).values()):
        if isinstance(value, PreTrainedConfig):
            yield value
            yield from _parts_of(value)


def _lift_extension(config: Any, place: str) -> None:
    """Take the extension of a text part that was extended alone, and saved in its model, for the model's.

    Raises:
        CheckpointError: another part was extended in a way that only ctxext computes.
    """
    for part in _parts_of(config) if getattr(config, "ctxext", None) is None else ():
        if (saved := getattr(part, "ctxext", None)) is None:
            continue
        saved = checked_extension(saved, place)
        is_text = part is text_of(config) and not config.is_encoder_decoder
        if is_text and "rope_parameters" in saved.get("original", {}):  # longer tables have longer names in the whole
            config.ctxext = vars(part).pop("ctxext")
        elif not saved.get("stock"):
            raise CheckpointError(
                f"The extension in {place} belongs to its {'.'.join(path_to(config, part))}, which was extended alone. "
                f"Extend the whole model, ctxext.patch(model), and save that."
            )


def quantised_beside(place: StrPath, config: Any) -> JsonObject | None:
    """Return the entry on quantised weights in another file (GPTQ, AWQ, ModelOpt); None if config.json has one.

    transformers reads none of these files; programs that serve quantised weights do.
    """
    if getattr(config, "quantization_config", None) or getattr(config, "compression_config", None):
        return None
    for path in sorted(Path(place).glob("*quant*config*.json")):
        said = read_json(path)
        section = said["quantization"] if isinstance(said.get("quantization"), dict) else said
        if any(value and re.search(r"bits?$|^quant_(algo|method|type)$", name) for name, value in section.items()):
            return {"quant_method": path.name} | section
    return None


def read_tokenizer(place: StrPath, **location: Any) -> Any:
    """Read the tokenizer of a checkpoint; ``location`` as in ``read_any_config``, and its ``config`` if that is read.

    Raises:
        CheckpointError: there is none that can be read.
    """
    is_alone = os.path.isdir(place) and not Path(place, "config.json").is_file()
    if not is_alone and not location.keys() & {"config", "gguf_file"}:  # transformers may refuse the config by itself
        location["config"] = read_any_config(place, **location)
    try:
        tokenizer = AutoTokenizer.from_pretrained(os.fspath(place), **location)
        if getattr(tokenizer, "chat_template", "") is None and "gguf_file" not in location:
            tokenizer.chat_template = _template_of_processor(place, location)
        return tokenizer
    except BaseException as error:
        # tokenizers knows no class but Exception, by which it also refuses the files of newer versions.
        if type(error) is not Exception and not isinstance(error, (*UNFIT, HTTPError)):
            raise
        raise CheckpointError(f"{place} has no tokenizer that can be read: {error}{unwritable(error)}") from error


def _template_of_processor(place: StrPath, location: LoadingOptions) -> str | None:
    """Read the chat template that older checkpoints hold for their processor alone; None without one."""
    config = location.get("config")
    if not os.path.isdir(place) and (config is None or text_of(config) is config):
        return None  # others have no processor, and the hub is not asked
    where = {key: location[key] for key in (*OF_REPOSITORY, *OF_DOWNLOAD) if location.get(key) is not None}
    where |= dict.fromkeys(("_raise_exceptions_for_missing_entries", "_raise_exceptions_for_connection_errors"), False)
    path = cached_file(os.fspath(place), LEGACY_PROCESSOR_CHAT_TEMPLATE_FILE, **where)
    template = None if path is None else read_json(Path(path)).get("chat_template")
    return template if isinstance(template, str) else None


def opened_gguf(place: StrPath, gguf_file: str | None = None, **location: Any) -> GGUFFile | None:
    """Open the GGUF file that a location names; None where it names none."""
    return None if gguf_file is None else GGUFFile(Path(cached_file(place, gguf_file, **location)))


def keeps_old_readers_out(place: StrPath, config: Any, **location: Any) -> bool:
    """Return whether readers of the fields of transformers 4 find a guard in the file of a config, or not its base."""
    raw, _ = ({}, None) if location.get("gguf_file") else PreTrainedConfig.get_config_dict(place, **location)
    parts = [raw, *(part for part in raw.values() if isinstance(part, dict))]
    is_guarded = any(value == OLD_GUARD for part in parts for value in part.values())
    return is_guarded or lacks_old_form(text_of(config), published_text(config, raw))


def _misplaced(place: StrPath, raw: JsonObject, error: BaseException) -> str | None:
    """Explain a rope block next to the text part, where transformers fails for want of a length; None otherwise."""
    blocks = [name for name in ("rope_scaling", "rope_parameters") if isinstance(raw.get(name), dict)]
    parts = [name for name in ("text_config", "llm_config", "language_config") if isinstance(raw.get(name), dict)]
    if not (blocks and parts and isinstance(error, AttributeError)):
        return None
    return (
        f"transformers cannot read the config of {place}: its {blocks[0]} stands beside {parts[0]}, whose model would "
        f"not read it there. Move {blocks[0]} into {parts[0]}. ({error})"
    )


def _unreadable(place: StrPath, error: Exception) -> str:
    """Explain why a config could not be read; a name may be the misspelt name of a directory."""
    if Path(place).exists():
        return (
            f"transformers cannot read the config of {place}: {str(error) or type(error).__name__}{unwritable(error)}"
        )
    return f"There is no directory {place}.{nearest_name(Path(place))} The hub did not give it either: {error}"


def checked_path(path: StrPath, loading: LoadingOptions) -> str:
    """Refuse a local path that holds no checkpoint; a name on the hub passes.

    Raises:
        CheckpointError: nothing at the path, a file, or a directory without config.json.
    """
    place = os.fspath(path)
    local = Path(place)
    refuse_missing(place)
    if not local.exists():
        return place
    if not local.is_dir():
        raise CheckpointError(f"{place} is a file; give the directory that holds config.json and the weights.")
    if not is_adapter(place) and not loading.get("gguf_file"):
        refuse_no_config(local / loading.get("subfolder", ""))
    return place


def gguf_inside(path: StrPath, loading: LoadingOptions) -> tuple[str, LoadingOptions]:
    """Name a GGUF file as transformers does, to be unpacked, and an adapter in a subfolder by its path.

    Any other path stays as it is.

    Values that ``loading``, the arguments of ``from_pretrained``, already has are kept.
    """
    loading = {name: value for name, value in loading.items() if name != "subfolder" or value is not None}
    if "subfolder" in loading and is_adapter(inside := Path(path, loading["subfolder"])):  # its base lies elsewhere
        return str(inside), {name: value for name, value in loading.items() if name != "subfolder"}
    file = gguf_at(path)
    named: LoadingOptions = {} if file is None else {"gguf_file": file.name}
    if not (named | loading).get("gguf_file"):
        return os.fspath(path), loading
    if hasattr(transformers, "GgufConfig"):  # since 5.17, before which transformers unpacked every file
        named["quantization_config"] = transformers.GgufConfig(dequantize=True)
    return os.fspath(path if file is None else file.parent), named | loading


def config_place(path: StrPath) -> tuple[str, LoadingOptions]:
    """Return the directory of a checkpoint's config, and the name of the GGUF file that holds it, if one does."""
    place, inside = gguf_inside(path, {})
    inside.pop("quantization_config", None)  # which is about weights
    return place, inside


def fetched(source: Path) -> Path:
    """Return the directory or file of a checkpoint; one of the hub is downloaded into its cache.

    Raises:
        CheckpointError: neither this machine nor the hub has a checkpoint of this name.
    """
    refuse_missing(str(source))
    if source.exists():
        return source
    unread = [*MISTRAL_FORMAT, *(f"*{suffix}" for suffix in OTHER_WEIGHTS)]  # and left out of a copy
    try:
        return Path(snapshot_download(source.as_posix(), ignore_patterns=unread))
    except (OSError, ValueError, HTTPError) as error:
        raise CheckpointError(_unreadable(source, error)) from error


def adapter_on_hub(path: StrPath, loading: LoadingOptions) -> tuple[StrPath, LoadingOptions]:
    """Download an adapter that only the hub has, and return its folder, with the arguments that say nothing of it.

    Any other path stays as it is, and so do the arguments of ``from_pretrained``.

    Raises:
        CheckpointError: the hub cannot be asked, or the adapter cannot be downloaded.
    """
    name = os.fspath(path)
    refuse_missing(name)
    if os.path.exists(name) or loading.get("gguf_file"):
        return path, loading
    where = {key: loading[key] for key in (*OF_REPOSITORY, *OF_DOWNLOAD) if loading.get(key) is not None}
    missing = {"_raise_exceptions_for_missing_entries": False}
    here = {**where, **missing, "local_files_only": True, "_raise_exceptions_for_connection_errors": False}
    here["force_download"] = False
    try:
        if cached_file(name, "config.json", **here):
            return path, loading
        if not cached_file(name, ADAPTER_FILE, **here):
            try:
                cached_file(name, "config.json", **where)
                return path, loading
            except OSError as error:  # transformers names a cause, unless the repository lacks the file
                if error.__cause__ is not None or not cached_file(name, ADAPTER_FILE, **where, **missing):
                    raise
    except (OSError, HTTPError) as error:
        raise CheckpointError(_unreadable(path, error)) from error
    inside = where.pop("subfolder", "")
    wanted = [f"{inside}/{files}".removeprefix("/") for files in ("adapter_*", "ctxext_*", "tokenizer*", "*.jinja")]
    try:
        folder = snapshot_download(name, allow_patterns=wanted, **where)
    except (OSError, ValueError, HTTPError) as error:
        raise CheckpointError(_unreadable(path, error)) from error
    return Path(folder, inside), {key: value for key, value in loading.items() if key not in OF_REPOSITORY}


def refuse_source(source: Path) -> None:
    """Refuse a path that is not the directory of a whole model.

    Raises:
        CheckpointError: with what was found instead and what to do.
    """
    checked_path(source, {})
    if is_adapter(source):
        raise CheckpointError(
            f"{source} holds an adapter and not a whole model. From Python, ctxext.load({str(source)!r}, method=..., "
            f"factor=...) extends it with its base; one that ctxext saved extended needs no method there."
        )


def checked_contents(source: Path, *, copied: bool) -> Contents:
    """Sort the files of a checkpoint directory, and make sure that its safetensors weights are all there.

    Args:
        copied: True to sort folders too, and to refuse links that lead out of the directory.

    Raises:
        CheckpointError: no safetensors weights, a missing shard, a file that is not what its name says, or such a link.
    """
    contents = Contents()
    for path in sorted(source.iterdir()):
        if not path.is_dir():
            _sort(path, contents)
        elif copied:
            is_part = path.name in _parts_of_sentence_transformers(source)
            if path.name.startswith(".") or (not is_part and _is_foreign(followed(path, source))):
                contents.left_out.append(path.name + "/")
            else:
                contents.others += files_below(path, source)
    for path in (source / "config.json", *contents.weights, *contents.others) if copied else ():
        followed(path, source)
    _check_weights(source, contents)
    return contents


def _sort(path: Path, contents: Contents) -> None:
    if path.name == "config.json":
        return
    if path.name.startswith(".") or _is_other(path):
        contents.left_out.append(path.name)
    elif is_weight(path):
        contents.weights.append(path)
    else:
        contents.others.append(path)


def _is_foreign(directory: Path) -> bool:
    """Return whether a directory is another checkpoint or holds weights; links in it are not followed."""
    names = (Path(name) for _, _, files in os.walk(directory) for name in files)
    return any(name.name == "config.json" or _is_other(name) or is_weight(name) for name in names)


def _parts_of_sentence_transformers(source: Path) -> set[str]:
    """Return the directories that ``modules.json`` names: the stages after the model in an embedding pipeline."""
    path = source / "modules.json"
    if not path.is_file():
        return set()
    modules = read_json_as(path, list, "a list of modules")
    return {str(module["path"]) for module in modules if isinstance(module, dict) and module.get("path")}


def _is_other(path: Path) -> bool:
    return Path(weights_of(path.name)).suffix in OTHER_WEIGHTS or any(path.match(pattern) for pattern in MISTRAL_FORMAT)


def _check_weights(source: Path, contents: Contents) -> None:
    refuse_no_weights(source)
    contents.tensors = tensors = {path.name: _tensors(path) for path in contents.weights}
    indices = [index for index in source.glob("*.safetensors.index.json") if not _is_other(index)]
    contents.named = named = {file for index in indices for file in _check_index(source, index, tensors)}
    unnamed = sorted(name for name in tensors.keys() - named if SHARD.fullmatch(name))
    if unnamed:  # nothing but an index tells how many files there are, and their content
        other_names = ", ".join(index.name for index in indices) or "no *.safetensors.index.json"
        raise CheckpointError(
            f"{source} is incomplete, or two checkpoints in one: {unnamed[0]} is one of several files, and no index "
            f"names it (found: {other_names}). Download what is missing, or remove what is left over."
        )


def _check_index(source: Path, index: Path, tensors: dict[str, NamedTensors]) -> set[str]:
    """Return the files that an index names, having checked that each is there with the tensors that it should hold."""
    weight_map = read_json(index).get("weight_map", {})
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(
            f"{index} should map each tensor to its file under weight_map; found {json.dumps(weight_map)[:40]}. "
            f"Download it again."
        )
    named = set(weight_map.values())
    missing = sorted(named - tensors.keys())
    if missing:
        raise CheckpointError(f"{source} is incomplete: {index.name} names {', '.join(missing)}, not there.")
    shards = sorted(name for name in named if SHARD.fullmatch(name))
    counts = {int(match[1]) for match in map(SHARD.fullmatch, shards) if match}
    if shards and counts != {len(shards)}:
        raise CheckpointError(
            f"{source} is incomplete: {index.name} names {len(shards)} of the {max(counts)} files that "
            f"{shards[0]} is one of. Download the index again, and what it names."
        )
    absent = [name for name, file in weight_map.items() if name not in tensors[file]]
    if absent:
        raise CheckpointError(
            f"{source} is incomplete: {index.name} says that {weight_map[absent[0]]} holds {absent[0]}, which it does "
            f"not ({len(absent)} such tensors). Download both again."
        )
    files = dict[str, str]()
    # An unnamed model.safetensors counts too: transformers would read it instead of the files of the index.
    for file in sorted({*named, WHOLE} & tensors.keys()):
        for name in tensors[file]:
            if name in files:
                raise CheckpointError(
                    f"{source} is damaged, or two checkpoints in one: both {files[name]} and {file} hold {name}. "
                    f"Keep one checkpoint, or download the files that {index.name} names into an empty directory."
                )
            files[name] = file
    return named


def _tensors(path: Path) -> NamedTensors:
    """Return the tensors of a safetensors file on the meta device; whole numbers are int64, rare others float32.

    Opening the file checks its size and reads no weights.
    """
    kinds = {"F64": torch.float64, "F16": torch.float16, "BF16": torch.bfloat16}
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - the file is not a dict
            return {
                name: torch.empty(
                    part.get_shape(),
                    dtype=kinds.get(kind := part.get_dtype(), torch.float32 if "F" in kind else torch.int64),
                    device="meta",
                )
                for name, part in slices.items()
            }
    except (OSError, SafetensorError) as error:
        advice = lfs_advice(path) or " It may be an unfinished download."
        raise CheckpointError(f"{path} is not a whole safetensors file: {error}.{advice}") from error
