"""A commit that raises a ceiling says what falls for it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from scripts.check_ceilings import HOUSE, unexplained


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with a ceiling."""
    folder = tmp_path_factory.mktemp("house")
    (folder / HOUSE).parent.mkdir()
    (folder / HOUSE).touch()
    for words in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *words], cwd=folder, check=True)
    return folder


def commit(folder: Path, lines: int, message: str) -> None:
    (folder / HOUSE).write_text(f'CEILINGS = {{"lines": {lines}}}  # {message}\n')
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", *identity, "commit", "-qam", message], cwd=folder, check=True)


@pytest.mark.parametrize(
    ("lines", "message", "is_refused"),
    [
        (101, "A new method", True),
        (101, "A new method, after 52 tries", True),
        (101, "A new method (issue 52 allows 600 lines)", True),
        (101, "A new method; -900 tokens: the old search", False),
        (101, "A new method; -120 lines: the old search", False),
        (101, "A new method, and 120 lines fell with the old search", False),
        (100, "A new method", False),
        (99, "A new method", False),
    ],
)
def test_a_raise_names_its_reason(lines: int, message: str, is_refused: bool, folder: Path) -> None:
    commit(folder, 100, "Begin")
    commit(folder, lines, message)
    commit(folder, lines, "Another change")
    sentences = unexplained("HEAD~2..HEAD", folder)
    assert len(sentences) == is_refused
    assert all("ceiling of lines" in sentence for sentence in sentences)
