"""What the repository promises about itself: no machine of ours in its files, a test file for every part."""

from __future__ import annotations

import ast
import os
import re
import runpy
import subprocess
import sys
import tomllib
import types
from pathlib import Path
from typing import Any

import pytest
import yaml

from ctxext.kernels import BACKENDS
from ctxext.laboratory.encodings import ENCODINGS
from ctxext.methods import METHODS
from ctxext.models import ARCHITECTURES

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SOURCES = sorted((ROOT / "ctxext").rglob("*.py"))
OTHERS = {"transformers", "torch"}
TEXTS = {".py", ".md", ".toml", ".yaml", ".yml", ".sh", ".txt", ".json", ".cfg", ""}


def tracked() -> list[Path]:
    """Every file that a clone has; a copy without git has what lies there."""
    if not (ROOT / ".git").exists():
        return SOURCES
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def test_there_is_something_to_look_at() -> None:
    assert len(SOURCES) >= 50
    assert set(SOURCES) & set(tracked())


def test_no_test_imports_from_another() -> None:
    """What several share stands in a file whose name begins with an underscore, or in a conftest."""
    shares = re.compile(r"^\s*from tests[.\w]*\.test_\w+ import|^\s*from tests[.\w]* import test_", re.M)
    assert [path for path in (ROOT / "tests").rglob("*.py") if shares.search(path.read_text(encoding="utf-8"))] == []


def test_no_path_of_a_machine() -> None:
    """Neither a home or work directory, nor a folder beside the repository."""
    # Spelt in two parts, so that this file does not hold what it looks for.
    forbidden = re.compile("|".join(["/" + r"(work|home|root|Users)/\w", r"\.\./" + "shared"]))
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}"
        for path in tracked()
        if path.suffix in TEXTS
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if forbidden.search(line)
    ]
    assert found == [], "write a path relative to the repository, or a name such as CHECKPOINT"


@pytest.mark.parametrize(
    ("folder", "registry"),
    [
        ("methods", METHODS),
        ("laboratory/encodings", ENCODINGS),
        ("models", ARCHITECTURES),
        ("kernels", BACKENDS),
    ],
)
def test_every_part_has_a_test_file(folder: str, registry: dict[str, type[object]]) -> None:
    tests = sorted((ROOT / "tests" / folder).glob("test_*.py"))
    parts = {cls.__module__.rpartition(".")[2] for cls in registry.values()}
    assert len(parts) >= 4
    missing = {part for part in parts if not any(_is_about(path, part) for path in tests)}
    assert missing == set(), f"write tests/{folder}/test_NAME.py for each of these: {sorted(missing)}"


def test_nothing_of_transformers_or_torch_is_reassigned() -> None:
    """No file sets, deletes or replaces anything that it reaches through a name imported from them."""
    found = [
        f"{path.relative_to(ROOT)}: {ast.unparse(place)}"
        for path in SOURCES
        for place in _changed_places(ast.parse(path.read_text(encoding="utf-8")))
    ]
    # The function that DeepSpeed puts over transformers' own for a training run, after the run.
    allowed = ["ctxext/training/parallel.py: ALL_ATTENTION_FUNCTIONS[name]"]
    assert found == allowed, "change the model through Edits, or register a function under a name of ctxext's"


def _changed_places(tree: ast.Module) -> list[ast.expr]:
    """Every place that a file changes behind a name from transformers or torch: an attribute, an item, an object."""
    theirs, changed = set[str](), list[ast.expr]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in OTHERS:
            theirs |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            theirs |= {
                alias.asname or alias.name.partition(".")[0]
                for alias in node.names
                if alias.name.partition(".")[0] in OTHERS
            }
        elif isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            changed.append(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("setattr", "delattr", "attr__")):
            changed += node.args[:1]
    return [place for place in changed if _root(place) in theirs]


def _root(place: ast.expr) -> str | None:
    while isinstance(place, ast.Attribute | ast.Subscript):
        place = place.value
    return place.id if isinstance(place, ast.Name) else None


