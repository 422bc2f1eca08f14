"""Model families by the place of their positions, one file each. This folder is the registry: ``ARCHITECTURES``."""

from __future__ import annotations

import sys

from ctxext.core import architecture
from ctxext.core.architecture import Architecture, architecture_of, find_architecture
from ctxext.registry import Registry

__all__ = ["ARCHITECTURES", "Architecture", "architecture_of", "find_architecture"]

ARCHITECTURES = architecture.ARCHITECTURES = Registry(
    sys.modules[__name__],
    Architecture,  # type: ignore[type-abstract]
    first=("rope",),
)
