"""Every method that extends a checkpoint, one file each. This folder is their registry.

``ctxext.methods()`` maps each name that ``ctxext.patch`` takes to its class, the laboratory's encodings included, and
``from ctxext.methods import YaRN`` imports one.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, cast

from ctxext.files import is_choice
from ctxext.methods.base import (
    METHODS,
    BiasMethod,
    BucketMethod,
    Method,
    RopeMethod,
    TableMethod,
    choice_in,
    known_methods,
    method_class,
    saved_class,
    with_choice,
)
from ctxext.methods.encoding import EncodingMethod

__all__ = [
    "METHODS",
    "BiasMethod",
    "BucketMethod",
    "EncodingMethod",
    "Method",
    "RopeMethod",
    "TableMethod",
    "choice_in",
    "is_choice",
    "known_methods",
    "method_class",
    "saved_class",
    "with_choice",
]


class MethodsPackage(ModuleType):
    """Module that can be called: ``ctxext.methods()``."""

    def __call__(self) -> dict[str, type[Method]]:
        """Return every method by the name that ``ctxext.patch`` takes: ``{"yarn": YaRN, ...}``."""
        return known_methods()


package: MethodsPackage = cast(MethodsPackage, sys.modules[__name__])  # for type checkers: they know no such modules
package.__class__ = MethodsPackage


def __getattr__(name: str) -> Any:
    classes = {} if name.startswith("_") else {cls.__name__: cls for cls in known_methods().values()}
    if name in classes:
        return classes[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; its methods: {', '.join(sorted(classes))}")


def __dir__() -> list[str]:
    return sorted({*globals(), *(cls.__name__ for cls in METHODS.values())})
