"""A folder is its own registry: every concrete class in it, by its ``name``; and rooms fill registries below them."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import threading
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

T = TypeVar("T")
_FILLED_BY: dict[str, tuple[str, ...]] = {}
_FILLING = threading.RLock()


def filled_by(registry: str, modules: tuple[str, ...]) -> None:
    """Name the modules whose import fills a registry of a lower room, which itself imports nothing above it."""
    _FILLED_BY[registry] = modules


@cache
def fill(registry: str) -> None:
    """Import the modules that fill a registry, before its first use; another thread waits until all are imported."""
    with _FILLING:
        for module in _FILLED_BY.get(registry, ()):
            importlib.import_module(module)


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


@cache
def listed() -> dict[str, Any]:
    """Return what is known of methods and runtimes without importing one, from a file of scripts/update_readme.py."""
    found: dict[str, Any] = json.loads((Path(__file__).parent / "methods" / "listed.json").read_text("utf-8"))
    return found


def listed_methods() -> dict[str, dict[str, Any]]:
    """Return what is listed of each method, by name."""
    methods: dict[str, dict[str, Any]] = listed()["methods"]
    return methods


def method_names(incomplete: str = "") -> list[str]:
    """Return the names of methods that begin so."""
    return [name for name in listed_methods() if name.startswith(incomplete)]


def runtime_names(incomplete: str = "") -> list[str]:
    """Return the names of runtimes that begin so."""
    return [name for name in listed()["runtimes"] if name.startswith(incomplete)]
