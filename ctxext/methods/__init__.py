"""Every method that extends a checkpoint, one file each. This folder is their registry.

``ctxext.methods()`` maps each name that ``ctxext.patch`` takes to its class, the laboratory's encodings included, and
``from ctxext.methods import YaRN`` imports one.
"""

from __future__ import annotations

import importlib
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
    "known_methods",
    "method_class",
    "method_in",
    "saved_class",
]
__all__ += sorted(_CLASSES)


def known_methods() -> dict[str, type[Method]]:
    """Return ``METHODS`` and the encodings of the laboratory, which is imported only here, by name."""
    laboratory = importlib.import_module("ctxext.laboratory.encodings")
    return dict(sorted({**laboratory.ENCODINGS, **METHODS}.items()))


def method_class(name: str) -> type[Method] | None:
    """Return the method of this name, None if there is none. Names that ``METHODS`` lacks are the laboratory's."""
    return METHODS[name] if name in METHODS else known_methods().get(name)


def saved_class(name: str) -> type[Method]:
    """Return the class of a method that a checkpoint was extended by.

    Raises:
        CheckpointError: if no method of this name is known in this process.
    """
    kind = method_class(name)
    if kind is not None:
        return kind
    raise CheckpointError(
        f"The extension method {name!r} is unknown to ctxext {__version__} in this process. If it is a class of your "
        f"own, import it and register it first: ctxext.methods.METHODS[{name!r}] = YourClass. Otherwise it belongs to "
        f"another version of ctxext. Install the one that the checkpoint's config names under ctxext.versions."
    )


def is_choice(method: object) -> TypeGuard[str]:
    """Return whether ``method`` is the path of a ``choice.json`` (``ctxext choose``), which ``method_in`` reads."""
    return isinstance(method, str) and method.endswith(".json")


def method_in(path: str | Path) -> Method:
    """Read the method from a file that ``ctxext choose -o choice.json`` wrote.

    Raises:
        InvalidParameterError: if the file cannot be read, or holds no method.
        CheckpointError: if the method is unknown in this process.
    """
    try:
        choice = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidParameterError(f"Cannot read the method in {str(path)!r}: {error.strerror}.") from error
    except ValueError as error:
        raise InvalidParameterError(f"{path} is not JSON, so there is no method in it: {error}.") from error
    saved = choice.get("method") if isinstance(choice, dict) else None
    if not isinstance(saved, dict) or "method" not in saved:
        raise InvalidParameterError(
            f"{path} holds no method. A file that `ctxext choose ... -o choice.json` writes does, under 'method'."
        )
    return saved_class(saved["method"]).from_dict(saved)


class MethodsPackage(ModuleType):
    """Module that can be called: ``ctxext.methods()``."""

    def __call__(self) -> dict[str, type[Method]]:
        """Return every method by the name that ``ctxext.patch`` takes: ``{"yarn": YaRN, ...}``."""
        return known_methods()


package: MethodsPackage = cast(MethodsPackage, sys.modules[__name__])  # for type checkers: they know no such modules
package.__class__ = MethodsPackage


def __getattr__(name: str) -> Any:
    if name in _CLASSES:
        return _CLASSES[name]
    classes = {} if name.startswith("_") else {cls.__name__: cls for cls in known_methods().values()}
    if name in classes:
        return classes[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; its methods: {', '.join(sorted(classes))}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_CLASSES})