def test_no_encoding_has_the_name_of_a_method() -> None:
    assert METHODS.keys() & ENCODINGS.keys() == set(), "give the encoding another name"


def test_tests_are_where_the_code_is() -> None:
    """A folder of tests is named as the folder of the package that it is about, or runs on everything."""
    folders = {path.parent.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("*.py")}
    strangers = {str(folder) for folder in folders if not (ROOT / "ctxext" / folder / "__init__.py").is_file()}
    assert strangers == {"contracts", "referee", "walk"}, "name a folder of tests as the folder of ctxext that it tests"
    # As packages, so that two files of one name, conftest.py among them, are two modules in every import mode.
    bare = [str(folder) for folder in folders if not (ROOT / "tests" / folder / "__init__.py").is_file()]
    assert bare == [], "add an empty __init__.py to each of these folders of tests"


# What others see of the repository: fragments of the changelog, workflows, forms


def test_fragments_are_of_a_kind_that_the_changelog_has() -> None:
    kinds = {kind["directory"] for kind in PYPROJECT["tool"]["towncrier"]["type"]}
    assert kinds == {"added", "changed", "removed", "fixed"}
    names = [path.name for path in sorted((ROOT / "changelog.d").iterdir()) if path.name != "README.md"]
    wrong = [name for name in names if not re.fullmatch(rf"\+[\w-]+\.({'|'.join(kinds)})\.md", name)]
    assert wrong == [], f"name a fragment +a-few-words.KIND.md, where KIND is one of {sorted(kinds)}"
    assert PYPROJECT["tool"]["towncrier"]["start_string"] in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_workflows_run_what_everyone_can_run() -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    commands = {}
    for path in sorted((ROOT / ".github" / "workflows").iterdir()):
        jobs = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"].values()
        commands[path.stem] = [step["run"] for job in jobs for step in job["steps"] if "run" in step]
    assert commands["nightly"] == ["make nightly PART=${{ matrix.part }}/8"]
    assert commands["ci"][:2] == [".ci/run", "make core PYTHON=python${{ matrix.python }}"]
    assert "scripts/check_ceilings.py" in commands["ci"][2]
    assert ".ci/run" in commands["release"]
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert "nightly" in targets


def test_links_of_the_page_on_an_index_are_absolute(monkeypatch: pytest.MonkeyPatch) -> None:
    interface = types.SimpleNamespace(MetadataHookInterface=object)  # hatchling is installed while a wheel is built
    monkeypatch.setitem(sys.modules, "hatchling.metadata.plugin.interface", interface)
    hook = runpy.run_path(str(ROOT / "scripts" / "index_page.py"))["IndexPage"]()
    hook.root = str(ROOT)
    plain: dict[str, Any] = {"version": "1.2"}
    named = plain.copy()
    monkeypatch.delenv("GITHUB_REPOSITORY", raising=False)
    hook.update(plain)
    monkeypatch.setenv("GITHUB_REPOSITORY", "us/ctxext")
    hook.update(named)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert (plain["readme"]["text"], plain["urls"]) == (readme, {})
    links = r'(?:\]\(|src="|href=")([^)"]+)'
    before, after = re.findall(links, readme), re.findall(links, named["readme"]["text"])
    assert len(before) == len(after) > 20
    assert {link for link in after if not re.match("https?:|#", link)} == set()
    pictures = re.findall(r'(?:!\[[^\]]*\]\(|src=")(\S+?)[)"]', named["readme"]["text"])
    assert all("raw.githubusercontent.com/us/ctxext/v1.2/" in link or "//img." in link for link in pictures)


def _is_about(path: Path, part: str) -> bool:
    """By its name, or because families that are alike share a file and are its parameters."""
    stem = path.stem.removeprefix("test_")
    listed = re.compile(rf'(?:parametrize\("\w+", |^FAMILIES = )\[[^\]]*"{part}"', re.M)
    return stem == part or stem.startswith(f"{part}_") or listed.search(path.read_text(encoding="utf-8")) is not None
