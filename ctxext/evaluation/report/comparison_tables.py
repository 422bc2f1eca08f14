"""The laboratory's table, until it takes ``ctxext.evaluation.report.page``."""

from __future__ import annotations

from dataclasses import dataclass

from rich.table import Table as RichTable

from ctxext.evaluation.report.style import plain_table

NONE = "\N{EN DASH}"


@dataclass(frozen=True)
class LabTable:
    """A table with a header row and a header column."""

    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    emphasis: tuple[str, ...]


TextTable = LabTable


def terminal_table(table: LabTable) -> RichTable:
    """Return a table for a terminal."""
    meaning = {"best": "bold", "reference": "dim", "": None}
    styles = {row[0]: meaning[emphasis] for row, emphasis in zip(table.rows, table.emphasis, strict=True)}
    return plain_table([name.replace("vs ", "vs\n") for name in table.header], table.rows, styles)
