"""Passage retrieval in a terminal and as a figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from ctxext.evaluation.labels import tokens_label
from ctxext.evaluation.passages import BASELINES, PassageReport, PassageResult
from ctxext.evaluation.report.style import COLOURS, DASHED, NOTE, draw_grid, looks_for, plain_table, saved_figure, say

MARKERS = ("s", "^", "v")  # of the simple ways, which are grey and dashed


def show_passages(report: PassageReport, console: Console) -> None:
    """Print the share found at each length, and the sentences."""
    console.print("\nDocuments found, percent\n")
    rows = []
    for reading in report.readings:
        trials = [reading.at(length) for length in report.lengths]
        rows.append([reading.label, *("-" if one is None else f"{one.accuracy:.0%}" for one in trials)])
    styles = {reading.label: "dim" for reading in report.readings if reading.reading in BASELINES}
    console.print(plain_table(["", *map(tokens_label, report.lengths)], rows, styles))
    say(console, passage_sentences(report))


def passage_sentences(report: PassageReport) -> list[str]:
    """What each extension finds at its greatest length beside the best of the simple ways."""
    told = []
    for reading in report.readings:
        if reading.reading in BASELINES:
            continue
        last = reading.trials[-1]
        best = report.best_baseline(last.length)
        simple, gap = best.at(last.length), reading.beyond(best, last.length)
        if simple is None or gap is None:  # a result of other readings, put together by hand
            continue
        low, high = last.interval
        told.append(
            f"{reading.label} at {tokens_label(last.length)} tokens: {last.accuracy:.0%} ({low:.0%} to {high:.0%}); "
            f"the best simple way, {best.label}: {simple.accuracy:.0%}; difference {100 * gap.mean:+.0f} ± "
            f"{100 * gap.standard_error:.0f} points over the same questions."
        )
    asked = len(report.readings[0].trials[0].found)
    told.append(
        f"{asked} documents of each length, in {report.haystack}; one of them answers each question, so guessing finds "
        f"{1 / asked:.0%}. An index holds one vector a document, for 'chunks, nearest' one for each window."
    )
    return told


def save_passage_figure(report: PassageReport, path: Path) -> None:
    """Draw the share found by length of the documents, one line per reading, with 95 percent intervals.

    Raises:
        InvalidParameterError: matplotlib is not installed.
    """
    looks = looks_for({one.reading: (one.reading.split()[0], one.label) for one in report.readings})
    with saved_figure(path, (7.2, 4.4), f"Passages found by {report.provenance.checkpoint}") as figure:
        axes = figure.subplots()
        for reading in report.readings:
            _draw(axes, reading, looks[reading.reading].colour)
        if report.lengths[-1] > report.trained_length:
            axes.axvline(report.trained_length, color=NOTE, lw=1.2, ls=DASHED)
            axes.annotate(
                "trained length",
                (report.trained_length, 1.03),
                xytext=(4, 0),
                textcoords="offset points",
                fontsize=8.5,
                color=NOTE,
            )
        axes.set_xscale("log", base=2)
        axes.set_xticks(report.lengths, list(map(tokens_label, report.lengths)))
        axes.minorticks_off()
        axes.set_ylim(-0.03, 1.09)
        axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "25", "50", "75", "100"])
        axes.set_xlabel("tokens of each document")
        axes.set_ylabel("documents found, percent")
        draw_grid(axes)
        axes.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _draw(axes: Any, reading: PassageResult, colour: str) -> None:
    x = [trial.length for trial in reading.trials]
    y = [trial.accuracy for trial in reading.trials]
    if reading.reading in BASELINES:
        marker = MARKERS[BASELINES.index(reading.reading)]
        axes.plot(x, y, marker=marker, ms=5, lw=1.5, ls=DASHED, color=COLOURS["truncated"], label=reading.label)
        return
    low, high = zip(*(trial.interval for trial in reading.trials), strict=True)
    axes.plot(x, y, marker="o", ms=4.5, lw=1.8, color=colour, label=reading.label)
    axes.fill_between(x, low, high, color=colour, alpha=0.08, lw=0)
