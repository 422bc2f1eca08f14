"""PEFT adapters: their directory holds no config of the base model, so the extension is written beside them."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ctxext._edits import Edits
from ctxext._files import write_whole
from ctxext.errors import CheckpointError

__all__ = [
    "ADAPTER_FILE",
    "ADAPTER_WEIGHTS",
    "EXTENSION_FILE",
    "is_adapter",
    "keep_extension",
    "read_extension",
    "save_adapters",
    "unwrapped",
]

ADAPTER_FILE = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
EXTENSION_FILE = "ctxext_config.json"

# PEFT has no field for what the base model must be. It does refuse a value that it does not know and quotes it, so
# this sentence stands in the place of one: of the LoRA initialisation, for the message, or else of the adapter's type.
SENTENCE = "this adapter needs its base model extended by ctxext: load it with ctxext.load"
GUARDED_FIELDS = ("init_lora_weights", "peft_type")


def unwrapped(model: Any) -> list[Any]:
    """The chain of wrappers around a transformers model, outermost first: torch.compile, data-parallel, PEFT."""
    chain = [model]
    while not isinstance(chain[-1], PreTrainedModel):
        outer = chain[-1]
        if hasattr(outer, "get_base_model"):
            chain.append(outer.get_base_model())
        elif hasattr(outer, "_orig_mod"):
            chain.append(outer._orig_mod)
        elif isinstance(getattr(outer, "module", None), nn.Module):
            chain.append(outer.module)
        else:
            break
    return chain


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
        """Arguments of PEFT's own method."""
        save_adapters(self.model, Path(save_directory), *args, **kwargs)


def keep_extension(model: Any, edits: Edits) -> None:
    """Let a PEFT model inside ``model``, if there is one, save its adapters with their extension from now on."""
    for wrapper in unwrapped(model):
        if hasattr(wrapper, "peft_config") and not isinstance(wrapper, PreTrainedModel):
            edits.set(wrapper, "save_pretrained", ExtendedSave(wrapper))


def save_adapters(model: Any, directory: Path, *args: Any, **kwargs: Any) -> None:
    """Save the adapters of a model as its class does, and put the extension of their base beside each."""
    extension = getattr(unwrapped(model)[-1].config, "ctxext", None)
    on_main_process = kwargs.get("is_main_process", True)
    places = [directory if name == "default" else directory / name for name in model.peft_config]
    if isinstance(model, PreTrainedModel):  # transformers' own adapters: the active one, not in a folder of its name
        places = [directory]
    if on_main_process:
        for place in places:  # an extension that lies there from before must not be taken for this one
            (place / EXTENSION_FILE).unlink(missing_ok=True)
    type(model).save_pretrained(model, str(directory), *args, **kwargs)
    if on_main_process and extension is not None:
        for place in places:
            if (place / ADAPTER_FILE).is_file():
                _mark(place, extension)


def _mark(directory: Path, extension: dict[str, Any]) -> None:
    """Write the extension beside a saved adapter, and make loading it without ctxext fail with a clear sentence."""
    path = directory / ADAPTER_FILE
    adapter = json.loads(path.read_text(encoding="utf-8"))
    field = next(name for name in GUARDED_FIELDS if name in adapter)
    saved = {"extension": extension, "guarded": {field: adapter[field]}}
    adapter[field] = SENTENCE
    # In this order: whatever happens between the two, the true value is on the disk.
    write_whole(directory / EXTENSION_FILE, json.dumps(saved, indent=2, sort_keys=True))
    write_whole(path, json.dumps(adapter, indent=2, sort_keys=True))


def read_extension(directory: Path) -> tuple[dict[str, Any], Any]:
    """Return the saved extension of an adapter directory and its PEFT config as it was before it was marked.

    Raises:
        CheckpointError: if the adapter was saved without its extension, or not in safetensors.
    """
    from peft import PeftConfig

    path = directory / EXTENSION_FILE
    if not path.is_file():
        raise CheckpointError(
            f"{directory} is an adapter without {EXTENSION_FILE}: it was saved (or copied) without its extension, so "
            f"what it was trained with is unknown. Patch the base model yourself and use PeftModel.from_pretrained("
            f"base, path); save it with ctxext.save next time."
        )
    if not (directory / ADAPTER_WEIGHTS).is_file():
        raise CheckpointError(
            f"{directory} has no {ADAPTER_WEIGHTS}; ctxext reads adapters from safetensors only. Save it again with "
            f"ctxext.save."
        )
    saved = json.loads(path.read_text(encoding="utf-8"))
    adapter = json.loads((directory / ADAPTER_FILE).read_text(encoding="utf-8"))
    if any(adapter.get(field) != SENTENCE for field in saved["guarded"]):
        raise CheckpointError(
            f"{directory / ADAPTER_FILE} is not the one that {EXTENSION_FILE} was written for: saving was interrupted, "
            f"or another adapter was saved over it. Save the adapter again with ctxext.save."
        )
    with tempfile.TemporaryDirectory() as restored:
        (Path(restored) / ADAPTER_FILE).write_text(json.dumps(adapter | saved["guarded"]), encoding="utf-8")
        config = PeftConfig.from_pretrained(restored)
    return saved["extension"], config
