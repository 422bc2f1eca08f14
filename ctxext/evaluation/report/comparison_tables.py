"""The tables of a comparison, as text: the same for terminal, Markdown and page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ctxext.evaluation.comparison.result import ComparisonResult, Row
from ctxext.evaluation.labels import tokens_label
from ctxext.evaluation.report.sentences import hidden_keys, windows_in_words
from ctxext.evaluation.truncation import TRUNCATED, UNPATCHED

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
    header = [f"inside {window}", "vs unpatched"]
    for end in ends:
        header += [f"{tokens_label(end.start)}-{tokens_label(end.stop)}", "vs best truncation"]
    with_keys = any(hidden_keys(row)[1] for row in result.rows)
    header += ["hidden keys"] if with_keys else []

    def cells(row: Row) -> list[str]:
        found = [_perplexity(row.inside.perplexity), NONE if row.reading.is_reference else str(row.short_context)]
        for length in beyond:
            score = row.at(length)
            found.append(_with_window(row, score.end.perplexity, score.window) if score else NONE)
            is_itself = row.reading.name == TRUNCATED
            found.append(str(score.versus_truncation) if score and not is_itself else NONE)
        keys, asked = hidden_keys(row)
        return found + ([f"{keys}/{asked}" if asked else NONE] if with_keys else [])

    caption = (
        f"Perplexity inside the trained {window} tokens and at the end of each length; differences of loss in "
        f"nats per token ± standard error over {result.unit}; best truncation: whichever of the last "
        f"{windows_in_words(result.trained_length, 'or')} tokens predicts those best"
        + ("; passkeys found where truncation cuts the key off" if with_keys else "")
    )
    return _table(result, caption, header, cells)


def other_tables(result: ComparisonResult) -> list[TextTable]:
    """Whole texts, single documents and methods."""
    several = len(result.provenance["documents"]) > 1
    return [_whole_texts(result), *([_single_documents(result)] if several else []), _methods(result)]


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
        cells = {
            (item.depth, item.length): (
                f"{item.found / item.trials:.3g}",
                f"{item.loss:.2f}",
                f"{item.found} of {item.trials} found, loss {item.loss:.2f}",
            )
            for item in row.passkeys
        }
        depths = sorted({item.depth for item in row.passkeys})
        rows = [(f"{depth:g}", tuple(cells[depth, length] for length in lengths)) for depth in depths]
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


def _table(
    result: ComparisonResult, caption: str, header: Sequence[str], cells: Callable[[Row], Sequence[str]]
) -> TextTable:
    """A table with a row per reading, whose label stands in front of its cells."""
    rows, best = _ordered(result), result.verdicts[-1].best
    return TextTable(
        caption=caption,
        header=("", *header),
        rows=tuple((row.reading.label, *cells(row)) for row in rows),
        emphasis=tuple(
            "best" if row.reading.name == best else "reference" if row.reading.is_reference else "" for row in rows
        ),
    )


def _whole_texts(result: ComparisonResult) -> TextTable:
    def cells(row: Row) -> list[str]:
        scores = [row.at(length) for length in result.lengths]
        return [_with_window(row, one.whole.perplexity, one.window_of_whole) if one else NONE for one in scores]

    caption = (
        "Perplexity of all tokens up to each length, as published curves have it: more context and other text mixed"
    )
    return _table(result, caption, [tokens_label(length) for length in result.lengths], cells)


def _single_documents(result: ComparisonResult) -> TextTable:
    last = result.verdicts[-1].length
    names = result.provenance["documents"]

    def cells(row: Row) -> list[str]:
        score = row.at(last)
        gaps = score.by_document if score and row.reading.name != TRUNCATED else ()
        return [f"{gap:+.3f}" for gap in gaps] or [NONE] * len(names)

    caption = (
        f"Loss minus the best truncation's at the end of {tokens_label(last)} tokens, in each document, nats per token"
    )
    return _table(result, caption, names, cells)


def _methods(result: ComparisonResult) -> TextTable:
    def cells(row: Row) -> list[str]:
        method = dict(row.reading.method or {})
        name = str(method.pop("method", NONE))
        parameters = ", ".join(f"{key}={_short(value)}" for key, value in method.items()) or NONE
        attention = [f"Attention: {row.reading.attention}."] if row.reading.attention else []
        notes = " ".join([*attention, *(f"{note.rstrip('.')}." for note in row.reading.notes)]) or NONE
        return [name, parameters, row.reading.fingerprint or NONE, notes]

    caption = "What was measured, with a fingerprint of its frequencies"
    return _table(result, caption, ["method", "parameters", "frequencies", "notes"], cells)


def _with_window(row: Row, perplexity: float, window: int | None) -> str:
    """A perplexity, and for the best truncation which it is."""
    if row.reading.name != TRUNCATED or window is None:
        return _perplexity(perplexity)
    return f"{_perplexity(perplexity)} (last {tokens_label(window)})"


def _perplexity(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.2f}"


def _short(value: object) -> str:
    return f"<{len(value)} values>" if isinstance(value, Sequence) and not isinstance(value, str) else str(value)
