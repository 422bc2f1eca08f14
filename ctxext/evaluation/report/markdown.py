"""Markdown in which names of documents, checkpoints and files are text and nothing else."""

from __future__ import annotations

import re
from collections.abc import Sequence

# An underscore inside of a word is never emphasis, and methods' names are full of them.
SPECIAL = re.compile(r"[\\`*\[\]|~$]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|^#|#$")


class Markdown(str):
    """Text that is Markdown already and is not escaped again."""


def escaped(text: object) -> Markdown:
    """Return a text as Markdown that shows it: no markup, no HTML, no formula, in one line."""
    if isinstance(text, Markdown):
        return text
    line = " ".join(str(text).splitlines())
    line = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return Markdown(SPECIAL.sub(lambda found: "\\" + found[0], line))


def code(text: str, *, in_table: bool = False) -> Markdown:
    """Return a text as a code span, in one line, whatever backticks it holds."""
    line = " ".join(text.splitlines())
    marks = "`" * (max(map(len, re.findall("`+", line)), default=0) + 1)
    room = " " if "`" in line else ""
    return Markdown(f"{marks}{room}{line.replace('|', chr(92) + '|') if in_table else line}{room}{marks}")


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: bool = False) -> Markdown:
    """Return a table, its cells escaped; with ``numbers`` all columns but the first are aligned to the right."""
    ruled = ["---", *["---:" if numbers else "---"] * (len(header) - 1)]
    lines: list[list[str]] = [[escaped(cell) for cell in cells] for cells in (header, *rows)]
    return Markdown("\n".join(f"| {' | '.join(cells)} |" for cells in (lines[0], ruled, *lines[1:])))
