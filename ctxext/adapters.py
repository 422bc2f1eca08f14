"""PEFT adapters: their directory holds no config of the base model, so the extension is written beside them."""

from __future__ import annotations

import copy
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ctxext.errors import CheckpointError, require_package
from ctxext.files import write_whole
from ctxext.saved import checked_extension, differences
from ctxext.surgery.edits import Edits
from ctxext.surgery.wrappers import unwrapped

__all__ = [
    "ADAPTER_FILE",
    "ADAPTER_WEIGHTS",
    "EXTENSION_FILE",
    "SENTENCE",
    "is_adapter",
    "keep_extension",
    "read_extension",
    "require_trained_on",
    "save_adapters",
]

ADAPTER_FILE = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
EXTENSION_FILE = "ctxext_config.json"

# PEFT has no field for what the base model must be. It does refuse a value that it does not know and quotes it, so
# this sentence stands in the place of one: of the LoRA initialisation, for the message, or else of the adapter's type.
GUARD = "this adapter needs its base model extended by ctxext"
SENTENCE = (
    f"{GUARD}: load it with ctxext.load(path), or onto a model that is extended already with ctxext.load(path, "
    f"base=model); PEFT by itself cannot tell whether a model is, and refuses both"
)
GUARDED_FIELDS = ("init_lora_weights", "peft_type")
HOOK = "ctxext_adapters"


def is_adapter(directory: str | os.PathLike[str]) -> bool:
    """Whether a local directory holds a PEFT adapter and not a whole model."""
    return (Path(directory) / ADAPTER_FILE).is_file() and not (Path(directory) / "config.json").is_file()


