"""A masked-token measurement in a terminal and as a figure."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from ctxext.evaluation.labels import few_of, tokens_label
from ctxext.evaluation.masked import CURVE, END, POSITION, WHOLE, MaskedReading, MaskedReport, MaskedScore
from ctxext.evaluation.report.style import (
    COLOURS,
    DASHED,
    NOTE,
    draw_grid,
    looks_for,
    plain_table,
    saved_figure,
    say,
)
from ctxext.evaluation.truncation import TRUNCATED, window_of

KINDS = {POSITION: "by position", END: "by distance to the end"}


def show_masked(report: MaskedReport, console: Console) -> None:
    """Print the losses at each length, those of the greatest length by position and distance to the end, sentences."""
    shown = [one for one in report.readings if window_of(one.name) is None]
    whole: dict[str, dict[str, MaskedScore]] = {
        one.label: {tokens_label(score.length): score for score in one.scores if score.kind == WHOLE} for one in shown
    }
    lengths = list(map(tokens_label, report.lengths))
    _print(console, "Loss of masked tokens, nats, by tokens read", lengths, whole, _loss)
    _print(console, f"The same minus {_baseline(report)}", lengths, whole, _versus)
    last = report.lengths[-1]
    for kind, said in KINDS.items():
        spans = {
            one.label: {_span(score): score for score in one.at(last, kind)} for one in shown if last in one.lengths
        }
        columns = list(next(iter(spans.values())))
        _print(console, f"{tokens_label(last)} tokens read, loss {said}", columns, spans, _loss)
        _print(console, f"The same minus {_baseline(report, last)}", columns, spans, _versus)
    say(console, masked_sentences(report))


def masked_sentences(report: MaskedReport) -> list[str]:
    """What each extension gains at its greatest length and costs within the trained one, and what was masked."""
    told = []
    for reading in report.extensions:
        last = reading.at(reading.lengths[-1], WHOLE)[0]
        if last.versus is not None and last.length > report.trained_length:
            answer = {"better": "yes", "worse": "no", "no difference": "not measurably"}[last.versus.verdict]
            scope = last.versus.scope(len(report.provenance.documents))
            told.append(
                f"Does {reading.label} beat the best window around each masked token at {tokens_label(last.length)} "
                f"tokens? {answer}{scope}: {last.versus} nats per masked token, over {last.versus.units} "
                f"{last.versus.over}."
            )
        inside = [one for one in reading.at(report.trained_length, WHOLE) if one.versus is not None]
        told += [
            f"{reading.label} at the trained {tokens_label(one.length)} tokens, minus unpatched: {one.versus}."
            for one in inside
        ]
    texts = len(report.provenance.documents)
    times = texts * report.passes / report.every
    told.append(
        f"One token in {report.every} is masked, in {report.passes} {'pass' if report.passes == 1 else 'passes'} over "
        f"each of {texts} {'text' if texts == 1 else 'texts'}: every position is asked for {times:.3g} times on "
        f"average{'' if times >= 1 else ', so that most are never'}."
    )
    return told


def save_masked_figure(report: MaskedReport, path: Path) -> None:
    """Draw the loss by position, each reading at its greatest length, and on the right by the distance to the end.

    Raises:
        InvalidParameterError: matplotlib is not installed.
    """
    drawn = [one for one in report.readings if window_of(one.name) is None]
    looks = looks_for({one.name: (one.name.split()[0], one.label) for one in drawn})
    title = f"{report.provenance.checkpoint}: {few_of(report.provenance.documents)}"
    with saved_figure(path, (10.0, 4.4), title) as figure:
        by_position, by_distance = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
        for reading in drawn:
            options: dict[str, Any] = {"color": looks[reading.name].colour, "label": reading.label, "lw": 1.7}
            if reading.name == TRUNCATED:
                options |= {"color": COLOURS[TRUNCATED], "ls": DASHED}
            _draw_positions(by_position, reading, options)
            _draw_distances(by_distance, reading, report.lengths[-1], options)
        _mark_trained(by_position, report)
        by_position.set_xlabel("position in the text, tokens")
        by_position.set_ylabel("loss of masked tokens, nats")
        by_position.xaxis.set_major_formatter(lambda value, _: tokens_label(int(value)))
        draw_grid(by_position, "By position, each at the greatest length that it reads")
        by_distance.set_xlabel("tokens behind it")
        draw_grid(by_distance, f"By distance to the end of {tokens_label(report.lengths[-1])} tokens")
        by_position.legend(frameon=False, fontsize=9)


def _draw_positions(axes: Any, reading: MaskedReading, options: dict[str, Any]) -> None:
    scores = reading.at(reading.lengths[-1], CURVE)
    axes.plot([(one.start + one.stop) / 2 for one in scores], [one.loss for one in scores], **options)


def _draw_distances(axes: Any, reading: MaskedReading, length: int, options: dict[str, Any]) -> None:
    scores = reading.at(length, END)
    if scores:
        axes.plot([_span(one) for one in scores], [one.loss for one in scores], marker="o", ms=4, **options)
        axes.tick_params(axis="x", labelsize=8.5)


def _mark_trained(axes: Any, report: MaskedReport) -> None:
    if report.lengths[-1] > report.trained_length:
        axes.axvline(report.trained_length, color=NOTE, lw=1.2, ls=DASHED)
        place, shift = (report.trained_length, 0.02), {"xytext": (4, 0), "textcoords": "offset points"}
        axes.annotate("trained length", place, xycoords=axes.get_xaxis_transform(), fontsize=8.5, color=NOTE, **shift)


def _print(
    console: Console,
    title: str,
    columns: list[str],
    scores: dict[str, dict[str, MaskedScore]],
    cell: Callable[[MaskedScore], str],
) -> None:
    """A table of those readings that have anything to say; nothing where none has."""
    rows = []
    for label, own in scores.items():
        cells = [cell(own[column]) if column in own else "" for column in columns]
        rows += [[label, *cells]] if any(cells) else []
    if rows:
        console.print(f"\n{title}\n")
        console.print(plain_table(["", *columns], rows))


def _baseline(report: MaskedReport, length: int | None = None) -> str:
    inside, beyond = "the unextended model's", "that of the best window around each token"
    found = [one for one in report.lengths if length in (None, one)]
    kinds = [inside] * (found[0] <= report.trained_length) + [beyond] * (found[-1] > report.trained_length)
    return ", and beyond the trained length ".join(kinds)


def _loss(score: MaskedScore) -> str:
    return f"{score.loss:.3f}"


def _versus(score: MaskedScore) -> str:
    return "" if score.versus is None else str(score.versus)


def _span(score: MaskedScore) -> str:
    return f"{tokens_label(score.start)}-{tokens_label(score.stop)}"
