"""Every method, one file each. This folder is the registry: ``METHODS`` maps a name to its class."""

from __future__ import annotations

import sys

from ctxext._discover import discover
from ctxext.methods.base import BiasMethod, Method, RopeMethod

__all__ = ["METHODS", "BiasMethod", "Method", "RopeMethod"]

METHODS: dict[str, type[Method]] = discover(sys.modules[__name__], Method)
