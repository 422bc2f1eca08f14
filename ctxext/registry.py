"""A folder is its own registry: every concrete class in it, by its ``name``."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from types import ModuleType
from typing import TypeVar

T = TypeVar("T")


def discover(package: ModuleType, base: type[T]) -> dict[str, type[T]]:
    """Return ``{cls.name: cls}`` for every concrete subclass of ``base`` defined in a public module of ``package``.

    Raises:
        RuntimeError: if two classes claim the same name (a programming error in the folder).
    """
    classes: dict[str, type[T]] = {}
    for module_info in sorted(pkgutil.iter_modules(package.__path__), key=lambda info: info.name):
        if module_info.name.startswith("_") or module_info.name == "base":
            continue
        module = importlib.import_module(f"{package.__name__}.{module_info.name}")
        for cls in vars(module).values():
            if not (inspect.isclass(cls) and issubclass(cls, base)) or inspect.isabstract(cls):
                continue
            if cls.__module__ != module.__name__ or (not hasattr(cls, "name") and cls.__subclasses__()):
                continue  # imported from elsewhere, or the common base of several classes of the file
            name: str = cls.name  # type: ignore[attr-defined]
            if name in classes:
                raise RuntimeError(f"{cls.__qualname__} and {classes[name].__qualname__} are both named {name!r}.")
            classes[name] = cls
    return classes
