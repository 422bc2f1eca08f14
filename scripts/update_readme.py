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
import yaml

from ctxext.cli.show import methods_markdown

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "scripts" / "results"
README = ROOT / "README.md"
CONFIGS = ROOT / "recipes" / "configs"


def blocks() -> dict[str, str]:
    """Return the text of every block by its name."""
    measured = {name: (RESULTS / f"{name}.md").read_text() for name in ("demo", "coverage", "bloom")}
    source = (ROOT / "ctxext" / "methods" / "abf.py").read_text()
    return {
        **measured,
        "recipes": recipes_markdown(),
        "methods": methods_markdown(),
        "abf": f"```python\n{source.rstrip()}\n```",
    }


def header_of(config: Path) -> dict[str, str]:
    """What the comment in front of a config says about it: hardware, memory, time, expected numbers."""
    found: dict[str, str] = {}
    for line in config.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        entry = re.match(r"# ([A-Z][a-z]+)  +(\S.*)", line)
        if entry:
            found[entry[1]] = entry[2]
        elif found:
            found[list(found)[-1]] += " " + line.lstrip("# ")
    return found


def recipes_markdown() -> str:
    """A table of all configs, from the comments in front of them; those that differ in the method alone share a row."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for path in sorted(CONFIGS.rglob("*.yaml")):
        header = header_of(path)
        method = yaml.safe_load(path.read_text(encoding="utf-8"))["extension"]["method"]
        family = path.stem.replace(f"-{method}", "-*")
        key = (family, header["Hardware"], _short(header["Memory"]), _short(header["Time"]))
        rows.setdefault(key, []).append(f"[{method}]({path.relative_to(ROOT)})")
    lines = ["| `recipes/configs/` | `*` | hardware | memory | time |", "|---|---|---|---|---|"]
    lines += [f"| `{family}` | {', '.join(links)} | {' | '.join(rest)} |" for (family, *rest), links in rows.items()]
    return "\n".join(lines)


def _short(text: str) -> str:
    """Up to and with the first mark of being measured or estimated, without how."""
    number, mark, _ = re.split(r"\((measured|estimated)", text, maxsplit=1)
    return f"{number}({mark})"


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
