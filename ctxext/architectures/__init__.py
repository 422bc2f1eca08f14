"""Where positions live, one file per model family. This folder is the registry: ``ARCHITECTURES``."""

from __future__ import annotations

import sys

from ctxext._discover import discover
from ctxext.architectures.base import Architecture, Extension, Request

__all__ = ["ARCHITECTURES", "Architecture", "Extension", "Request"]

ARCHITECTURES: dict[str, type[Architecture]] = discover(sys.modules[__name__], Architecture)  # type: ignore[type-abstract]
