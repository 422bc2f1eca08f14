"""The demo's result in words, tables and files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich import box
from rich.table import Table

from ctxext.demo._run import DemoResult
from ctxext.errors import InvalidParameterError
from ctxext.evaluation._plots import label_of, require_matplotlib, save_loss_figure, tokens_label
from ctxext.evaluation.comparison import Series
from ctxext.evaluation.comparison.words import all_of, unpatched_sentence, windows_in_words
from ctxext.evaluation.truncation import TRUNCATED, UNPATCHED, is_reference

__all__ = ["check_output", "loss_table", "markdown", "passkey_table", "sentences", "write"]

FIGURE, DATA, TABLE = "loss.png", "result.json", "table.md"
# Below this ratio to the unpatched model inside its window a perplexity counts as flat.
FLAT = 1.35


def check_output(output: Path) -> None:
    """Make the output folder, and refuse to write over files that an earlier demo did not write.

    Raises:
        InvalidParameterError: a file in the way, or no right to write.
    """
    require_matplotlib()
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidParameterError(f"Cannot make the folder {str(output)!r}: {error.strerror}.") from error
    present = [name for name in (FIGURE, DATA, TABLE) if (output / name).exists()]
    if present and not _is_ours(output / DATA):
        raise InvalidParameterError(
            f"{str(output / present[0])!r} exists and is not an earlier demo's; choose another --output."
        )


def write(result: DemoResult, output: Path) -> list[Path]:
    """Write figure, JSON and Markdown table; return their paths."""
    title = (
        f"{result.checkpoint}: trained to {tokens_label(result.trained_length)}, read to {tokens_label(result.length)}"
    )
    paths = [output / name for name in (FIGURE, DATA, TABLE)]
    save_loss_figure(result.series, paths[0], trained_length=result.trained_length, title=title)
    paths[1].write_text(json.dumps(asdict(result), indent=1) + "\n", encoding="utf-8")
    paths[2].write_text(markdown(result), encoding="utf-8")
    return paths


def loss_table(result: DemoResult) -> Table:
    """Perplexity by bucket, one row per way of reading."""
    header, rows = _loss_cells(result)
    return _table(header, rows, [label_of(series.name) for series in result.series if is_reference(series.name)])


def passkey_table(result: DemoResult) -> Table:
    """Found or not, with the loss of the answer, one row per way of reading."""
    header, rows = _passkey_cells(result)
    return _table(header, rows)


def markdown(result: DemoResult) -> str:
    """Both tables and the sentences, as Markdown."""
    lines = [
        f"**{result.checkpoint}**, text: {', '.join(result.texts)}; perplexity by position; in brackets, which "
        f"truncation is the best there",
        "",
    ]
    lines += [*_markdown_table(*_loss_cells(result)), ""]
    if result.passkeys:
        lines += [*_markdown_table(*_passkey_cells(result)), ""]
    return "\n".join([*lines, *(f"- {sentence}" for sentence in sentences(result)), ""])


def sentences(result: DemoResult) -> list[str]:
    """What a newcomer should take away; each depends on what was measured."""
    lines = [
        unpatched_sentence(result.of(UNPATCHED), result.trained_length),
        _methods_sentence(result),
        _truncation_sentence(result),
    ]
    if result.passkeys:
        lines.append(_passkey_sentence(result))
    if any(series.dynamic for series in result.extended):
        names = ", ".join(label_of(series.name) for series in result.extended if series.dynamic)
        lines.append(
            f"{names[0].upper()}{names[1:]} adapts to the length of the text: this one pass charges it the "
            f"frequencies of {tokens_label(result.length)} at every position, while up to "
            f"{tokens_label(result.trained_length)} it "
            f"really leaves the model as it is."
        )
    return lines


def _methods_sentence(result: DemoResult) -> str:
    flat, costly = [], []
    inside = result.of(UNPATCHED).buckets[0].perplexity
    for series in result.extended:
        if max(bucket.perplexity for bucket in series.buckets[1:]) < FLAT * inside:
            flat.append(label_of(series.name))
        if series.in_window_ratio > FLAT:
            costly.append(f"{label_of(series.name)} {series.in_window_ratio:.2f} times")
    text = "Without training, no method stays flat to the end"
    if flat:
        text = f"Without any training, {all_of(flat)} stay{'s' if len(flat) == 1 else ''} flat to the end"
    return f"{text}; inside the window, perplexity is {all_of(costly)} the unpatched one." if costly else f"{text}."


def _truncation_sentence(result: DemoResult) -> str:
    best = min(result.extended, key=lambda series: series.versus_truncation[-1].mean)
    difference = best.versus_truncation[-1]
    where = difference.scope(len(result.texts))
    window = tokens_label(result.of(TRUNCATED).windows[-1])
    tried = windows_in_words(result.trained_length)
    judged = difference.verdict_of_best(len(result.extended))
    if judged == "better":
        verdict = f"so{where} the longer context already pays for itself in perplexity"
    elif judged == "worse":
        verdict = (
            f"so{where}, for plain prediction, dropping the old text is still better than extending without "
            "training; training at the new length is meant to change that"
        )
    else:
        shown = "this text" if len(result.texts) == 1 else "these texts"
        verdict = f"so for plain prediction it makes no difference that {shown} can show"
    return (
        f"Against simply feeding the last {window} tokens, the best of truncations to {tried} at the end of the text, "
        f"the best method there, {label_of(best.name)}, differs by {difference} nats per token, {verdict}."
    )


def _passkey_sentence(result: DemoResult) -> str:
    plain, patched = result.passkeys
    distances = sorted({trial.distance for trial in plain.trials})
    found = [
        f"{label_of(row.name)} {sum(t.correct for t in row.trials)} of {len(row.trials)}" for row in (plain, patched)
    ]
    return (
        f"A key hidden {all_of([f'{distance:,}' for distance in distances])} tokens back, where no truncation sees "
        f"it: {found[0]}, {found[1]} found."
    )


def _loss_cells(result: DemoResult) -> tuple[list[str], list[list[str]]]:
    buckets = result.series[0].buckets
    spans = [f"{tokens_label(bucket.start)}-{tokens_label(bucket.stop)}" for bucket in buckets]
    header = ["", *spans, "inside", f"{spans[-1]} vs best truncation"]
    return header, [_loss_row(series) for series in result.series]


def _loss_row(series: Series) -> list[str]:
    cells = [_number(bucket.perplexity) for bucket in series.buckets]
    for place, window in enumerate(series.windows, start=1):
        cells[place] += f" ({tokens_label(window)})"
    versus = "-" if series.name == TRUNCATED else f"{series.versus_truncation[-1]}"
    return [label_of(series.name), *cells, f"x{series.in_window_ratio:.2f}", versus]


def _passkey_cells(result: DemoResult) -> tuple[list[str], list[list[str]]]:
    header = ["key's distance", *(f"{trial.distance:,}" for trial in result.passkeys[0].trials)]
    rows = []
    for row in result.passkeys:
        cells = [f"{'found' if trial.correct else 'lost'} (loss {trial.loss:.2f})" for trial in row.trials]
        rows.append([label_of(row.name), *cells])
    return header, rows


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def _table(header: list[str], rows: list[list[str]], references: Sequence[str] = ()) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 0, 0, 1))
    for index, name in enumerate(header):
        table.add_column(name.replace(" vs", "\nvs"), justify="right" if index else "left", overflow="fold")
    for row in rows:
        style = "red" if row[0] == label_of(UNPATCHED) else "dim" if row[0] in references else None
        table.add_row(*row, style=style)
    return table


def _markdown_table(header: list[str], rows: list[list[str]]) -> list[str]:
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def _is_ours(path: Path) -> bool:
    try:
        return bool(json.loads(path.read_text(encoding="utf-8")).get("made_by") == DemoResult.made_by)
    except (OSError, ValueError, AttributeError):
        return False
