"""The report on passage retrieval."""

from __future__ import annotations

from ctxext.evaluation.passages import BASELINES, PassageReport
from ctxext.evaluation.report.figures import Line, Panel, lines_panel, paneled
from ctxext.evaluation.report.page import Page, TextTable, provenance_table
from ctxext.measuring.labels import tokens_label
from ctxext.measuring.truncation import TRUNCATED


def passage_page(report: PassageReport) -> Page:
    """Return the share found at each length, the sentences and the figure."""
    rows = []
    for reading in report.readings:
        trials = [reading.at(length) for length in report.lengths]
        rows.append([reading.label, *("-" if trial is None else f"{trial.accuracy:.0%}" for trial in trials)])
    table = TextTable(
        header=["", *map(tokens_label, report.lengths)],
        rows=rows,
        title="Documents found, percent",
        styles={reading.label: "reference" for reading in report.readings if reading.reading in BASELINES},
    )
    title = f"Passages found by {report.provenance.checkpoint}"
    figure = paneled("passages", title, [_panel(report)])
    details = [provenance_table(report.to_dict()["provenance"])]
    return Page(title, [table, *passage_sentences(report), figure], details)


def passage_sentences(report: PassageReport) -> list[str]:
    """Return what each extension finds at its greatest length beside the best of the simple ways."""
    sentences = []
    for reading in report.readings:
        if reading.reading in BASELINES:
            continue
        last = reading.trials[-1]
        best = report.best_baseline(last.length)
        simple, gap = best.at(last.length), reading.beyond(best, last.length)
        if simple is None or gap is None:  # a result of other readings, put together by hand
            continue
        low, high = last.interval
        sentences.append(
            f"{reading.label} at {tokens_label(last.length)} tokens: {last.accuracy:.0%} ({low:.0%} to {high:.0%}); "
            f"the best simple way, {best.label}: {simple.accuracy:.0%}; difference {100 * gap.mean:+.0f} ± "
            f"{100 * gap.standard_error:.0f} points over the same questions."
        )
    asked = len(report.readings[0].trials[0].found)
    sentences.append(
        f"{asked} documents of each length, in {report.haystack}; one of them answers each question, so guessing finds "
        f"{1 / asked:.0%}. An index holds one vector a document, for 'chunks, nearest' one for each window."
    )
    return sentences


def _panel(report: PassageReport) -> Panel:
    """Return the share found by length of the documents, one line per reading, with 95 percent intervals."""
    lines = []
    for reading in report.readings:
        points = [(trial.length, 100 * trial.accuracy) for trial in reading.trials]
        if reading.reading in BASELINES:
            lines.append(Line(TRUNCATED, reading.label, points))
        else:
            band = [(100 * low, 100 * high) for low, high in (trial.interval for trial in reading.trials)]
            lines.append(Line(reading.reading.split()[0], reading.label, points, band))
    return lines_panel(
        lines,
        x_label="tokens of each document",
        y_label="documents found, percent",
        ticks=report.lengths,
        doubling=True,
        log=False,
        trained_length=report.trained_length if report.lengths[-1] > report.trained_length else None,
    )
