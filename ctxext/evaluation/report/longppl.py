"""A LongPPL measurement in a terminal and as a figure."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from ctxext.evaluation.labels import few_of, tokens_label
from ctxext.evaluation.longppl import LongPplResult, LongPplScore
from ctxext.evaluation.report.style import draw_grid, looks_for, plain_table, saved_figure, say
from ctxext.evaluation.truncation import TRUNCATED, window_of


def show(result: LongPplResult, console: Console) -> None:
    """Print LongPPL beside plain perplexity, the differences to truncation, and the sentences."""
    _print(console, "LongPPL: perplexity over the key tokens", result, lambda score: f"{score.longppl:.2f}")
    _print(console, "Perplexity over all tokens at the same place", result, lambda score: f"{score.perplexity:.2f}")
    against = "Loss minus the best truncation's, nats per token ± standard error"
    _print(console, f"{against}, over key tokens", result, lambda score: str(score.versus_truncation or ""))
    _print(console, f"{against}, over all tokens", result, lambda score: str(score.versus_truncation_all or ""))
    say(console, sentences(result))


def sentences(result: LongPplResult) -> list[str]:
    """How many key tokens there are, what the best extension makes of them, and what the numbers cannot say."""
    keys = result.keys
    searched = keys.searched * len(keys.passages)
    told = [
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
        told.append(
            f"Best at {tokens_label(score.length)}: {best.label}. Does it beat the best truncation on the key tokens "
            f"(to the last {tokens_label(window or 0)})? {beats}{difference.scope(len(keys.passages))}: {difference} "
            f"nats per token, over {difference.over}."
        )
    told.append(
        "Key tokens are those that the unextended model predicts well in its window, which favours it and truncation a "
        "little; differences between extensions, and between lengths of one, are free of that."
    )
    return told


def save_figure(result: LongPplResult, path: Path) -> None:
    """Draw LongPPL by length on the left, perplexity over all tokens at the same place on the right.

    Raises:
        InvalidParameterError: matplotlib is not installed.
    """
    title = f"{result.provenance.checkpoint}: {few_of(result.provenance.documents)}"
    with saved_figure(path, (10.0, 4.3), title) as figure:
        left, right = figure.subplots(1, 2)
        _draw(left, result, "LongPPL (key tokens)", lambda score: score.longppl)
        _draw(right, result, "Perplexity (all tokens at the same place)", lambda score: score.perplexity)
        left.legend(frameon=False, fontsize=9)


def _print(console: Console, title: str, result: LongPplResult, cell: Callable[[LongPplScore], str]) -> None:
    lengths = _lengths(result)
    rows = []
    for reading in result.readings:
        found = {score.length: cell(score) for score in reading.scores}
        if reading.name == TRUNCATED or window_of(reading.name) is not None:  # the same at every length
            found = dict.fromkeys(lengths, cell(reading.scores[0]))
        if any(found.values()):
            rows.append([reading.label, *(found.get(length, "-") for length in lengths)])
    if rows:
        console.print(f"\n{title}\n")
        console.print(plain_table(["", *map(tokens_label, lengths)], rows))


def _draw(axes: Any, result: LongPplResult, title: str, value: Callable[[LongPplScore], float]) -> None:
    readings = [reading for reading in result.readings if window_of(reading.name) is None]
    looks = looks_for({one.name: (one.name.split()[0], one.label) for one in readings})
    for reading in readings:
        look = looks[reading.name]
        x = [score.length for score in reading.scores]
        y = [value(score) for score in reading.scores]
        if reading.name == TRUNCATED:
            axes.axhline(y[0], color=look.colour, ls="--", lw=1.4, label=reading.label)
        else:
            axes.plot(x, y, color=look.colour, marker="o", ms=5, lw=1.8, label=reading.label)
    axes.set_xticks(_lengths(result))
    axes.xaxis.set_major_formatter(lambda tokens, _: tokens_label(int(tokens)))
    axes.set_xlabel("tokens that the model may see")
    draw_grid(axes, title)


def _lengths(result: LongPplResult) -> list[int]:
    return sorted({score.length for reading in result.extensions for score in reading.scores})
