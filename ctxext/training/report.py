"""What is left of a run beside its weights: ``run.json``, and the numbers in it."""

from __future__ import annotations

import datetime
import json
import resource
import sys
from pathlib import Path
from typing import Any

import torch

from ctxext.files import write_whole

__all__ = ["now", "peak_memory", "trained_weights", "write_json"]


def trained_weights(adapted: Any) -> str:
    """How much of a ``peft.PeftModel`` is trained."""
    some, total = adapted.get_nb_trainable_parameters()  # counts weights of 4 bits, too
    return f"{some:,} of {total:,} weights are trained"


def peak_memory(device: torch.device) -> int:
    """Bytes: of the GPU's memory, or the largest resident size of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def now() -> str:
    """UTC, ISO 8601, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a file whole or not at all."""
    write_whole(path, json.dumps(content, indent=2) + "\n")
