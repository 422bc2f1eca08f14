"""What a GGUF file itself says about the scaling of its positions."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from ctxext.errors import CheckpointError

__all__ = ["scaling_in_gguf"]

SCALING_TENSORS = ("rope_freqs", "rope_factors")


def scaling_in_gguf(path: Path) -> tuple[str, ...]:
    """Name the metadata and tensors in a GGUF file that scale rope; transformers reads them for gpt-oss only.

    Raises:
        CheckpointError: if the file is not GGUF, or the package that reads it is missing.
    """
    if importlib.util.find_spec("gguf") is None:
        raise CheckpointError(f"Reading {path} needs the package gguf: pip install gguf.")
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
    except (ValueError, IndexError, OSError) as error:  # a short file ends in an IndexError
        raise CheckpointError(f"{path} cannot be read as GGUF: {error}") from error
    found = [f"{key}={entry.contents()}" for key, entry in reader.fields.items() if ".rope.scaling." in key]
    return (*found, *(tensor.name for tensor in reader.tensors if tensor.name.startswith(SCALING_TENSORS)))
