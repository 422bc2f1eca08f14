"""A folder is its own registry: every concrete class in it, by its ``name``; and rooms fill registries below them."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import threading
from collections.abc import Iterator, MutableMapping, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

T = TypeVar("T")
FILLED_BY: dict[str, tuple[str, ...]] = {}
"""Modules of ctxext whose import fills a registry of a lower room, which itself imports nothing above it."""
_FILLING = threading.RLock()


@cache
def fill(registry: str) -> None:
    """Import the modules that fill a registry, before its first use; another thread waits until all are imported."""
    with _FILLING:
        for module in FILLED_BY.get(registry, ()):
            importlib.import_module(f"ctxext.{module}")


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


class Registry(MutableMapping[str, type[T]]):
    """Concrete subclasses of a class by name, each in a file of a package and imported when it is asked for.

    Nearly every extension needs one method and one family of some fifty files. A list of all imports all of them.

    Args:
        package: Package whose files they are in. A file is named after its class: ``yarn.py`` for the method ``yarn``.
        base: Class that they have in common.
        first: Names that a list begins with.
        places: Names whose files have other names, and these.
    """

    def __init__(
        self, package: ModuleType, base: type[T], first: Sequence[str] = (), places: Sequence[tuple[str, str]] = ()
    ) -> None:
        self._package, self._base, self._first, self._places = package, base, tuple(first), dict(places)
        self._classes: dict[str, type[T]] = {}
        self._files = {module.name for module in pkgutil.iter_modules(package.__path__)}
        self._is_whole = False

    def __getitem__(self, name: Any) -> type[T]:
        file = self._places.get(name, name) if isinstance(name, str) else ""
        if name not in self._classes and not self._is_whole and file in self._files:
            module = importlib.import_module(f"{self._package.__name__}.{file}")
            for cls in vars(module).values():
                if inspect.isclass(cls) and issubclass(cls, self._base) and vars(cls).get("name") == name:
                    self._classes.setdefault(name, cls)
        return self._classes[name]

    def __setitem__(self, name: str, cls: type[T]) -> None:
        self._classes[name] = cls

    def __delitem__(self, name: str) -> None:
        self._all()
        del self._classes[name]

    def __iter__(self) -> Iterator[str]:
        yield from self._first
        yield from [name for name in self._all() if name not in self._first]

    def __len__(self) -> int:
        return len(self._all())

    def _all(self) -> dict[str, type[T]]:
        if not self._is_whole:
            self._classes = discover(self._package, self._base) | self._classes
            self._is_whole = True
        return self._classes


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
