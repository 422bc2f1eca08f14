"""Every method, one file each. This folder is the registry: calling it lists it, its attributes are the classes.

``ctxext.methods()`` maps each name to its class, and ``from ctxext.methods import YaRN`` imports one.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, TypeGuard, cast

from ctxext.errors import CheckpointError, InvalidParameterError
from ctxext.methods.base import BiasMethod, BucketMethod, Method, RopeMethod, TableMethod
from ctxext.methods.encoding import EncodingMethod
from ctxext.registry import discover
from ctxext.version import __version__

METHODS: dict[str, type[Method]] = discover(sys.modules[__name__], Method)
_CLASSES = {cls.__name__: cls for cls in METHODS.values()}

__all__ = [
    "METHODS",
    "BiasMethod",
    "BucketMethod",
    "EncodingMethod",
    "Method",
    "RopeMethod",
    "TableMethod",
    "is_choice",
    "method_in",
    "saved_class",
]
__all__ += sorted(_CLASSES)


def saved_class(name: str) -> type[Method]:
    """The class of a method that a checkpoint was extended by.

    Raises:
        CheckpointError: if no method of this name is known in this process.
    """
    if name in METHODS:
        return METHODS[name]
    raise CheckpointError(
        f"The extension method {name!r} is unknown to ctxext {__version__} in this process. If it is a class of your "
        f"own, import it and register it first: ctxext.methods.METHODS[{name!r}] = YourClass. Otherwise it belongs to "
        f"another version of ctxext. Install the one that the checkpoint's config names under ctxext.versions."
    )


def is_choice(method: object) -> TypeGuard[str]:
    """Whether what stands for a method is a file of ``ctxext choose`` (``choice.json``), which ``method_in`` reads."""
    return isinstance(method, str) and method.endswith(".json")


def method_in(path: str | Path) -> Method:
    """The method that a choice holds, as ``ctxext choose -o choice.json`` writes it.

    Raises:
        InvalidParameterError: the file cannot be read, or holds no method.
        CheckpointError: its method is unknown in this process.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidParameterError(f"Cannot read the method in {str(path)!r}: {error.strerror}.") from error
    except ValueError as error:
        raise InvalidParameterError(f"{path} is not JSON, so there is no method in it: {error}.") from error
    saved = found.get("method") if isinstance(found, dict) else None
    if not isinstance(saved, dict) or "method" not in saved:
        raise InvalidParameterError(
            f"{path} holds no method. A file that `ctxext choose ... -o choice.json` writes does, under 'method'."
        )
    return saved_class(saved["method"]).from_dict(saved)


class MethodsPackage(ModuleType):
    """What this package is: a module that answers a call."""

    def __call__(self) -> dict[str, type[Method]]:
        """Every method by the name that ``ctxext.patch`` takes: ``{"yarn": YaRN, ...}``."""
        return dict(METHODS)


package: MethodsPackage = cast(MethodsPackage, sys.modules[__name__])  # for type checkers: they know no such modules
package.__class__ = MethodsPackage


def __getattr__(name: str) -> Any:
    if name in _CLASSES:
        return _CLASSES[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; its methods: {', '.join(sorted(_CLASSES))}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_CLASSES})
