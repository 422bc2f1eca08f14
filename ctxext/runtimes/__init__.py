"""Runtimes that serve extended checkpoints, and the flags each needs, one file a runtime.

To add one, write a file with a class that has a ``name``; nothing else changes.
"""

import sys

from ctxext.registry import discover
from ctxext.runtimes.base import Runtime

__all__ = ["RUNTIMES"]

RUNTIMES: dict[str, Runtime] = {
    name: kind()
    for name, kind in discover(
        sys.modules[__name__],
        Runtime,  # type: ignore[type-abstract]
    ).items()
}
"""Every runtime by the name that ``ctxext.export`` takes."""
