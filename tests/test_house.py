"""The rule by which the code is divided, and its budgets: rooms that know only those below, no circle, and no growth.

Every import that a reader can follow counts: at the top of a file, inside a function, under TYPE_CHECKING, and a name
written out for ``import_module``. Python loads more: rooms whose names are put together register with the core.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest

from ctxext.methods import known_methods
from scripts.house import PACKAGE, args_without_a_noun, imported, measure, modules, riddles

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow  # it reads the whole package

# From the ground up: a room imports from those before it. The face of the library (``ctxext`` itself) knows the verbs'.
ROOMS = [
    *("version", "rope_types", "errors", "files", "progress", "registry", "recommended", "quantities", "mistakes"),
    *("spec", "methods", "core", "probe", "rotary", "kernels", "caches", "attention", "models", "runtimes"),
    *("checkpoints", "texts"),
    *("measuring", "evaluation", "training", "choosing", "planning", "serving", "laboratory", "cli", "__main__"),
]


# What a change may not exceed: the figures of ``scripts/house.py``, rounded up. Lower each when its figure falls.
CEILINGS = {
    "tokens of code": 377_139,
    "lines that the first patch loads": 9_233,
    "files that the first patch loads": 50,
    "lines of the core": 3_600,
    "files of the core": 17,
    "long functions without a comment": 0,
    "stiff constructions": 249,
    "arguments without a noun": 0,
    "files that one patch enters": 28,
    "functions that one patch enters": 152,
    "docstrings that are riddles": 0,
    "functions without an imperative": 0,
    "lines of __all__": 0,
    "lines of JSON in ctxext/": 326,
    "lines of scripts/": 5_787,
    "lines of tests/": 54_456,
    "lines to read: add a frequency method": 1_277,
    "lines to read: mend a defect of unpatch": 1_676,
    "lines to read: add a family": 1_795,
    "lines to read: mend a defect of caches": 2_616,
    "lines to read: add a column to the perplexity report": 1_306,
    "look-ups of the base model and its text config": 80,
    "parameters of the widest command": 5,
}
# The ceilings count so many methods. Each further method, with its tests and its line of listed.json, may add ROOM.
COUNTED_METHODS = 36
ROOM = {"tokens of code": 700, "lines of tests/": 80, "lines of JSON in ctxext/": 1}


def imports() -> dict[str, frozenset[str]]:
    """Return what each module imports, the face aside: it loads the verbs by their names."""
    return {name: imported(name) for name in modules()}


def pairs() -> list[tuple[str, str]]:
    """Return each module with each that it imports."""
    return [(name, other) for name, others in imports().items() for other in sorted(others)]


def room(name: str) -> str:
    """The folder or file at the top of the package; empty for the package's own face."""
    return name.partition(".")[2].partition(".")[0]


def test_there_is_something_to_look_at() -> None:
    assert len(pairs()) >= 300
    assert {room(name) for name in modules()} - {""} == set(ROOMS), "give a new folder or file its place in ROOMS"


def test_no_import_runs_upwards() -> None:
    """Nor through the face, which imports everything."""
    upward = [
        f"{name} -> {other}"
        for name, other in pairs()
        if name != "ctxext" and (room(other) == "" or ROOMS.index(room(name)) < ROOMS.index(room(other)))
    ]
    assert upward == [], "move what both need into the lower of the two rooms, or below them (ROOMS has the order)"


def test_the_laboratory_is_imported_by_the_command_line_only() -> None:
    users = {room(name) for name, other in pairs() if room(other) == "laboratory"}
    assert users == {"laboratory", "cli"}, "move what others need out of the laboratory"


def test_no_circle() -> None:
    left = {name: {other for other in others if other in modules()} for name, others in imports().items()}
    while True:
        ended = {name for name, others in left.items() if not others}
        if not ended:
            break
        left = {name: others - ended for name, others in left.items() if name not in ended}
    assert sorted(left) == [], "some of these import each other in a circle: move what they share into a file below"


def test_a_private_file_is_imported_in_its_own_folder_only() -> None:
    across = [
        f"{name} -> {other}"
        for name, other in pairs()
        if other.rpartition(".")[2].startswith("_") and other.rpartition(".")[0] != name.rpartition(".")[0]
    ]
    public = "take the underscore off the file's name, or move it into the folder that imports it"
    assert [pair for pair in across if "__main__" not in pair] == [], public


def test_a_class_name_exists_once() -> None:
    places = defaultdict(list)
    for name, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(name)
    assert len(places) >= 150
    assert {name: where for name, where in places.items() if len(where) > 1} == {}, "rename one of each pair"


def test_docstrings_begin_with_a_verb_and_arguments_with_a_noun() -> None:
    assert riddles(PACKAGE) == [], "begin with a verb in the imperative ('Return the ...'), a property with its noun"
    assert args_without_a_noun(PACKAGE) == [], "begin each line of Args with a noun ('Tokens that ...')"


def test_the_house_does_not_grow() -> None:
    figures, more = measure(), max(0, len(known_methods()) - COUNTED_METHODS)
    assert CEILINGS.keys() <= figures.keys(), "scripts/house.py measures no such figure"
    most = {name: ceiling + more * ROOM.get(name, 0) for name, ceiling in CEILINGS.items()}
    over = [f"{name}: {figures[name]:,}, allowed {most[name]:,}" for name in most if figures[name] > most[name]]
    assert not over, (
        f"{'; '.join(over)}. Remove as much elsewhere, and measure again with `python scripts/house.py`. Or raise the "
        "number in CEILINGS above, and say in that commit's message what falls for it (scripts/check_ceilings.py reads "
        "it): '-120 lines: the old search', or '-900 tokens: ...'."
    )
