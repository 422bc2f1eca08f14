"""A report is one list of sentences, tables and figures; a terminal, Markdown and an HTML page show the same list."""

from __future__ import annotations

import base64
import html
import io
import itertools
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table as RichTable

from ctxext.errors import ResultsError
from ctxext.evaluation.report.figures import Figure, Panel, paneled
from ctxext.evaluation.report.markdown import Markdown, code, escaped, table
from ctxext.files import write_whole
from ctxext.measuring.labels import few_of
from ctxext.measuring.provenance import Provenance
from ctxext.version import __version__

FIGURES = "figures"  # the folder of a report's pictures
AGAINST = "Loss minus the best truncation's, nats per token"
POSITION_AXIS = "position in the text, tokens"
NONE = "\N{EN DASH}"
"""Cell of a table where nothing was measured."""


DIFFERENCE = re.compile(r"[-+]?[\d.,]+ ± [\d.,]+")


class Heading(str):
    """Title of a section."""


class Headline(str):
    """Sentence in bold: the answer to the question of a report."""


class Code(str):
    """Cell of a table with a command."""


@dataclass(frozen=True, kw_only=True)
class TextTable:
    """Table with a header row and a header column.

    Args:
        header: names of the columns; the first belongs to the header column.
        rows: cells as text. A cell may have two lines, for a narrow terminal; everywhere else they are one.
        styles: ``best`` or ``reference`` of single rows, by their first cell.
        prose: True where its cells are sentences, which are aligned to the left, and not numbers.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    caption: str = ""
    styles: Mapping[str, str] = field(default_factory=dict)
    prose: bool = False

    def for_terminal(self) -> RichTable:
        """Return the table, without title and caption, as rich prints it."""
        shown = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 0, 0, 1))
        for index, name in enumerate(self.header):
            lines = [line for row in self.rows for line in row[index].split("\n")]
            widest = max(lines, key=len, default="")
            whole = DIFFERENCE.fullmatch(widest) is not None  # a number is not parted from its error
            shown.add_column(
                textwrap.fill(name, len(widest)) if whole else name,
                justify="right" if index and not self.prose else "left",
                overflow="fold",
                no_wrap=whole,
            )
        for row in self.rows:
            shown.add_row(*row, style={"best": "bold", "reference": "dim"}.get(self.styles.get(row[0], "")))
        return shown

    def as_markdown(self) -> Markdown:
        """Return the table, without title and caption, as Markdown."""
        rows = [[code(cell, in_table=True) if isinstance(cell, Code) else cell for cell in row] for row in self.rows]
        return table(self.header, rows, numbers=not self.prose)


Part = TextTable | Figure | str
"""Part of a page; text that is no heading and no headline is a sentence, an item of a list."""


@dataclass(frozen=True)
class Page:
    """Everything that is shown of one measurement."""

    title: str
    parts: Sequence[Part]
    details: Sequence[Part] = ()

    @property
    def figures(self) -> list[Figure]:
        """All its figures."""
        return [part for part in (*self.parts, *self.details) if isinstance(part, Figure)]

    def show(self, console: Console) -> None:
        """Print all parts but figures, with an empty line before each table and each list."""
        # Headings and headlines are of classes below str: a plain str is a sentence, and sentences form lists.
        for is_list, parts in itertools.groupby(self.parts, key=lambda part: type(part) is str):
            if is_list:
                console.print()
            for part in parts:
                if isinstance(part, TextTable):
                    _print_table(part, console)
                elif is_list:
                    console.print(Padding(f"- {part}", (0, 0, 0, 2), expand=False))
                elif isinstance(part, str):
                    console.print(f"\n{part}", style="bold")

    def markdown(self, pictures: Mapping[str, str] | None = None) -> str:
        """Return the page as Markdown.

        Args:
            pictures: paths of figures, relative to the page, by the names of the figures; others are left out.
        """
        blocks = [f"# {escaped(self.title)}"]
        for is_list, parts in itertools.groupby((*self.parts, *self.details), key=lambda part: type(part) is str):
            texts = [_as_markdown(part, pictures or {}) for part in parts]
            blocks.append("\n".join(texts) if is_list else "\n\n".join(filter(None, texts)))
        return "\n\n".join(filter(None, blocks)) + "\n"

    def html(self) -> str:
        """Return the page as one HTML document that refers to nothing else.

        Raises:
            InvalidParameterError: matplotlib is not installed.
        """
        blocks = []
        for kind, parts in itertools.groupby((*self.parts, *self.details), key=type):
            text = "\n".join(map(_as_html, parts))
            blocks.append(f"<ul>\n{text}\n</ul>" if kind is str else text)
        title, made = html.escape(self.title), f"Made by ctxext {__version__}. This page loads nothing from elsewhere."
        return DOCUMENT.format(title=title, style=STYLE, content="\n".join(blocks), footer=made)


def _print_table(part: TextTable, console: Console) -> None:
    console.print(f"\n{part.title}\n" if part.title else "")
    console.print(part.for_terminal())
    if part.caption:
        console.print(f"\n{part.caption}", style="dim")


def _as_markdown(part: Part, pictures: Mapping[str, str]) -> str:
    if isinstance(part, TextTable):
        title = f"**{escaped(part.title)}**" if part.title else ""
        return "\n\n".join(filter(None, (title, part.as_markdown(), escaped(part.caption))))
    if isinstance(part, Figure):
        if part.name not in pictures:
            return ""
        picture = f"![{escaped(part.alternative or part.title)}]({quote(pictures[part.name])})"
        return "\n\n".join(filter(None, (picture, escaped(part.caption))))
    form = "## {}" if isinstance(part, Heading) else "**{}**" if isinstance(part, Headline) else "- {}"
    return form.format(escaped(part))


def _as_html(part: Part) -> str:
    if isinstance(part, Figure):
        picture = io.BytesIO()
        part.save(picture, caption=False)
        data = base64.b64encode(picture.getvalue()).decode()
        image = (
            f'<img width="{96 * part.size[0]:.0f}" alt="{_shown(part.alternative)}" src="data:image/png;base64,{data}">'
        )
        return f"<figure>{image}<figcaption>{_shown(part.caption)}</figcaption></figure>"
    if isinstance(part, TextTable):
        return _table_as_html(part)
    tag = "h2" if isinstance(part, Heading) else "h3" if isinstance(part, Headline) else "li"
    return f"<{tag}>{_shown(part)}</{tag}>"


def _table_as_html(part: TextTable) -> str:
    rows = []
    for row in part.rows:
        first, *others = (f"<code>{_shown(cell)}</code>" if isinstance(cell, Code) else _shown(cell) for cell in row)
        cells = "".join(f"<td>{cell}</td>" for cell in others)
        rows.append(f'<tr class="{part.styles.get(row[0], "")}"><th scope="row">{first}</th>{cells}</tr>')
    header = "".join(f'<th scope="col">{_shown(name)}</th>' for name in part.header)
    caption = f"<caption>{_shown(part.caption)}</caption>" if part.caption else ""
    head = f"<thead><tr>{header}</tr></thead>" if any(part.header) else ""
    title = f"<h4>{_shown(part.title)}</h4>" if part.title else ""
    kind, body = ' class="prose"' if part.prose else "", "\n".join(rows)
    return f'{title}<div tabindex="0"><table{kind}>{caption}{head}<tbody>\n{body}\n</tbody></table></div>'


def _shown(text: str) -> str:
    """Return a text as HTML that shows it, in one line."""
    return html.escape(" ".join(text.splitlines()))


def provenance_table(provenance: Mapping[str, Any], **facts: str) -> TextTable:
    """Return what a measurement was made of and with, as a table of two columns.

    Args:
        provenance: Provenance in the JSON of a report; missing and empty values are left out.
        facts: more of them; an underscore in a name is shown as a space.
    """
    given = {name: value for name, value in provenance.items() if value is not None}
    sha256 = {name: f"; sha256 {given[name]}" for name in ("checkpoint_sha256", "corpus_sha256") if given.get(name)}
    versions = ", ".join(f"{name} {version}" for name, version in given.get("versions", {}).items())
    rows = {
        "Checkpoint": given.get("checkpoint", "") + sha256.get("checkpoint_sha256", ""),
        "Texts": ", ".join(given.get("documents", ())) + sha256.get("corpus_sha256", ""),
        "In front of each text": given.get("prefix", ""),
        **{name.replace("_", " "): fact for name, fact in facts.items()},
        "dtype": given.get("dtype", ""),
        "Seed": str(given.get("seed", "")),
        "Device": given.get("device", ""),
        "Machine": given.get("machine", ""),
        "Versions": versions,
        "Command": Code(given.get("command", "")),
        "Made": given.get("date", ""),
    }
    return TextTable(header=("", ""), rows=[(name, fact) for name, fact in rows.items() if fact], prose=True)


def readings_table(
    title: str,
    columns: Sequence[str],
    cells: Mapping[str, Mapping[str, str]],
    *,
    missing: str = "-",
    styles: Mapping[str, str] | None = None,
) -> TextTable:
    """Return one row for each reading that has a cell, by its label; the cells are given by column."""
    rows = {label: [of.get(column, missing) for column in columns] for label, of in cells.items() if any(of.values())}
    named = [[label, *texts] for label, texts in rows.items()]
    return TextTable(header=["", *columns], rows=named, title=title, styles=styles or {})


def losses_page(
    name: str, provenance: Provenance, tables: Sequence[TextTable], sentences: Sequence[str], panels: Sequence[Panel]
) -> Page:
    """Return the page of a measurement: tables that have rows, sentences, a figure, and the provenance."""
    title = f"{provenance.checkpoint}: {few_of(provenance.documents)}"
    parts: list[Part] = [*(table for table in tables if table.rows), *sentences, paneled(name, title, panels)]
    return Page(title, parts, [provenance_table(provenance.to_dict())])


def write_page(page: Page, folder: Path, name: str, data: str) -> list[Path]:
    """Write a page as HTML, JSON (``data``) and Markdown into an existing folder, with a folder for its figures.

    Raises:
        ResultsError: a file cannot be written.
        InvalidParameterError: matplotlib is not installed.
    """
    pictures = {figure.name: f"{FIGURES}/{figure.name}.png" for figure in page.figures}
    texts = {f"{name}.html": page.html(), f"{name}.json": data, f"{name}.md": page.markdown(pictures)}
    try:
        for file, text in texts.items():
            write_whole(folder / file, text)
        (folder / FIGURES).mkdir(exist_ok=True)
        for figure in page.figures:
            figure.save(folder / pictures[figure.name], caption=False)
    except OSError as error:
        raise ResultsError(
            f"Cannot write the report to {str(folder)!r}: {error.strerror}. All finished parts are kept; make room "
            f"there and run the same command again."
        ) from error
    return [*(folder / file for file in texts), folder / FIGURES]


DOCUMENT = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<h1>{title}</h1>
{content}
<footer>{footer}</footer>
</body>
</html>
"""

