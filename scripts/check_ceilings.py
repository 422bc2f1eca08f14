"""Refuse commits that raise a ceiling of ``tests/test_house.py`` without saying what falls for it.

    python scripts/check_ceilings.py origin/main..HEAD

The message of such a commit names the lines or tokens of code that fall ("-120 lines: ..."); the issue that asked for
the growth does not suffice. A merge is compared with the parent whose ceiling is higher.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

HOUSE = "tests/test_house.py"
REASON = re.compile(r"-\s?\d[\d,]*\s(lines|tokens)|\(-\d[\d,]*\)|\b[\d,]+\s(lines|tokens)\s(fall|fell)", re.I)


def git(*arguments: str, folder: Path) -> str:
    """Return what git prints; empty where it fails, as for a file that a commit does not have."""
    return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False).stdout


def ceilings(commit: str, folder: Path) -> dict[str, int]:
    """Return the ceilings that a commit states."""
    for node in ast.parse(git("show", f"{commit}:{HOUSE}", folder=folder)).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CEILINGS":
            return dict(ast.literal_eval(node.value))
    return {}


def unexplained(commits: str, folder: Path) -> list[str]:
    """Return a sentence for each commit of a range that raises a ceiling and does not say why."""
    sentences = []
    for commit in git("rev-list", "--reverse", commits, folder=folder).split():
        _, *parents = git("rev-list", "--parents", "-1", commit, folder=folder).split()
        before: dict[str, int] = {}
        for parent in parents:
            for name, most in ceilings(parent, folder).items():
                before[name] = max(most, before.get(name, most))
        after, message = ceilings(commit, folder), git("log", "-1", "--format=%B", commit, folder=folder)
        raised = [name for name in before if after.get(name, 0) > before[name]]
        if raised and not REASON.search(message):
            sentences.append(
                f"{commit[:7]} raises the ceiling of {', '.join(raised)}. Name the lines or the tokens of "
                f"code that fall for it in the commit's message."
            )
    return sentences


if __name__ == "__main__":
    found = unexplained(sys.argv[1], Path(__file__).parents[1])
    sys.exit("\n".join(found) or 0)
