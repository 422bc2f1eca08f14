"""The list of methods, printed from the file in their folder, so that none of them is imported."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ctxext.cli.options import print_json
from ctxext.progress import terminal
from ctxext.recommended import RECOMMENDED
from ctxext.registry import listed_methods

COLUMNS = ("method", "group", "what it does", "pick it", "dynamic", "stock form on a Llama", "source")
# What a method extends, then what an encoding changes, in the order of listings. A method of several groups stands with
# the first.
GROUPS = ("rotary", "remapping", "ALiBi", "tables", "buckets", "input", "scores", "attention", "other")


def method_rows(*, to_train: bool = False) -> list[dict[str, str]]:
    """Return one row per listed method, group by group."""
    known = listed_methods().values()
    rows = [{name: row[name] for name in COLUMNS} for row in known if row["to train"] == to_train]
    return sorted(rows, key=lambda row: GROUPS.index(_heading(row)))


def _heading(row: Mapping[str, str]) -> str:
    """Return the first group of a row."""
    return row["group"].split(", ")[0]


def methods_table(rows: Sequence[Mapping[str, str]]) -> Table:
    """Lay ``method_rows`` out for a terminal: one paragraph each, under the heading of its group."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 1, 0))
    for heading, group in itertools.groupby(rows, key=_heading):
        table.add_row(Text(heading, style="bold"), "")
        for row in group:
            what = Text(row["what it does"] + "\n")
            what.append(f"Pick it {row['pick it']}.\n".replace("`", ""))
            what.append(
                f"{row['group']}; stock form on a Llama: {row['stock form on a Llama']}; "
                f"dynamic: {row['dynamic']}; {row['source']}",
                style="dim",
            )
            table.add_row(Text(row["method"], style="bold cyan"), what)
    return table


def methods_markdown(rows: Sequence[Mapping[str, str]]) -> str:
    """Write ``method_rows`` as the Markdown of docs/guides/methods.md."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for row in rows:
        link = re.sub(r"^arXiv:(\S+)$", r"[arXiv:\1](https://arxiv.org/abs/\1)", row["source"])
        cells = {**row, "method": f"`{row['method']}`", "source": link}.values()
        lines.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    return "\n".join(lines)


def show_methods(*, to_train: bool, as_json: bool, markdown: bool) -> None:
    """Print ``method_rows`` as a terminal's table, JSON or Markdown."""
    rows = method_rows(to_train=to_train)
    if as_json:
        print_json(rows)
    elif markdown:
        typer.echo(methods_markdown(rows))
    else:
        console = terminal()
        if not to_train:
            show_heading("take first", RECOMMENDED, console)
            console.print()
        console.print(methods_table(rows))


def show_heading(heading: str, sentences: Sequence[object], console: Console) -> None:
    """Print sentences under a heading, nothing where there are none."""
    if sentences:
        console.print(Text(f"\n{heading}", style="bold"))
        for sentence in sentences:
            console.print(f"  {sentence}", soft_wrap=True)
