"""The tables of a comparison, as text: the same for terminal, Markdown and page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ctxext.evaluation.comparison.result import ComparisonResult, Row
from ctxext.evaluation.labels import tokens_label
from ctxext.evaluation.report.sentences import hidden_keys, windows_in_words
from ctxext.evaluation.truncation import TRUNCATED, UNPATCHED

__all__ = ["TextTable", "csv_rows", "main_table", "other_tables", "passkey_grids"]

NONE = "\N{EN DASH}"


@dataclass(frozen=True)
class TextTable:
    """A table with a header row and a header column.

    Args:
        caption: what it shows.
        header: column names; the first is of the header column.
        rows: cells.
        emphasis: for each row "best", "reference" or nothing.
    """

    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    emphasis: tuple[str, ...]


def main_table(result: ComparisonResult) -> TextTable:
    """Short context, each length against truncation, and hidden keys: one row per reading, references first."""
    beyond = [verdict.length for verdict in result.verdicts]
    window = tokens_label(result.trained_length)
    ends = [score.end for score in result.row(UNPATCHED).scores if score.length in beyond]
    header = ["", f"inside {window}", "vs unpatched"]
    for end in ends:
        header += [f"{tokens_label(end.start)}-{tokens_label(end.stop)}", "vs best truncation"]
    with_keys = any(hidden_keys(row)[1] for row in result.rows)
    header += ["hidden keys"] if with_keys else []
    rows = []
    for row in _ordered(result):
        gap = NONE if row.reading.is_reference else str(row.short_context)
        cells = [row.reading.label, _perplexity(row.inside.perplexity), gap]
        for length in beyond:
            score = row.at(length)
            cells.append(_with_window(row, score.end.perplexity, score.window) if score else NONE)
            is_itself = row.reading.name == TRUNCATED
            cells.append(str(score.versus_truncation) if score and not is_itself else NONE)
        cells += [_fraction(*hidden_keys(row))] if with_keys else []
        rows.append(tuple(cells))
    return TextTable(
        caption=f"Perplexity inside the trained {window} tokens and at the end of each length; differences of loss in "
        f"nats per token ± standard error over {result.unit}; best truncation: whichever of the last "
        f"{windows_in_words(result.trained_length, 'or')} tokens predicts those best"
        + ("; passkeys found where truncation cuts the key off" if with_keys else ""),
        header=tuple(header),
        rows=tuple(rows),
        emphasis=_emphasis(result),
    )


def other_tables(result: ComparisonResult) -> list[TextTable]:
    """Whole texts, single documents and methods."""
    tables = [_whole_texts(result)]
    if len(result.provenance["documents"]) > 1:
        tables.append(_single_documents(result))
    return [*tables, _methods(result)]


@dataclass(frozen=True)
class Grid:
    """A heat map of passkeys as a small table.

    Args:
        label: of the reading.
        lengths: column names.
        rows: a depth each, with its cells: the share found, the loss, and both in words.
    """

    label: str
    lengths: tuple[str, ...]
    rows: tuple[tuple[str, tuple[tuple[str, str, str], ...]], ...]


def passkey_grids(result: ComparisonResult) -> list[Grid]:
    """A heat map for each reading that was asked for passkeys."""
    grids = []
    for row in (row for row in _ordered(result) if row.passkeys):
        lengths = sorted({item.length for item in row.passkeys})
        found = {(item.depth, item.length): item for item in row.passkeys}
        rows = []
        for depth in sorted({item.depth for item in row.passkeys}):
            items = [found[depth, length] for length in lengths]
            told = [f"{item.found} of {item.trials} found, loss {item.loss:.2f}" for item in items]
            cells = [
                (f"{item.found / item.trials:.3g}", f"{item.loss:.2f}", words)
                for item, words in zip(items, told, strict=True)
            ]
            rows.append((f"{depth:g}", tuple(cells)))
        grids.append(Grid(row.reading.label, tuple(map(tokens_label, lengths)), tuple(rows)))
    return grids


def csv_rows(result: ComparisonResult) -> list[dict[str, Any]]:
    """One row per reading and length, unrounded."""
    rows = []
    for row in result.rows:
        for score in row.scores:
            gap = score.versus_truncation
            keys = [item for item in row.passkeys if item.length == score.length]
            rows.append(
                {
                    "reading": row.reading.name,
                    "factor": row.reading.factor,
                    "fingerprint": row.reading.fingerprint,
                    "length": score.length,
                    "loss_at_end": score.end.loss,
                    "perplexity_at_end": score.end.perplexity,
                    "end_start": score.end.start,
                    "window": score.window or "",
                    "versus_truncation": "" if gap is None else gap.mean,
                    "standard_error": "" if gap is None else gap.standard_error,
                    "loss_of_whole": score.whole.loss,
                    "perplexity_of_whole": score.whole.perplexity,
                    "window_of_whole": score.window_of_whole or "",
                    "loss_inside": row.inside.loss,
                    "inside_versus_unpatched": row.short_context.mean,
                    "inside_standard_error": row.short_context.standard_error,
                    "keys_found": sum(item.found for item in keys) if keys else "",
                    "keys_asked": sum(item.trials for item in keys) if keys else "",
                }
            )
    return rows


def _ordered(result: ComparisonResult) -> list[Row]:
    """References first, then the methods that reach furthest, the best of them first."""

    def place(row: Row) -> tuple[bool, int, float]:
        last = row.scores[-1]
        gap = last.versus_truncation.mean if last.versus_truncation else 0.0
        return (False, 0, 0.0) if row.reading.is_reference else (True, -last.length, gap)

    return sorted(result.rows, key=place)


def _emphasis(result: ComparisonResult) -> tuple[str, ...]:
    best = result.verdicts[-1].best
    rows = _ordered(result)
    return tuple(
        "best" if row.reading.name == best else "reference" if row.reading.is_reference else "" for row in rows
    )


def _whole_texts(result: ComparisonResult) -> TextTable:
    lengths = [tokens_label(length) for length in result.lengths]
    rows = [
        (
            row.reading.label,
            *(
                _with_window(row, score.whole.perplexity, score.window_of_whole) if (score := row.at(length)) else NONE
                for length in result.lengths
            ),
        )
        for row in _ordered(result)
    ]
    caption = (
        "Perplexity of all tokens up to each length, as published curves have it: more context and other text mixed"
    )
    return TextTable(caption, ("", *lengths), tuple(rows), _emphasis(result))


def _single_documents(result: ComparisonResult) -> TextTable:
    last = result.verdicts[-1].length
    names = result.provenance["documents"]
    rows = []
    for row in _ordered(result):
        score = row.at(last)
        told = [f"{value:+.3f}" for value in score.by_document] if score and row.reading.name != TRUNCATED else []
        rows.append((row.reading.label, *(told or [NONE] * len(names))))
    caption = (
        f"Loss minus the best truncation's at the end of {tokens_label(last)} tokens, in each document, nats per token"
    )
    return TextTable(caption, ("", *names), tuple(rows), _emphasis(result))


def _methods(result: ComparisonResult) -> TextTable:
    rows = []
    for row in _ordered(result):
        method = dict(row.reading.method or {})
        name = str(method.pop("method", NONE))
        parameters = ", ".join(f"{key}={_short(value)}" for key, value in method.items()) or NONE
        attention = [f"Attention: {row.reading.attention}."] if row.reading.attention else []
        notes = " ".join([*attention, *(f"{note.rstrip('.')}." for note in row.reading.notes)]) or NONE
        rows.append((row.reading.label, name, parameters, row.reading.fingerprint or NONE, notes))
    header = ("", "method", "parameters", "frequencies", "notes")
    return TextTable("What was measured, with a fingerprint of its frequencies", header, tuple(rows), _emphasis(result))


def _with_window(row: Row, perplexity: float, window: int | None) -> str:
    """A perplexity, and for the best truncation which it is."""
    if row.reading.name != TRUNCATED or window is None:
        return _perplexity(perplexity)
    return f"{_perplexity(perplexity)} (last {tokens_label(window)})"


def _perplexity(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.2f}"


def _fraction(found: int, asked: int) -> str:
    return f"{found}/{asked}" if asked else NONE


def _short(value: object) -> str:
    return f"<{len(value)} values>" if isinstance(value, Sequence) and not isinstance(value, str) else str(value)
