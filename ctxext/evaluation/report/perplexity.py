"""A perplexity measurement in a terminal and as a figure."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ctxext.evaluation.checkpoint import Checkpoint
from ctxext.evaluation.labels import few_of, label_of, tokens_label
from ctxext.evaluation.perplexity import (
    LENGTH,
    POSITIONS,
    PerplexityPlan,
    PerplexityReading,
    PerplexityResult,
    PerplexityScore,
)
from ctxext.evaluation.report.style import COLOURS, FAINT, draw_grid, plain_table, plain_ticks, saved_figure, say
from ctxext.evaluation.truncation import TRUNCATED, UNPATCHED, is_reference, window_name, window_of
from ctxext.texts.corpus import Corpus

TITLES = {
    "position": "Perplexity up to a length",
    "sliding": "Sliding-window perplexity by window",
    "yarn": "YaRN's perplexity by window",
    "longlora": "LongLoRA's perplexity by window",
}


def announce(console: Console, checkpoint: Checkpoint, corpus: Corpus, plan: PerplexityPlan) -> None:
    """Say what is about to be measured, on what."""
    short = corpus.read - len(corpus.documents)
    shown = few_of([document.name for document in corpus.documents])
    about = (
        f", trained to {tokens_label(plan.trained_length)} tokens, in "
        f"{checkpoint.dtype_note}, reads {corpus.tokens:,} tokens of {shown}"
        + (f" ({short} shorter documents left out)" if short else "")
        + f"; in front of each: {corpus.prefix}."
    )
    console.print(Text.assemble((checkpoint.name, "bold"), about))


def show(result: PerplexityResult, console: Console) -> None:
    """Print the tables, the notes and the sentence."""
    kinds = {"Perplexity by position": POSITIONS} if result.mode == "position" else {}
    for title, kind in (kinds | {TITLES[result.mode]: LENGTH}).items():
        console.print(f"\n{title}\n")
        console.print(_table(result, kind, _perplexity, "-"))
    kind = POSITIONS if kinds else LENGTH
    if any(score.versus_truncation for reading in result.readings for score in reading.at(kind)):
        console.print("\nLoss minus the best truncation's, nats per token ± standard error\n")
        console.print(_table(result, kind, _difference, ""))
    extension = result.extension
    if extension is not None and extension.in_window is not None:
        inside = extension.in_window
        console.print(
            f"\nInside the trained window, {label_of(extension.name)} minus unpatched: {inside} nats per token, "
            f"perplexity x{math.exp(inside.mean):.3f}."
        )
    say(console, result.notes)
    console.print(f"\n{result.sentence()}", style="bold")


def save_figure(result: PerplexityResult, path: Path) -> None:
    """Draw perplexity by position (or by length) on the left, the difference to the best truncation on the right.

    Raises:
        InvalidParameterError: matplotlib is not installed.
    """
    kind = POSITIONS if result.mode == "position" else LENGTH
    compared = [one for one in result.readings if any(score.versus_truncation for score in one.at(kind))]
    title = f"{result.provenance.checkpoint}: {few_of(result.provenance.documents)}"
    with saved_figure(path, (10.0 if compared else 6.5, 4.5), title) as figure:
        axes = figure.subplots(1, 1 + bool(compared), squeeze=False)[0]
        _draw_perplexity(axes[0], result, kind)
        if compared:
            _draw_differences(axes[1], compared, kind)


def _table(
    result: PerplexityResult, kind: str, cell: Callable[[PerplexityReading, PerplexityScore], str], missing: str
) -> Table:
    """One row per reading that has a cell, one column per span or length."""
    columns = [_span(score) for score in result.readings[-1].at(kind)]
    rows: list[list[str]] = []
    for reading in result.readings:
        cells = {_span(score): text for score in reading.at(kind) if (text := cell(reading, score))}
        if cells:
            rows.append([label_of(reading.name), *(cells.get(column, missing) for column in columns)])
    references = [one.name for one in result.readings if one.name != UNPATCHED and is_reference(one.name)]
    table = plain_table(["", *columns], rows, {label_of(name): "dim" for name in references})
    table.columns[0].no_wrap = True
    return table


def _perplexity(reading: PerplexityReading, score: PerplexityScore) -> str:
    """A number, for the best truncation with the window that it has there."""
    if reading.name != TRUNCATED or score.window is None:
        return _number(score.perplexity)
    return f"{_number(score.perplexity)}\n({label_of(window_name(score.window))})"


def _difference(reading: PerplexityReading, score: PerplexityScore) -> str:
    return str(score.versus_truncation or "").replace(" ± ", "\n±")


def _span(score: PerplexityScore) -> str:
    start = f"{tokens_label(score.start)}-" if score.kind == POSITIONS else ""
    return f"{start}{tokens_label(score.stop)}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.2f}"


def _draw_perplexity(axes: Any, result: PerplexityResult, kind: str) -> None:
    drawn = [reading for reading in result.readings if window_of(reading.name) is None]
    for reading in drawn:
        scores = reading.at(kind)
        x = [(score.start + score.stop) / 2 if kind == POSITIONS else score.stop for score in scores]
        y = [score.perplexity for score in scores]
        dashed = "--" if reading.name == TRUNCATED else "-"
        axes.plot(x, y, color=_colour(reading), ls=dashed, marker="o", ms=4, lw=1.8, label=label_of(reading.name))
    axes.axvline(result.trained_length, color=FAINT, lw=1.2, zorder=0)
    values = [score.perplexity for reading in drawn for score in reading.at(kind)]
    if max(values) > 3 * min(values):
        axes.set_yscale("log")
        plain_ticks(axes, *axes.get_ylim())
    else:
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axes.xaxis.set_major_formatter(lambda value, _: tokens_label(int(value)))
    step = 2 ** max(0, math.ceil(math.log2(result.lengths[-1] / 8)))
    axes.set_xticks(range(0, result.lengths[-1] + 1, step))
    axes.set_xlabel("position in the text, tokens" if kind == POSITIONS else "tokens in a window")
    title = "Perplexity by position" if kind == POSITIONS else TITLES[result.mode]
    draw_grid(axes, f"{title} (line: trained window)")
    axes.legend(frameon=False, fontsize=9)


def _draw_differences(axes: Any, readings: list[PerplexityReading], kind: str) -> None:
    axes.axhline(0, color=COLOURS[TRUNCATED], lw=1.4, ls="--")
    shown = [one for one in readings if not is_reference(one.name)]
    shown = shown or [one for one in readings if one.name == UNPATCHED]
    labels: list[str] = []
    for reading in shown:
        pairs = [(score, score.versus_truncation) for score in reading.at(kind) if score.versus_truncation]
        labels = [_span(score) for score, _ in pairs]
        means, errors = [pair.mean for _, pair in pairs], [pair.margin for _, pair in pairs]
        axes.errorbar(range(len(means)), means, yerr=errors, fmt="o", ms=5, lw=1.6, color=_colour(reading))
    axes.set_xticks(range(len(labels)), labels, fontsize=9)
    axes.margins(x=0.15, y=0.2)
    draw_grid(axes, "Loss minus the best truncation's, nats per token, 95 %")
    axes.set_xlabel("below the line: the old text helps", fontsize=9)


def _colour(reading: PerplexityReading) -> str:
    return COLOURS.get(reading.name, COLOURS["yarn"])
