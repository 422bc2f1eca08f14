"""A folder is its own registry: every concrete class in it, by its ``name``; and rooms fill registries below them."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import re
import threading
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

T = TypeVar("T")
METHODS = ("methods", "laboratory/encodings")
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


def method_names(incomplete: str = "") -> list[str]:
    """Return the names of methods that begin so; torch, which their files import, is not imported for that."""
    return sorted(name for folder in METHODS for name in _names_in(folder, incomplete))


@cache
def listed_methods() -> dict[str, dict[str, Any]]:
    """Return what is known of each method by its name, from the file that scripts/update_readme.py writes."""
    listed: dict[str, dict[str, Any]] = json.loads(
        (Path(__file__).parent / "methods" / "listed.json").read_text("utf-8")
    )
    return listed


def method_parameters(name: str) -> set[str] | None:
    """Return the names of a method's parameters; None for a method that is not listed."""
    return {*listed_methods()[name]["parameters"]} if name in listed_methods() else None


def needs_reach(name: str) -> bool:
    """Return whether a method of ours, without parameters of its own, has to be told a factor or a target."""
    return re.search("rotary|remapping|tables", listed_methods().get(name, {}).get("group", "")) is not None


def runtime_names(incomplete: str = "") -> list[str]:
    """Return the names of runtimes that begin so."""
    return _names_in("runtimes", incomplete)


def _names_in(folder: str, incomplete: str) -> list[str]:
    """Read the names of a registry that begin so out of its files, none of which is imported."""
    files = (Path(__file__).parent / folder).glob("*.py")
    pattern = re.compile(r'^    name: ClassVar.* = "(.+)"', re.M)
    names = [name for file in files for name in pattern.findall(file.read_text("utf-8"))]
    return sorted(name for name in names if name.startswith(incomplete))
