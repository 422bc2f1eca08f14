"""A folder is its own registry: every concrete class in it, by its ``name``."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from pathlib import Path
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


def method_names(incomplete: str = "") -> list[str]:
    """Return the names of methods that begin so; torch, which their files import, is not imported for that."""
    return sorted([*_names_in("methods", incomplete), *_names_in("laboratory/encodings", incomplete)])


def runtime_names(incomplete: str = "") -> list[str]:
    """Return the names of runtimes that begin so."""
    return _names_in("runtimes", incomplete)


def _names_in(folder: str, incomplete: str) -> list[str]:
    """Read the names of a registry that begin so out of its files, none of which is imported."""
    files = (Path(__file__).parent / folder).glob("*.py")
    pattern = re.compile(r'^    name: ClassVar.* = "(.+)"', re.M)
    names = [name for file in files for name in pattern.findall(file.read_text("utf-8"))]
    return sorted(name for name in names if name.startswith(incomplete))
