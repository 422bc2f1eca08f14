"""The report on a LongPPL measurement."""

from __future__ import annotations

from collections.abc import Callable

from ctxext.evaluation.longppl import LongPplResult, LongPplScore
from ctxext.evaluation.report.figures import Line, Panel, lines_panel, paneled
from ctxext.evaluation.report.page import Page, Part, TextTable, provenance_table
from ctxext.measuring.labels import few_of, tokens_label
from ctxext.measuring.truncation import TRUNCATED, window_of

AGAINST = "Loss minus the best truncation's, nats per token ± standard error"


def longppl_page(result: LongPplResult) -> Page:
    """Return LongPPL beside plain perplexity, the differences to truncation, the sentences and the figure."""
    tables = [
        _table("LongPPL: perplexity over the key tokens", result, lambda score: f"{score.longppl:.2f}"),
        _table("Perplexity over all tokens at the same place", result, lambda score: f"{score.perplexity:.2f}"),
        _table(f"{AGAINST}, over key tokens", result, lambda score: str(score.versus_truncation or "")),
        _table(f"{AGAINST}, over all tokens", result, lambda score: str(score.versus_truncation_all or "")),
    ]
    title = f"{result.provenance.checkpoint}: {few_of(result.provenance.documents)}"
    panels = [
        _panel(result, "LongPPL (key tokens)", lambda score: score.longppl),
        _panel(result, "Perplexity (all tokens at the same place)", lambda score: score.perplexity),
    ]
    figure = paneled("longppl", title, panels)
    parts: list[Part] = [*(table for table in tables if table.rows), *_sentences(result), figure]
    return Page(title, parts, [provenance_table(result.to_dict()["provenance"])])


def _sentences(result: LongPplResult) -> list[str]:
    """Return how many key tokens there are, how the best extension predicts them, and what the numbers cannot say."""
    keys = result.keys
    searched = keys.searched * len(keys.passages)
    sentences = [
        f"{keys.tokens:,} of {searched:,} tokens are key tokens: {keys.evaluator}, unextended, predicts each better by "
        f"more than {keys.alpha:g} nats after {keys.window:,} tokens than after {keys.short:,}."
    ]
    best = min(result.extensions, key=lambda reading: reading.scores[-1].key_loss)
    score = best.scores[-1]
    if score.versus_truncation is not None:
        difference = score.versus_truncation
        beats = {"better": "yes", "worse": "no", "no difference": "undecided"}[
            difference.verdict_of_best(len(result.extensions))
        ]
        window = result.find(TRUNCATED).scores[0].window
        sentences.append(
            f"Best at {tokens_label(score.length)}: {best.label}. Does it beat the best truncation on the key tokens "
            f"(to the last {tokens_label(window or 0)})? {beats}{difference.scope(len(keys.passages))}: {difference} "
            f"nats per token, over {difference.over}."
        )
    sentences.append(
        "Key tokens are those that the unextended model predicts well in its window, which favours it and truncation a "
        "little; differences between extensions, and between lengths of one, are free of that."
    )
    return sentences


def _table(title: str, result: LongPplResult, cell: Callable[[LongPplScore], str]) -> TextTable:
    """Return one row for each reading that has a cell, and one column for each length."""
    lengths = _lengths(result)
    rows = []
    for reading in result.readings:
        cells = {score.length: cell(score) for score in reading.scores}
        if reading.name == TRUNCATED or window_of(reading.name) is not None:  # the same at every length
            cells = dict.fromkeys(lengths, cell(reading.scores[0]))
        if any(cells.values()):
            rows.append([reading.label, *(cells.get(length, "-") for length in lengths)])
    return TextTable(header=["", *map(tokens_label, lengths)], rows=rows, title=title)


def _panel(result: LongPplResult, title: str, value: Callable[[LongPplScore], float]) -> Panel:
    """Return the panel of one number by length."""
    lengths, lines = _lengths(result), []
    for reading in result.readings:
        if window_of(reading.name) is not None:  # a single truncation, for which the best one stands
            continue
        points = [(score.length, value(score)) for score in reading.scores]
        if reading.name == TRUNCATED:  # the same at every length
            points = [(length, points[0][1]) for length in lengths]
        lines.append(Line(reading.name.split()[0], reading.label, points))
    return lines_panel(lines, title=title, x_label="tokens that the model may see", ticks=lengths, log=False)


def _lengths(result: LongPplResult) -> list[int]:
    return sorted({score.length for reading in result.extensions for score in reading.scores})
