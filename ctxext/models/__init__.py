"""Model families by the place of their positions, one file each. This folder is the registry: ``ARCHITECTURES``."""

from __future__ import annotations

import sys

from ctxext.core.architecture import ARCHITECTURES, Architecture, architecture_of, find_architecture
from ctxext.registry import discover

__all__ = ["ARCHITECTURES", "Architecture", "architecture_of", "find_architecture"]

_FAMILIES: dict[str, type[Architecture]] = discover(sys.modules[__name__], Architecture)  # type: ignore[type-abstract]
ARCHITECTURES.update(sorted(_FAMILIES.items(), key=lambda item: item[1].positions != "rotary"))
