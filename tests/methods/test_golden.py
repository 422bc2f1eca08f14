"""Golden files say where they come from, and none lies unused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

FILES = sorted((Path(__file__).parents[1] / "golden").glob("*.json"))


def test_there_are_golden_files() -> None:
    assert len(FILES) >= 9


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_provenance_is_complete(path: Path) -> None:
    text = path.read_text()
    provenance = json.loads(text)["provenance"]
    assert re.fullmatch(r"[\w-]+/[\w-]+", provenance["repository"])
    for commit in (provenance["commit"], provenance["made_at"]):
        assert re.fullmatch(r"[0-9a-f]{40}", commit)
    assert provenance["command"].startswith(f"python scripts/make_golden.py {path.stem} ")
    assert provenance["definitions"]
    assert {"python", "torch"} <= provenance["versions"].keys()
    assert not re.search(r'"/|"~|/(home|work|tmp)/', text), "a path of the machine that made it"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_file_is_used(path: Path) -> None:
    tests = "".join(test.read_text() for test in Path(__file__).parents[1].rglob("test_*.py"))
    assert f'golden("{path.stem}"' in tests or f'"golden" / "{path.name}"' in tests
