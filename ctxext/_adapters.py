"""PEFT adapters: their directory holds no config of the base model, so the extension is written beside them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ctxext.errors import CheckpointError

__all__ = ["EXTENSION_FILE", "is_adapter", "mark_adapter", "read_extension", "save_adapter"]

ADAPTER_FILE = "adapter_config.json"
EXTENSION_FILE = "ctxext_config.json"


def is_adapter(directory: str | os.PathLike[str]) -> bool:
    """Whether a local directory holds a PEFT adapter and not a whole model."""
    return (Path(directory) / ADAPTER_FILE).is_file() and not (Path(directory) / "config.json").is_file()


def save_adapter(model: Any, extension: dict[str, Any], directory: Path) -> None:
    """Save the adapters of a PEFT model, each with its extension."""
    model.save_pretrained(directory)
    for adapter_config in sorted(directory.rglob(ADAPTER_FILE)):
        mark_adapter(adapter_config.parent, extension)


def mark_adapter(directory: Path, extension: dict[str, Any]) -> None:
    """Write the extension beside a saved adapter, and make loading it without ctxext fail with a clear sentence.

    PEFT has no field for what the base model must be. It does refuse an initialisation that it does not know, and
    quotes it; the true value is kept in our own file.
    """
    path = directory / ADAPTER_FILE
    adapter = json.loads(path.read_text())
    extension_path = directory / EXTENSION_FILE
    saved = {"extension": extension}
    if "init_lora_weights" in adapter:
        sentence = f"this adapter needs its base model extended by ctxext: load it with ctxext.load({directory.name!r})"
        if adapter["init_lora_weights"] != sentence:
            saved["init_lora_weights"] = adapter["init_lora_weights"]
            adapter["init_lora_weights"] = sentence
    replace_text(extension_path, json.dumps(saved, indent=2, sort_keys=True))
    replace_text(path, json.dumps(adapter, indent=2, sort_keys=True))


def read_extension(directory: Path) -> tuple[dict[str, Any], Any]:
    """Return the saved extension of an adapter directory and its PEFT config as it was before it was marked.

    Raises:
        CheckpointError: if the adapter was saved without its extension.
    """
    from peft import PeftConfig

    path = directory / EXTENSION_FILE
    if not path.is_file():
        raise CheckpointError(
            f"{directory} is an adapter without {EXTENSION_FILE}: it was saved without its extension, so what it was "
            f"trained with is unknown. Patch the base model yourself, then use PeftModel.from_pretrained(base, path)."
        )
    saved = json.loads(path.read_text())
    config = PeftConfig.from_pretrained(directory)
    if "init_lora_weights" in saved:
        config.init_lora_weights = saved["init_lora_weights"]
    return saved["extension"], config


def replace_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(path.name + ".partial")
    temporary.write_text(text)
    temporary.replace(path)