@dataclass
class ExtendedSave:
    """Stands in for ``save_pretrained`` of a PEFT model whose base is extended: its adapters carry the extension.

    Args:
        model: the PEFT model.
    """

    model: Any

    def __call__(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Takes what PEFT's own method does."""
        save_adapters(self.model, Path(save_directory), *args, **kwargs)


@dataclass(eq=False)
class ExtendedAdapter:
    """Stands in for ``save_pretrained`` of an adapter's PEFT config: whatever writes it writes the extension beside it.

    It is what every way of saving an adapter comes through: PEFT's, transformers' own, the Trainer's and TRL's.

    Args:
        adapter: the PEFT config.
        model_config: the config of its base model, which says how that is extended at the time of saving.
        lent: another config whose stand-in has served its turn once this one is used.
        once: give the config its own method back after the first call.
    """

    adapter: Any
    model_config: Any
    lent: Any = None
    once: bool = False

    def __getstate__(self) -> dict[str, Any]:
        """A copy belongs to no model until one is found to hold it; until then it saves as PEFT does."""
        return vars(self) | {"model_config": None, "lent": None}

    def __call__(self, save_directory: str | os.PathLike[str], **kwargs: Any) -> None:
        """Takes what PEFT's own method does."""
        for config in (self.adapter if self.once else None, self.lent):
            if config is not None:
                vars(config).pop("save_pretrained", None)
        extension = getattr(self.model_config, "ctxext", None)
        if extension is None:
            type(self.adapter).save_pretrained(self.adapter, os.fspath(save_directory), **kwargs)
        else:
            _save_marked(self.adapter, Path(save_directory), extension, **kwargs)


def keep_extension(model: Any, edits: Edits) -> None:
    """Let every adapter of ``model``, those to come included, be saved with its extension from now on.

    Adapters that put layers into the base model are found on it, whoever adds and saves them. Those that only put
    virtual tokens before the text leave no trace there: they are found where ``model`` is their PEFT model.
    """
    *wrappers, base = unwrapped(model)
    for module in (*wrappers, base):
        if isinstance(getattr(type(module), "peft_config", None), property):
            edits.set(module, "save_pretrained", ExtendedSave(module))
        _adopt(getattr(module, "peft_config", None), base.config, edits)
    if "_ctxext" in vars(base):
        edits.set(base._forward_pre_hooks, HOOK, _before_forward)
        edits.set(base._state_dict_pre_hooks, HOOK, _before_state_dict)


def _before_forward(base: PreTrainedModel, _: Any) -> None:
    """Sees adapters before an engine gathers and saves their weights without asking for a state_dict (ZeRO-3)."""
    if not torch.compiler.is_compiling():
        _adopt(vars(base).get("peft_config"), base.config, base._ctxext.edits)


def _before_state_dict(base: PreTrainedModel, _: str, __: bool) -> None:
    """Sees adapters that are saved before any forward pass."""
    _adopt(vars(base).get("peft_config"), base.config, base._ctxext.edits, saving=True)


def _adopt(adapters: Any, model_config: Any, edits: Edits, *, saving: bool = False) -> None:
    """Give a model its own copies of its adapters' PEFT configs, which save the extension.

    One PEFT config may serve several models, plain ones too, so that the model's own must be another object.

    Args:
        adapters: PEFT's record, name to config; anything else is no record and nothing is done.
        model_config: of the base model.
        edits: the journal.
        saving: PEFT may have taken an old config out of the record to save it next, so that one does it too, once.
    """
    for name, adapter in list(adapters.items()) if isinstance(adapters, dict) else ():
        save = vars(adapter).get("save_pretrained")
        if isinstance(save, ExtendedAdapter) and save.model_config is model_config and not save.once:
            continue
        own = copy.copy(adapter)
        own.save_pretrained = ExtendedAdapter(own, model_config, lent=adapter if saving else None)
        if saving:
            adapter.save_pretrained = ExtendedAdapter(adapter, model_config, once=True)
        edits.set(adapters, name, own)


def save_adapters(model: Any, directory: Path, *args: Any, **kwargs: Any) -> None:
    """Save the adapters of a model as its class does, and put the extension of their base beside each."""
    places = [directory if name == "default" else directory / name for name in model.peft_config]
    if isinstance(model, PreTrainedModel):  # transformers' own adapters: the active one, not in a folder of its name
        places = [directory]
    if kwargs.get("is_main_process", True):
        for place in places:  # an extension that lies there from before must not be taken for this one
            (place / EXTENSION_FILE).unlink(missing_ok=True)
    edits = Edits()
    _adopt(model.peft_config, unwrapped(model)[-1].config, edits)
    try:
        type(model).save_pretrained(model, str(directory), *args, **kwargs)
    finally:
        edits.undo()


def _save_marked(adapter: Any, directory: Path, extension: dict[str, Any], **kwargs: Any) -> None:
    """Write an adapter's PEFT config so that loading it without ctxext fails clearly, and the extension beside it."""
    with tempfile.TemporaryDirectory() as plain:
        type(adapter).save_pretrained(adapter, plain, **kwargs)
        values = json.loads((Path(plain) / ADAPTER_FILE).read_text(encoding="utf-8"))
    field = next(name for name in GUARDED_FIELDS if name in values)
    saved = {"extension": extension, "guarded": {field: values[field]}}
    directory.mkdir(parents=True, exist_ok=True)
    # In this order: whenever it is interrupted, what lies there is refused, with ctxext and without.
    (directory / EXTENSION_FILE).unlink(missing_ok=True)
    write_whole(directory / ADAPTER_FILE, json.dumps(values | {field: SENTENCE}, indent=2, sort_keys=True))
    write_whole(directory / EXTENSION_FILE, json.dumps(saved, indent=2, sort_keys=True))


def _is_guarded(value: object) -> bool:
    """The whole sentence may be another in another version."""
    return isinstance(value, str) and value.startswith(GUARD)


def read_extension(directory: Path) -> tuple[dict[str, Any], Any]:
    """Return the saved extension of an adapter directory and its PEFT config as it was before it was marked.

    Raises:
        CheckpointError: if the adapter was saved without its extension, or not in safetensors.
    """
    require_package("peft", "train", f"{directory} is an adapter; reading it takes", CheckpointError)
    from peft import PeftConfig

    path = directory / EXTENSION_FILE
    adapter = json.loads((directory / ADAPTER_FILE).read_text(encoding="utf-8"))
    if not path.is_file() and any(_is_guarded(adapter.get(field)) for field in GUARDED_FIELDS):
        raise CheckpointError(
            f"{directory} is an adapter of an extended model without its {EXTENSION_FILE}: saving was interrupted, or "
            f"that file was not copied along. Copy it too, or save the adapter again with ctxext.save."
        )
    if not path.is_file():
        raise CheckpointError(
            f"{directory} is an adapter without {EXTENSION_FILE}: it was saved without an extension. If it was trained "
            f"on a plain model, load it with PeftModel.from_pretrained(base, path); otherwise what it was trained with "
            f"is unknown: patch the base model yourself first, and save it with ctxext.save."
        )
    if not (directory / ADAPTER_WEIGHTS).is_file():
        raise CheckpointError(
            f"{directory} has no {ADAPTER_WEIGHTS}; ctxext reads adapters from safetensors only. Save it again with "
            f"ctxext.save."
        )
    saved = json.loads(path.read_text(encoding="utf-8"))
    if not all(_is_guarded(adapter.get(field)) for field in saved["guarded"]):
        raise CheckpointError(
            f"{directory / ADAPTER_FILE} is not the one that {EXTENSION_FILE} was written for: saving was interrupted, "
            f"or another adapter was saved over it. Save the adapter again with ctxext.save."
        )
    with tempfile.TemporaryDirectory() as restored:
        (Path(restored) / ADAPTER_FILE).write_text(json.dumps(adapter | saved["guarded"]), encoding="utf-8")
        config = PeftConfig.from_pretrained(restored)
    return checked_extension(saved["extension"], str(path)), config


def require_trained_on(saved: dict[str, Any], directory: Path, model: Any) -> None:
    """Refuse to put an adapter on a model in memory that is not extended as the one that it was trained on.

    Args:
        saved: the extension that the adapter was trained with.
        directory: of the adapter.
        model: a transformers model, or a wrapper around one.

    Raises:
        CheckpointError: the message names every choice that differs, with both values.
    """
    base = unwrapped(model)[-1]
    different = differences(saved, getattr(base.config, "ctxext", None))
    if different:
        raise CheckpointError(
            f"The adapter in {directory} was trained on another extension than this {type(base).__name__} has: "
            f"{different}. Extend it the same way first, with ctxext.patch."
        )