# Colours are the browser's own, light or dark; lines and grey text are mixed from them.
STYLE = """
:root { color-scheme: light dark; --line: color-mix(in srgb, currentColor 20%, transparent); }
body { max-width: 72rem; margin: 0 auto; padding: 1.5rem 1rem 3rem; font: 16px/1.5 system-ui, sans-serif; }
h1, td, figcaption, code { overflow-wrap: anywhere; }
h2 { margin-top: 2.5rem; }
li, figcaption, caption { max-width: 80ch; }
figure { display: inline-block; vertical-align: top; max-width: 100%; margin: 0 1.5rem 1.5rem 0; }
img { max-width: 100%; height: auto; background: white; border-radius: 6px; }
figcaption { width: 0; min-width: 100%; }
figcaption, caption, footer, .reference { font-size: .9rem; opacity: .75; }
div { overflow-x: auto; margin: 1rem 0 2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
caption { caption-side: bottom; text-align: left; padding-top: .5rem; }
th, td { padding: .3rem .7rem .3rem 0; text-align: right; font-weight: inherit; border-bottom: 1px solid var(--line); }
thead th { vertical-align: bottom; font-weight: 600; }
th:first-child, .prose th, .prose td { text-align: left; vertical-align: top; }
:not(.prose) > * > tr > td { white-space: nowrap; }
.best { font-weight: 700; }
.prose .best td { font-weight: 400; }
"""
