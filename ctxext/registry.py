"""A folder is its own registry: every concrete class in it, by its ``name``."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

T = TypeVar("T")
METHODS = ("methods", "laboratory/encodings")


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


def method_parameters(name: str) -> set[str] | None:
    """Return the names of a method's parameters by the source, which is not imported; None for no method of ours."""
    family = _family(name)
    return {field for kind in family for field in _annotated(kind, is_field=True)} if family else None


def needs_reach(name: str) -> bool:
    """Return whether a method of ours, without parameters of its own, has to be told a factor or a target."""
    return any(kind.name in ("RopeMethod", "TableMethod") for kind in _family(name))


def _family(name: str) -> list[ast.ClassDef]:
    """Return the class of a method and all its bases; nothing for no method of ours."""
    classes = _classes()
    family = [kind for kind in classes.values() if _annotated(kind, is_field=False).get("name") == name]
    for kind in family:  # grows by the bases of each
        family += [classes[base.id] for base in kind.bases if isinstance(base, ast.Name) and base.id in classes]
    return family


@cache
def _classes() -> dict[str, ast.ClassDef]:
    """Return the classes in the files of methods, none of which is imported."""
    files = (file for folder in METHODS for file in (Path(__file__).parent / folder).glob("*.py"))
    nodes = (node for file in files for node in ast.parse(file.read_text("utf-8")).body)
    return {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}


def _annotated(kind: ast.ClassDef, *, is_field: bool) -> dict[str, Any]:
    """Return the fields of a dataclass, or its class variables, each with its value where that is a constant."""
    items = (item for item in kind.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name))
    return {
        ast.unparse(item.target): getattr(item.value, "value", None)
        for item in items
        if ast.unparse(item.annotation).startswith("ClassVar") != is_field
    }


def runtime_names(incomplete: str = "") -> list[str]:
    """Return the names of runtimes that begin so."""
    return _names_in("runtimes", incomplete)


def _names_in(folder: str, incomplete: str) -> list[str]:
    """Read the names of a registry that begin so out of its files, none of which is imported."""
    files = (Path(__file__).parent / folder).glob("*.py")
    pattern = re.compile(r'^    name: ClassVar.* = "(.+)"', re.M)
    names = [name for file in files for name in pattern.findall(file.read_text("utf-8"))]
    return sorted(name for name in names if name.startswith(incomplete))
