"""The report on a masked-token measurement."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ctxext.evaluation.masked import CURVE, END, POSITION, WHOLE, MaskedReading, MaskedReport, MaskedScore
from ctxext.evaluation.report.figures import Line, Panel, lines_panel, paneled
from ctxext.evaluation.report.page import Page, Part, TextTable, provenance_table
from ctxext.measuring.labels import few_of, tokens_label
from ctxext.measuring.truncation import window_of

KINDS = {POSITION: "by position", END: "by distance to the end"}


def masked_page(report: MaskedReport) -> Page:
    """Return losses at each length, those of the greatest by position and distance to the end, sentences, a figure."""
    readings = _shown(report)
    whole = {
        reading.label: {tokens_label(score.length): score for score in reading.scores if score.kind == WHOLE}
        for reading in readings
    }
    lengths = list(map(tokens_label, report.lengths))
    tables = [
        _table("Loss of masked tokens, nats, by tokens read", lengths, whole, _loss),
        _table(f"Loss minus {_baseline(report)}", lengths, whole, _versus),
    ]
    last = report.lengths[-1]
    for kind, name in KINDS.items():
        spans = {
            reading.label: {_span(score): score for score in reading.at(last, kind)}
            for reading in readings
            if last in reading.lengths
        }
        columns = list(next(iter(spans.values())))
        tables.append(_table(f"{tokens_label(last)} tokens read, loss {name}", columns, spans, _loss))
        title = f"{tokens_label(last)} tokens read, loss {name} minus {_baseline(report, last)}"
        tables.append(_table(title, columns, spans, _versus))
    title = f"{report.provenance.checkpoint}: {few_of(report.provenance.documents)}"
    figure = paneled("masked", title, _panels(report))
    parts: list[Part] = [*(table for table in tables if table.rows), *masked_sentences(report), figure]
    return Page(title, parts, [provenance_table(report.to_dict()["provenance"])])


def masked_sentences(report: MaskedReport) -> list[str]:
    """Return what each extension gains at its greatest length and costs within the trained one, and what was masked."""
    sentences = []
    for reading in report.extensions:
        last = reading.at(reading.lengths[-1], WHOLE)[0]
        if last.versus is not None and last.length > report.trained_length:
            answer = {"better": "yes", "worse": "no", "no difference": "not measurably"}[last.versus.verdict]
            scope = last.versus.scope(len(report.provenance.documents))
            sentences.append(
                f"Does {reading.label} beat the best window around each masked token at {tokens_label(last.length)} "
                f"tokens? {answer}{scope}: {last.versus} nats per masked token, over {last.versus.units} "
                f"{last.versus.over}."
            )
        inside = [score for score in reading.at(report.trained_length, WHOLE) if score.versus is not None]
        sentences += [
            f"{reading.label} at the trained {tokens_label(score.length)} tokens, minus unpatched: {score.versus}."
            for score in inside
        ]
    texts = len(report.provenance.documents)
    times = texts * report.passes / report.every
    sentences.append(
        f"One token in {report.every} is masked, in {report.passes} {'pass' if report.passes == 1 else 'passes'} over "
        f"each of {texts} {'text' if texts == 1 else 'texts'}: every position is asked for {times:.3g} times on "
        f"average{'' if times >= 1 else ', so that most are never'}."
    )
    return sentences


def _panels(report: MaskedReport) -> list[Panel]:
    """Return the loss by position, each reading at its greatest length, and by the distance to the end."""
    last, readings = report.lengths[-1], _shown(report)
    by_position = lines_panel(
        [
            Line(
                reading.name.split()[0],
                reading.label,
                [((s.start + s.stop) / 2, s.loss) for s in reading.at(reading.lengths[-1], CURVE)],
            )
            for reading in readings
        ],
        title="By position, each at the greatest length that it reads",
        x_label="position in the text, tokens",
        y_label="loss of masked tokens, nats",
        ticks=range(0, last + 1, max(1, last // 8)),
        log=False,
        trained_length=report.trained_length if last > report.trained_length else None,
    )
    spans = list(dict.fromkeys(_span(score) for reading in readings for score in reading.at(last, END)))
    by_distance = lines_panel(
        [
            Line(
                reading.name.split()[0], reading.label, [(spans.index(_span(s)), s.loss) for s in reading.at(last, END)]
            )
            for reading in readings
        ],
        title=f"By distance to the end of {tokens_label(last)} tokens",
        x_label="tokens behind it",
        ticks=dict(enumerate(spans)),
        log=False,
    )
    return [by_position, by_distance]


def _shown(report: MaskedReport) -> list[MaskedReading]:
    """Return the readings without the single windows of truncation, the best of which stands for them."""
    return [reading for reading in report.readings if window_of(reading.name) is None]


def _table(
    title: str,
    columns: Sequence[str],
    scores: Mapping[str, Mapping[str, MaskedScore]],
    cell: Callable[[MaskedScore], str],
) -> TextTable:
    """Return one row for each reading that has a cell."""
    rows = []
    for label, given in scores.items():
        cells = [cell(given[column]) if column in given else "" for column in columns]
        rows += [[label, *cells]] if any(cells) else []
    return TextTable(header=["", *columns], rows=rows, title=title)


def _baseline(report: MaskedReport, length: int | None = None) -> str:
    inside, beyond = "the unextended model's", "that of the best window around each token"
    lengths = report.lengths if length is None else (length,)
    kinds = [inside] * (lengths[0] <= report.trained_length) + [beyond] * (lengths[-1] > report.trained_length)
    return ", and beyond the trained length ".join(kinds)


def _loss(score: MaskedScore) -> str:
    return f"{score.loss:.3f}"


def _versus(score: MaskedScore) -> str:
    return "" if score.versus is None else str(score.versus)


def _span(score: MaskedScore) -> str:
    return f"{tokens_label(score.start)}-{tokens_label(score.stop)}"
