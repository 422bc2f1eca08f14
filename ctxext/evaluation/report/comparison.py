"""The files that a comparison ends in: JSON, CSV, Markdown, figures, and one page that needs nothing else."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

from rich.table import Table as RichTable

from ctxext.evaluation.comparison.result import ComparisonResult
from ctxext.evaluation.labels import tokens_label
from ctxext.evaluation.report.comparison_figures import drawings
from ctxext.evaluation.report.comparison_tables import TextTable, csv_rows, main_table, other_tables, passkey_grids
from ctxext.evaluation.report.sentences import headline, sentences, verdict_line, windows_in_words
from ctxext.evaluation.report.style import plain_table, rendered, require_report, write_pages
from ctxext.evaluation.truncation import windows_of

PAGE, DATA, ROWS, MARKDOWN = "report.html", "report.json", "report.csv", "report.md"


def write_report(result: ComparisonResult, output: Path) -> list[Path]:
    """Write all files of a report and return their paths, the page first.

    Raises:
        ResultsError: a file cannot be written.
        InvalidParameterError: matplotlib or jinja2 is not installed.
    """
    require_report()
    figures = [figure for group in drawings(result) for figure in group]
    texts = {
        PAGE: page(result),
        DATA: json.dumps(result.to_dict(), indent=1, ensure_ascii=False) + "\n",
        ROWS: _csv(result),
        MARKDOWN: _rendered("comparison.md.jinja", result, figures=figures),
    }
    return write_pages(output, texts, figures)


def page(result: ComparisonResult) -> str:
    """The report as one HTML document without any reference to another."""
    # A page shows passkeys as coloured tables, which fit a phone and can be read aloud.
    groups = [[figure for figure in group if figure.name != "passkeys"] for group in drawings(result)]
    figures = [[(figure, figure.svg()) for figure in group] for group in groups]
    return _rendered("comparison.html.jinja", result, figures=figures)


def terminal_table(table: TextTable) -> RichTable:
    """A table for a terminal."""
    meaning = {"best": "bold", "reference": "dim", "": None}
    styles = {row[0]: meaning[emphasis] for row, emphasis in zip(table.rows, table.emphasis, strict=True)}
    return plain_table([name.replace("vs ", "vs\n") for name in table.header], table.rows, styles)


def _rendered(template: str, result: ComparisonResult, *, figures: Any) -> str:
    window, last = tokens_label(result.trained_length), tokens_label(result.lengths[-1])
    return rendered(
        template,
        result=result,
        title=f"{result.provenance['checkpoint']}, read to {last} tokens",
        window=window,
        last=last,
        windows=windows_in_words(result.trained_length, "or"),
        headline=headline(result),
        beats=result.verdicts[-1].beats,
        verdict_lines=[verdict_line(result, verdict) for verdict in result.verdicts],
        sentences=sentences(result),
        main=main_table(result),
        tables=other_tables(result),
        grids=passkey_grids(result),
        figures=figures,
        facts=_facts(result),
    )


def _facts(result: ComparisonResult) -> dict[str, str]:
    """Provenance as a reader wants it."""
    found, made = result.provenance, result.made
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    truncations = len(windows_of(result.trained_length))
    lost = result.verdicts[-1].versus_truncation.errors_needed(truncations)
    seeds = f"{found['seed']} (passkeys)" if any(row.passkeys for row in result.rows) else "nothing random"
    return {
        "Checkpoint": f"{found['checkpoint']}, sha256 {found['checkpoint_sha256']}",
        "Trained length": f"{result.trained_length:,} tokens",
        "Texts": f"{', '.join(found['documents'])}; sha256 {found['corpus_sha256']}",
        "In front of each text": found["prefix"],
        "dtype": found["dtype"],
        "Seed": seeds,
        "Device": f"{found['device']}; {found['machine']}",
        "Versions": versions,
        "Standard errors": f"over {result.unit}; at {result.verdicts[-1].standard_errors:.2f} of them a gain counts "
        f"(5 percent, Bonferroni for {result.verdicts[-1].candidates} candidates), and a loss at {lost:.2f} (for "
        f"{truncations} truncations)",
        "Command": made["command"],
        "Made": f"{made['date']}, {made['seconds']:,.0f} s of computing in {made['processes']} process"
        + ("es" if made["processes"] > 1 else ""),
    }


def _csv(result: ComparisonResult) -> str:
    rows = csv_rows(result)
    with io.StringIO(newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return file.getvalue()
