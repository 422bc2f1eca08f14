"""Parts of a training recipe around the Trainer."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ctxext.training.checkpoints import ExtensionCallback
    from ctxext.training.frozen import reference
    from ctxext.training.loss import ChunkedLoss, chunk_loss
    from ctxext.training.memory import Memory, return_freed_memory

__all__ = ["ChunkedLoss", "ExtensionCallback", "Memory", "chunk_loss", "reference", "return_freed_memory"]

# These import transformers' Trainer and all its dependencies, which a user who only extends a model must not wait for.
MODULES = {
    "ChunkedLoss": "loss",
    "ExtensionCallback": "checkpoints",
    "Memory": "memory",
    "chunk_loss": "loss",
    "reference": "frozen",
    "return_freed_memory": "memory",
}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use."""
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{MODULES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
