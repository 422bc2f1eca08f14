"""Fill the marked blocks of README.md from the code and from the measured results, or check that they are current.

    python scripts/update_readme.py            # rewrite
    python scripts/update_readme.py --check    # exit 1 if a block is not what the code and the results say

A block stands between ``<!-- name -->`` and ``<!-- /name -->``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from ctxext._render import methods_markdown

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "scripts" / "results"
README = ROOT / "README.md"


def blocks() -> dict[str, str]:
    """Return the text of every block by its name."""
    measured = {name: (RESULTS / f"{name}.md").read_text() for name in ("demo", "coverage", "bloom")}
    source = (ROOT / "ctxext" / "methods" / "abf.py").read_text()
    return {**measured, "methods": methods_markdown(), "abf": f"```python\n{source.rstrip()}\n```"}


def filled(readme: str) -> str:
    """Return ``readme`` with every block replaced.

    Raises:
        ValueError: if a block has no place in it.
    """
    for name, text in blocks().items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        readme, count = pattern.subn(lambda match, text=text: f"{match[1]}{text.rstrip()}\n{match[2]}", readme)
        if count != 1:
            raise ValueError(f"README.md has {count} places for the block {name!r}, expected 1.")
    return readme


def main(check: Annotated[bool, typer.Option(help="only say whether it is current")] = False) -> None:
    """Fill the blocks of README.md."""
    before = README.read_text()
    after = filled(before)
    if check and after != before:
        typer.echo("README.md is not current: run python scripts/update_readme.py", err=True)
        raise typer.Exit(1)
    if not check:
        README.write_text(after)


if __name__ == "__main__":
    typer.run(main)
