"""The rule by which the code is divided, and its budgets: rooms that know only those below, no circle, and no growth.

Every import counts: at the top of a file, inside a function, and under TYPE_CHECKING.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

from scripts.house import measure

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow  # it reads the whole package

# From the ground up: a room imports from those before it. The face of the library (``ctxext`` itself) knows the verbs'.
ROOMS = [
    "version",
    "rope_types",
    "errors",
    "files",
    "progress",
    "registry",
    "recommended",
    "quantities",
    "mistakes",
    "spec",
    "methods",
    "core",
    "kernels",
    "caches",
    "attention",
    "models",
    "adapters",
    "patching",
    "runtimes",
    "checkpoints",
    "texts",
    "measuring",
    "evaluation",
    "training",
    "choosing",
    "planning",
    "serving",
    "laboratory",
    "cli",
    "__main__",
]


# What a change may not exceed: the figures of ``scripts/house.py``, rounded up. Lower each when its figure falls.
CEILINGS = {
    "lines of ctxext/": 54_535,
    "classes of evaluation/": 90,
    "files that one patch enters": 21,
    "functions that one patch enters": 140,
    "docstrings that are riddles": 0,
    "functions without an imperative": 0,
    "lines of __all__": 0,
    "lines of JSON in ctxext/": 327,
    "lines of scripts/": 4_870,
    "parameters of the widest command": 6,
}


@cache
def modules() -> dict[str, ast.Module]:
    """Every module of the package by its dotted name, a package by the name of its folder."""
    found = {}
    for path in sorted((ROOT / "ctxext").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def imported(tree: ast.Module) -> set[str]:
    """Return the modules of this package that ``tree`` imports, wherever in the file and whoever reads it."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names & modules().keys()
            if names - modules().keys():
                found.add(node.module)
    return {name for name in found if name.split(".")[0] == "ctxext"}


@cache
def imports() -> dict[str, set[str]]:
    """Return what each module imports."""
    return {name: imported(tree) for name, tree in modules().items()}


def pairs() -> list[tuple[str, str]]:
    """Return each module with each that it imports."""
    return [(name, other) for name, others in imports().items() for other in sorted(others)]


def room(name: str) -> str:
    """The folder or file at the top of the package; empty for the package's own face."""
    return name.partition(".")[2].partition(".")[0]


def test_there_is_something_to_look_at() -> None:
    assert len(pairs()) >= 300
    assert {room(name) for name in modules()} - {""} == set(ROOMS)


def test_no_import_runs_upwards() -> None:
    """Nor through the face, which imports everything."""
    upward = [
        f"{name} -> {other}"
        for name, other in pairs()
        if name != "ctxext" and (room(other) == "" or ROOMS.index(room(name)) < ROOMS.index(room(other)))
    ]
    assert upward == []


def test_the_laboratory_is_imported_by_the_command_line_only() -> None:
    users = {room(name) for name, other in pairs() if room(other) == "laboratory"}
    assert users == {"laboratory", "cli"}


def test_no_circle() -> None:
    left = {name: {other for other in others if other in modules()} for name, others in imports().items()}
    while True:
        ended = {name for name, others in left.items() if not others}
        if not ended:
            break
        left = {name: others - ended for name, others in left.items() if name not in ended}
    assert sorted(left) == []


def test_a_private_file_is_imported_in_its_own_folder_only() -> None:
    across = [
        f"{name} -> {other}"
        for name, other in pairs()
        if other.rpartition(".")[2].startswith("_") and other.rpartition(".")[0] != name.rpartition(".")[0]
    ]
    assert [pair for pair in across if "__main__" not in pair] == []


def test_a_class_name_exists_once() -> None:
    places = defaultdict(list)
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(name)
    assert len(places) >= 150
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_the_house_does_not_grow() -> None:
    figures = measure()
    assert CEILINGS.keys() <= figures.keys()
    assert {name: figures[name] for name, most in CEILINGS.items() if figures[name] > most} == {}
