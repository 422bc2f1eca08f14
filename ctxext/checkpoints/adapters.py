"""Write and read PEFT adapters: their directory has no config of the base, so the extension is a file next to them."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import hashlib
import inspect
import json
import os
import tempfile
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from ctxext.checkpoints.encodings import encoding_weights
from ctxext.core.edits import Edits
from ctxext.core.saved import checked_extension
from ctxext.core.scaling import published_json, published_text
from ctxext.core.steps import Moment, Step, register
from ctxext.core.subject import EXTENDED_IN_MEMORY, Subject, text_of, unwrapped
from ctxext.errors import CheckpointError, IncompatibleError, require_package
from ctxext.files import JsonObject, StrPath, gguf_at, hidden_beside, read_json, write_whole
from ctxext.methods.encoding import ENCODING
from ctxext.rope_types import GUARD as CONFIG_GUARD

ADAPTER_FILE = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
EXTENSION_FILE = "ctxext_config.json"
# As transformers saves a whole model; FSDP's own file of a training run is called pytorch_model_fsdp.bin.
WHOLE_WEIGHTS = ("model*.safetensors", "pytorch_model.bin", "pytorch_model-*.bin")
ENCODING_FILE = "ctxext_encoding.safetensors"

# PEFT has no field for requirements on the base model. But it refuses an unknown type of adapter, and quotes the type:
# so this sentence replaces the type. It also replaces LoRA's initialisation, for programs that read no type.
GUARD = "this adapter needs its base model extended by ctxext"
SENTENCE = (
    f"{GUARD}: load it with ctxext.load(path), or onto a model that is extended already with ctxext.load(path, "
    f"base=model); PEFT by itself cannot tell whether a model is, and refuses both"
)
GUARDED_FIELDS = ("peft_type", "init_lora_weights")
HOOK = "ctxext_adapters"
CONVERSION = "supports_lora_conversion"  # what PEFT asks every layer of an adapter that it converts


def is_adapter(directory: StrPath) -> bool:
    """Return whether a local directory holds a PEFT adapter and not a whole model.

    axolotl also writes the config of the base model there, which does not make it a whole model.

    Raises:
        CheckpointError: if it holds both: transformers would add the adapter to the model, and one that is merged
            already would count twice.
    """
    place = Path(directory)
    if not (place / ADAPTER_FILE).is_file():
        return False
    whole = sorted(path.name for pattern in WHOLE_WEIGHTS for path in place.glob(pattern))
    if whole and (place / "config.json").is_file():
        raise CheckpointError(
            f"{place} holds the weights of a whole model ({whole[0]}) and an adapter ({ADAPTER_FILE}), which "
            f"transformers adds to them. Is it merged already? Then move {ADAPTER_FILE} and {ADAPTER_WEIGHTS} away. "
            f"Otherwise keep the adapter in a directory of its own."
        )
    return True


def base_of(directory: StrPath) -> str:
    """Return the base checkpoint that an adapter names.

    Raises:
        CheckpointError: if it names none.
    """
    path = Path(directory) / ADAPTER_FILE
    base = read_json(path).get("base_model_name_or_path")
    if not base or not isinstance(base, str):
        raise CheckpointError(
            f"{directory} does not say what its base checkpoint is; pass base=... to ctxext.load, or write it into "
            f"{ADAPTER_FILE} (base_model_name_or_path)."
        )
    return base


@contextlib.contextmanager
def finding_base(directory: StrPath, base: str) -> Iterator[None]:
    """Say of a base checkpoint that is not there which adapter needs it, and where it was looked for.

    Raises:
        CheckpointError: the one of the block, with both.
    """
    try:
        yield
    except CheckpointError as error:
        if (Path(base) / "config.json").is_file() or gguf_at(base) is not None:
            raise
        where = ""
        if not os.path.isabs(base) and not os.path.exists(base):
            where = f" As a path, {base} begins at {Path.cwd()}."
            around = (folder / base for folder in Path(directory).resolve().parents)
            near = next((place for place in around if place.exists()), None)
            where += "" if near is None else f" One lies at {near}."
        raise CheckpointError(
            f"The adapter in {directory} needs its base checkpoint: {error}{where} Where it lies elsewhere now, pass "
            f"base=... to ctxext.load, or write it into {ADAPTER_FILE} (base_model_name_or_path)."
        ) from error


def commit_in_cache(
    name: str, file: str = "config.json", *, cache_dir: str | Path | None = None, alone: bool = False
) -> str | None:
    """Return the commit of a model on the hub to which the main branch in the cache leads; None for any other model.

    With ``alone``, None also where the cache has other commits, which it may have been loaded from as well.
    """
    try:
        cached = None if os.path.exists(name) else try_to_load_from_cache(name, file, cache_dir=cache_dir)
    except HFValidationError:  # the name is a path, or empty
        return None
    above = Path(cached).parents if isinstance(cached, str) else ()
    commit = next((folder for folder in above if folder.parent.name == "snapshots"), None)
    if commit is None or (alone and len([*commit.parent.iterdir()]) > 1):
        return None
    return commit.name


@dataclass(frozen=True)
class SavedAdapter:
    """An adapter in a directory, with the extension and the weights that were saved with it.

    Args:
        extension: the extension of its model; empty for none.
        config: its PEFT config, as it was before it was marked.
        encoding: weights of the model's encoding that the adapter's own file lacks, by name.
        trained: names of the weights in ``encoding`` that were trained with the adapter.
    """

    directory: Path
    extension: JsonObject
    config: Any
    encoding: dict[str, Tensor] = field(default_factory=dict)
    trained: tuple[str, ...] = ()


@dataclass(eq=False)
class ExtendedAdapter:
    """Replacement of ``save_pretrained`` of an adapter's PEFT config, which writes the extension next to the config.

    Every way of saving an adapter calls this method: PEFT's, transformers' own, the Trainer's and TRL's.

    Args:
        base: its base model, which may be extended or plain at the time of saving.
        lent: another config, whose original method is restored when this config is saved.
        once: True if this config's original method is restored after the first call.
        source: Weak reference to the base model of the config that this one was copied from; None for no copy.
    """

    adapter: Any
    name: str
    base: Any
    lent: Any = None
    once: bool = False
    source: Any = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave the model out: until a model is found to hold the copy, it saves as PEFT does."""
        return vars(self) | {"base": None, "lent": None, "source": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> ExtendedAdapter:
        """Copy it with a weak reference to the model: PEFT saves a copy of a config that it converts (PiSSA)."""
        source = None if self.base is None else weakref.ref(self.base)
        return ExtendedAdapter(copy.deepcopy(self.adapter, memo), self.name, None, source=source)

    def __call__(self, save_directory: StrPath, **kwargs: Any) -> None:
        """Save the config, with the arguments of PEFT's method."""
        for config in (self.adapter if self.once else None, self.lent):
            if config is not None:
                vars(config).pop("save_pretrained", None)
        base = self.base
        # PeftModel.save_pretrained alone passes this argument.
        if self.source is not None and "auto_mapping_dict" in kwargs and not self._is_in_use():
            base = self.source()
        extension = None if base is None else getattr(base.config, "ctxext", None)
        if extension is None:
            type(self.adapter).save_pretrained(self.adapter, os.fspath(save_directory), **kwargs)
        else:
            _name_base(Path(save_directory), base)
            path = self.adapter.base_model_name_or_path
            self.adapter.base_model_name_or_path = path or base.name_or_path
            encoding = _encoding_beside(base, self.name)
            # transformers does not keep the commit that a model was loaded from.
            revision = getattr(base.config, "_commit_hash", None) or commit_in_cache(base.name_or_path, alone=True)
            _save_marked(self.adapter, Path(save_directory), extension, encoding, revision, **kwargs)
            self.adapter.base_model_name_or_path = None if _is_unreadable(base) else path

    def _is_in_use(self) -> bool:
        """Return whether a model has this config: it then lies in a dictionary of configs by name."""
        return any(type(holder) is dict and holder is not vars(self) for holder in gc.get_referrers(self.adapter))


@dataclass(eq=False)
class RefuseConversion:
    """Replacement of ``supports_lora_conversion`` of one PEFT layer, which PEFT calls before it converts an adapter.

    PEFT makes a new config for the LoRA that comes of it, and saves it by none of the ways that save an extension.

    Args:
        base: The base model, which may be extended or plain at the time of a call.
    """

    layer: Any
    base: Any

    def __deepcopy__(self, memo: dict[int, Any]) -> RefuseConversion:
        """Copy it for a copy of the layer, which may be a copy of the layer alone."""
        return RefuseConversion(*(memo.get(id(part), part) for part in (self.layer, self.base)))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return PEFT's answer where the base model is plain.

        Raises:
            IncompatibleError: if it is extended.
        """
        if getattr(self.base.config, "ctxext", None) is not None:
            raise IncompatibleError(
                "PEFT would save the LoRA that it converts this adapter to without the extension of the base. Call "
                "ctxext.unpatch(model), convert, and load the result by ctxext.load(path, method=..., factor=...)."
            )
        return type(self.layer).supports_lora_conversion(self.layer, *args, **kwargs)


def _name_base(directory: Path, base: Any) -> None:
    """Name the base model in the model card that PEFT has written, where its config has a sentence now."""
    for place in (directory, directory.parent):  # the card of an adapter with a name is in the folder above
        path = place / "README.md"
        # The README of the folder above may belong to a whole project.
        if path.is_file() and EXTENDED_IN_MEMORY.partition(":")[0].encode() in path.read_bytes():
            card = ModelCard.load(path)
            if card.data.get("base_model") == EXTENDED_IN_MEMORY:
                card.data["base_model"] = base.name_or_path
                card.save(path)


def keep_extension(subject: Subject, edits: Edits) -> None:
    """Save every adapter of a model, those to come included, with its extension from now on.

    Adapters that put layers into the base model are found on it, whoever adds and saves them. Adapters that only put
    virtual tokens before the text leave no trace there: they are found where their PEFT model is among the wrappers.
    """
    base = subject.model
    for module in (*subject.wrappers, base):
        if isinstance(getattr(type(module), "peft_config", None), property):
            edits.set(module, "save_pretrained", functools.partial(save_adapters, module))
        if "base_model_prepare_inputs_for_generation" in vars(module):  # PEFT took it before the base was extended
            edits.set(module, "base_model_prepare_inputs_for_generation", base.prepare_inputs_for_generation)
        _adopt(getattr(module, "peft_config", None), base, edits)
    if vars(base).get("_ctxext") is not None:
        edits.set(base._forward_pre_hooks, HOOK, _before_forward)
        edits.set(base._forward_pre_hooks_with_kwargs, HOOK, True)
        edits.set(base._state_dict_pre_hooks, HOOK, _before_state_dict)


def _before_forward(base: PreTrainedModel, args: Any, kwargs: dict[str, Any]) -> Any:
    """Adopt adapters before an engine gathers and saves their weights without asking for a state_dict (ZeRO-3).

    And give ``generate`` one cache. Since transformers 5.24 calls it ``cache``, PEFT 0.21 finds none under its older
    name: it puts a learned prompt before each new token, and a learned prefix into a cache that is passed over.
    """
    if not torch.compiler.is_compiling():
        _adopt(vars(base).get("peft_config"), base, base._ctxext.edits)
        if base.training:
            _refuse_adapter_around(base)
    cache, prefix, embeddings = (kwargs.get(name) for name in ("cache", "past_key_values", "inputs_embeds"))
    caller = getattr(vars(base).get("prepare_inputs_for_generation"), "__self__", None)
    config: Any = getattr(caller, "active_peft_config", None)
    if cache is None or not getattr(config, "is_prompt_learning", False):
        return None
    continues = kwargs.get("use_cache") is not False and int(cache.get_seq_length()) > 0
    if prefix is not None:
        del kwargs["past_key_values"]
        kwargs["cache"] = cache if continues else prefix
    elif embeddings is not None and continues:
        kwargs["inputs_embeds"] = embeddings[:, config.num_virtual_tokens :]
    return args, kwargs


def _before_state_dict(base: PreTrainedModel, _: str, __: bool) -> None:
    """Adopt adapters that are saved before any forward pass."""
    _refuse_adapter_around(base)
    _adopt(vars(base).get("peft_config"), base, base._ctxext.edits, saving=True)


def _refuse_adapter_around(base: PreTrainedModel) -> None:
    """Raise ``IncompatibleError`` if a model that contains this one has put adapters into it."""
    has_layers = False
    for module in base.modules():
        if "peft_config" in vars(module):
            return
        has_layers |= hasattr(module, "adapter_layer_names")
    if has_layers:
        raise IncompatibleError(
            f"This {type(base).__name__} was extended alone, so an adapter of the model around it would be saved "
            f"without the extension. Call ctxext.unpatch on this part, and ctxext.patch on the whole model."
        )


def _adopt(adapters: Any, base: Any, edits: Edits, *, saving: bool = False) -> None:
    """Give a model separate copies of its adapters' PEFT configs, which save the extension.

    One PEFT config may serve several models, plain ones too, so the model's copy is a new object.

    The PEFT record of configs, by name, is ``adapters``; nothing is done for anything else. With ``saving``, PEFT may
    have taken an old config out of the record to save it next: that one carries the extension too, once.
    """
    for name, adapter in list(adapters.items()) if isinstance(adapters, dict) else ():
        if adapter.peft_type == "SHADOW":
            raise IncompatibleError(f"Adapter {name!r} (SHADOW) runs a decoder that ctxext does not extend. Take LoRA.")
        save = vars(adapter).get("save_pretrained")
        if isinstance(save, ExtendedAdapter) and save.base is base and not save.once:
            continue
        own = copy.copy(adapter)
        own.save_pretrained = ExtendedAdapter(own, name, base, lent=adapter if saving else None)
        if saving:
            adapter.save_pretrained = ExtendedAdapter(adapter, name, base, once=True)
        if _is_unreadable(base):
            for config in (own, adapter) if saving else (own,):
                config.base_model_name_or_path = None
        edits.set(adapters, name, own)
        layer = next((part for part in base.modules() if hasattr(part, CONVERSION)), None)
        if layer is not None and CONVERSION not in vars(layer):
            edits.set(layer, CONVERSION, RefuseConversion(layer, base))


def _is_unreadable(base: Any) -> bool:
    """Return whether the class of a base's config refuses its config.json, which PEFT reads if it has the path.

    It compares the size of the vocabulary, and so gets no path where that is unchanged.
    """
    published = published_json(base.config)
    sizes = published_text(base.config, published).get("vocab_size"), getattr(text_of(base.config), "vocab_size", None)
    return CONFIG_GUARD in published.values() and sizes[0] == sizes[1]


def save_adapters(model: Any, save_directory: StrPath, *args: Any, **kwargs: Any) -> None:
    """Save the adapters of a model as its class does, and put the extension of their base next to each.

    A PEFT model with an extended base calls this as its ``save_pretrained``. The arguments have the same names.
    """
    directory = Path(save_directory)
    given = inspect.signature(type(model).save_pretrained).bind(model, str(directory), *args, **kwargs).arguments
    names = given.get("selected_adapters") or model.peft_config
    places = [directory if name == "default" else directory / name for name in names]
    if isinstance(model, PreTrainedModel):  # transformers' own adapters: the active one, not in a folder of its name
        places = [directory]
    if given.get("is_main_process", True):
        for place in places:  # an extension of an earlier adapter must not be taken for this one's
            (place / EXTENSION_FILE).unlink(missing_ok=True)
    edits = Edits()
    _adopt(model.peft_config, unwrapped(model)[-1], edits)
    try:
        type(model).save_pretrained(model, str(directory), *args, **kwargs)
    finally:
        edits.undo()


def encoding_digest(subject: Subject) -> str | None:
    """Digest the weights of encodings that are saved next to a model's adapters; None where there are none."""
    adapters = {name for holder in subject.chain for name in getattr(holder, "peft_config", None) or ()}
    weights: dict[str, Tensor] = {}
    for name in adapters:
        weights |= _encoding_beside(subject.model, name)
    digest = hashlib.sha256()
    for name in sorted(weights):
        whole = weights[name].detach().cpu().contiguous()
        digest.update(name.encode() + whole.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest() if weights else None


def _encoding_beside(base: Any, adapter: str) -> dict[str, Tensor]:
    """Return the weights of encodings to save next to an adapter, which has no copies of them.

    Raises:
        IncompatibleError: if this process does not hold them whole.
    """
    weights = encoding_weights(base, adapter)
    for name, weight in weights.items():
        # DeepSpeed's ZeRO-3 and FSDP2 share weights out over processes; accelerate may have put them on a disk.
        if weight.is_meta or hasattr(weight, "ds_id") or hasattr(weight, "full_tensor"):
            raise IncompatibleError(
                f"This process does not hold {name} whole, which must be saved with adapter {adapter!r}. Let the "
                f"adapter hold it: LoraConfig(modules_to_save=['{ENCODING}'], ...)."
            )
    return weights


def _save_marked(
    adapter: Any, directory: Path, extension: JsonObject, encoding: dict[str, Tensor], revision: Any, **kwargs: Any
) -> None:
    """Write an adapter's PEFT config so that loading it without ctxext fails clearly, and the extension next to it.

    It names the ``revision`` of a base from the hub: the same extension on other weights would be another model.
    """
    with tempfile.TemporaryDirectory() as plain:
        type(adapter).save_pretrained(adapter, plain, **kwargs)
        values = json.loads((Path(plain) / ADAPTER_FILE).read_text(encoding="utf-8"))
    values["revision"] = values.get("revision") or revision
    guarded = {name: values[name] for name in GUARDED_FIELDS if name in values}
    saved: JsonObject = {"extension": extension, "guarded": guarded}
    if encoding:
        saved["encoding"] = {"trained": [name for name, weight in encoding.items() if weight.requires_grad]}
    directory.mkdir(parents=True, exist_ok=True)
    # An interruption from here on leaves a directory that is refused, with ctxext and without.
    (directory / EXTENSION_FILE).unlink(missing_ok=True)
    write_whole(
        directory / ADAPTER_FILE, json.dumps(values | dict.fromkeys(guarded, SENTENCE), indent=2, sort_keys=True)
    )
    (directory / ENCODING_FILE).unlink(missing_ok=True)
    if encoding:
        partial = hidden_beside(directory / ENCODING_FILE, "partial")
        whole = {name: weight.detach().cpu().contiguous() for name, weight in encoding.items()}
        save_file(whole, partial, metadata={"format": "pt"})
        partial.replace(directory / ENCODING_FILE)
    write_whole(directory / EXTENSION_FILE, json.dumps(saved, indent=2, sort_keys=True))


def read_beside(path: Path) -> JsonObject:
    """Read the file that ctxext writes next to an adapter.

    Raises:
        CheckpointError: if it holds anything else.
    """
    saved = read_json(path)
    if not all(isinstance(saved.get(name), dict) for name in ("extension", "guarded")):
        raise CheckpointError(
            f"{path} does not hold what ctxext writes beside an adapter: it was changed or damaged. Save the adapter "
            f"again with ctxext.save."
        )
    return saved


def read_extension(directory: Path, *, plain: bool = False, base: Any = None) -> SavedAdapter:
    """Read the extension from the file next to an adapter's weights, or else from its base.

    With ``plain``, an adapter of a plain model is accepted too. ``base`` is where the base lies now, if not where the
    adapter says.

    Raises:
        CheckpointError: if the adapter was saved without its extension, not in safetensors, or a file is missing.
    """
    require_package("peft", "train", f"{directory} is an adapter; reading it takes", CheckpointError)
    path = directory / EXTENSION_FILE
    adapter, is_extended = read_json(directory / ADAPTER_FILE), path.is_file()
    # The rest of the sentence may differ between versions.
    guarded = {field for field in GUARDED_FIELDS if str(adapter.get(field)).startswith(GUARD)}
    if not is_extended and guarded:
        raise CheckpointError(
            f"{directory} is an adapter of an extended model without its {EXTENSION_FILE}: saving was interrupted, or "
            f"that file was not copied along. Copy it too, or save the adapter again with ctxext.save."
        )
    named = adapter.get("base_model_name_or_path")  # on which it was trained, while that lies there
    carried = None if is_extended else _carried_by_base(named) or _carried_by_base(base)
    if not (is_extended or carried or plain):
        away = base is None and isinstance(named, str) and not os.path.exists(named)
        perhaps = f" Where its base {named} carries one, pass the folder of that: base=..." if away else ""
        raise CheckpointError(
            f"{directory} is an adapter without {EXTENSION_FILE}: it was saved without an extension. Name the one to "
            f"take, as in ctxext.load(path, method='yarn', factor=4), or load it plain with PeftModel.{perhaps}"
        )
    if not (directory / ADAPTER_WEIGHTS).is_file():
        raise CheckpointError(
            f"{directory} has no {ADAPTER_WEIGHTS}; ctxext reads adapters from safetensors only. Save it again with "
            f"ctxext.save."
        )
    if not is_extended:
        return SavedAdapter(directory, carried or {}, _peft_config(directory, directory))
    saved = read_beside(path)
    if guarded != saved["guarded"].keys():
        raise CheckpointError(
            f"{directory / ADAPTER_FILE} is not the one that {EXTENSION_FILE} was written for: saving was interrupted, "
            f"or another adapter was saved over it. Save the adapter again with ctxext.save."
        )
    # PEFT reads a config from a directory and refuses this one, so a copy gets back the fields that were marked.
    with tempfile.TemporaryDirectory() as restored:
        (Path(restored) / ADAPTER_FILE).write_text(json.dumps(adapter | saved["guarded"]), encoding="utf-8")
        config = _peft_config(restored, directory)
    extension = checked_extension(saved["extension"], str(path))
    if "encoding" not in saved:
        return SavedAdapter(directory, extension, config)
    return SavedAdapter(directory, extension, config, _read_encoding(directory), tuple(saved["encoding"]["trained"]))


def _peft_config(place: StrPath, directory: Path) -> Any:
    """Read the PEFT config that lies at a place, for the adapter in a directory.

    Raises:
        CheckpointError: the installed PEFT cannot read it, as of a type that a later one has.
    """
    import peft

    try:
        return peft.PeftConfig.from_pretrained(os.fspath(place))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"PEFT {peft.__version__} cannot read {directory / ADAPTER_FILE}: {error}. Install the version that it was "
            f"saved with, or mend the file."
        ) from error


def _carried_by_base(place: Any) -> JsonObject | None:
    """Return the extension that an adapter's base carries, if that is a model or a directory with one.

    Programs without ctxext load such a base extended, and save the adapters that they train on it unmarked.
    """
    if isinstance(place, nn.Module):
        return getattr(getattr(unwrapped(place)[-1], "config", None), "ctxext", None)
    config = Path(place) / "config.json" if isinstance(place, str | os.PathLike) and os.fspath(place) else None
    if config is None or not config.is_file():
        return None
    saved = read_json(config).get("ctxext")
    return None if saved is None else checked_extension(saved, str(config))


def _read_encoding(directory: Path) -> dict[str, Tensor]:
    path = directory / ENCODING_FILE
    if not path.is_file():
        raise CheckpointError(
            f"{directory} is an adapter without its {ENCODING_FILE}, the weights of the encoding that its model had. "
            f"Copy that file too, or save the adapter again."
        )
    try:
        weights: dict[str, Tensor] = load_file(path)
    except SafetensorError as error:
        raise CheckpointError(f"{path} cannot be read: {error}. Copy it again.") from error
    return weights


register(Step(Moment.SAVING, lambda work: keep_extension(work.subject, work.edits)))
