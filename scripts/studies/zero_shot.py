"""What a longer context is worth without training, where it ends: the last positions of long texts, and passkeys.

    python scripts/studies/zero_shot.py --text novels.parquet -n 9 --skip 2000 -f 2 -f 4 -o study
    python scripts/studies/zero_shot.py --text novels.parquet -n 9 --skip 2000 -f 2 -m "self_extend reach=0.75" -o study

Each method reads each text once, up to the length that its factor reaches. Compared are the last positions, a quarter
of the trained window, against the best of four truncations there, by text; what changes inside the trained window,
against the unextended model; the key tokens of LongPPL among those positions (arXiv:2410.23771, with its thresholds):
those which a long truncation predicts much better than the shortest; and passkeys, five depths. `ctxext eval
compare` compares all positions beyond the window instead, and reads the unextended model beyond it too: at 32K tokens
five times the work.

Everything finished is kept in the output folder: run the same command again after an interruption, or with more
methods, factors, documents of the same file or trials, and only what is missing is measured.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from rich.console import Console
from torch import Tensor
from typer import Option

sys.path.insert(0, str(Path(__file__).parents[2]))

from ctxext.cli.eval.common import Session
from ctxext.cli.options import SourceOptions, TextOptions, grouped, run_script
from ctxext.evaluation.passkey import DEPTHS, make_prompts
from ctxext.evaluation.report.figures import COLOURS, DASHED, INK, draw_grid, saved_figure
from ctxext.measuring.forward import turning_point
from ctxext.measuring.journal import Journal
from ctxext.measuring.labels import tokens_label
from ctxext.measuring.loss import Window
from ctxext.measuring.readings import Reader, Reading, Readings, chosen_methods
from ctxext.measuring.statistics import PairedDifference, document_difference, grouped_difference, mean_loss
from ctxext.measuring.survey import LossJob, PromptJob, Survey, jobs_of
from ctxext.measuring.truncation import UNPATCHED, tail_windows
from ctxext.texts.corpus import Corpus, TokenisedDocument
from scripts.bench import machine, markdown_table
from scripts.studies.key_tokens import ALPHA, BETA

# Nats: a pass over a longer text multiplies other shapes, so that equal mathematics rounds otherwise.
ROUNDING = 1e-4
METHODS = (
    "self_extend",
    "self_extend thinning=0.5",
    "retrieval_heads",
    "self_extend window=0.25 reach=0.67",
    "rerope",
    "rerope window=0.5",
    "dual_chunk",
    "dual_chunk chunk=0.75",
    "string",
    "dpe groups=llama-3-8b",
    "streaming",
    "yarn",
    "dynamic_ntk",
)


@dataclass(frozen=True, eq=False)
class Study:
    """Everything that is measured, before any of it is.

    Args:
        model: whose readings they are.
        corpus: of the texts, whole.
        lengths: that are reached, tokens.
        trials: passkeys per length and depth.
        tokenizer: of the prompts.
        point: of the model's cost.
    """

    model: Readings
    corpus: Corpus
    lengths: tuple[int, ...]
    trials: int
    tokenizer: object
    point: int

    @property
    def quarter(self) -> int:
        """Positions that stand for a length."""
        return self.model.trained_length // 4

    def reads(self, reading: Reading, length: int, document: TokenisedDocument) -> LossJob:
        """The job of one text: a truncation reads the end alone, the unextended model its window, a method all."""
        trained, window = self.model.trained_length, reading.window
        if reading.name == UNPATCHED:
            length = trained
        start, text = 0 if window is None else length - self.quarter, document.take(length + 1)
        windows = (Window(0, length + 1, length),)
        if window is not None:
            windows = tail_windows(window, start=start, positions=length, prefix=text.prefix)
        return LossJob.of(
            Reader(reading, self.model, (length,)),
            text,
            windows,
            name=f"{reading.label}, {document.name}, {length:,} tokens",
            turning_point=self.point,
            key=self.model.key(reading.identity, task=["end", start, text.sha256]),
        )

    def asks(self, reading: Reading, length: int) -> list[PromptJob]:
        """The passkeys of one length, one of each depth before the second of any."""
        prompts = make_prompts(self.tokenizer, [length], DEPTHS, trials=self.trials, turning_point=self.point)
        in_turn = sorted(prompts, key=lambda one: one.seed)
        return jobs_of([Reader(reading, self.model, (length,))], in_turn)


@dataclass(frozen=True)
class Found:
    """What one method gave.

    Args:
        reading: which.
        inside: loss minus the unextended model's inside the trained window.
        largest: the largest of those differences at one token, nats.
        end: loss minus the best truncation's at the end.
        by_text: the same of each text.
        key_tokens: the same on key tokens alone, against the longest truncation. Found by the second longest, since
            whatever finds them predicts them better than it does others like them. None where fewer than two texts
            have any.
        keys: found, by depth.
        asked: passkeys of each depth.
        seconds: of a text.
    """

    reading: Reading
    inside: PairedDifference
    largest: float
    end: PairedDifference
    by_text: tuple[float, ...]
    key_tokens: PairedDifference | None
    keys: tuple[int, ...]
    asked: int
    seconds: float


class Results:
    """Finished jobs, put together."""

    def __init__(self, study: Study, readings: Sequence[Reading], journal: Journal) -> None:
        self.study, self.journal, self.lines = study, journal, journal.finished()
        self.plain, self.truncations, self.methods = split(readings)

    def losses(self, reading: Reading, length: int) -> Tensor:
        """[documents, positions] of a reading."""
        jobs = [self.study.reads(reading, length, document) for document in self.study.corpus.documents]
        return torch.stack([self.journal.losses(self.lines[job.key]) for job in jobs])

    def at(self, length: int) -> tuple[int, list[Found]]:
        """The best truncation at the end of a length, in tokens, and every method that reaches just so far."""
        trained, quarter = self.study.model.trained_length, self.study.quarter
        cut = {reading.window: self.losses(reading, length) for reading in self.truncations if reading.window}
        window = min(cut, key=lambda size: (mean_loss([*cut[size]]), -size))
        plain = self.losses(self.plain, length)
        *_, finder, longest = (cut[size] for size in sorted(cut))
        is_key = (cut[min(cut)] - finder > ALPHA) & (finder < -BETA)
        found = []
        for reading in reaching(self.methods, length):
            own = self.losses(reading, length)
            trials = [self.lines[job.key]["trial"] for job in self.study.asks(reading, length)]
            keys = [[trial["correct"] for trial in trials if trial["depth"] == depth] for depth in DEPTHS]
            seconds = [
                self.lines[self.study.reads(reading, length, one).key]["seconds"] for one in self.study.corpus.documents
            ]
            found.append(
                Found(
                    reading=reading,
                    inside=document_difference([*own[:, :trained]], [*plain]),
                    largest=(own[:, :trained] - plain).abs().max().item(),
                    end=document_difference([*own[:, -quarter:]], [*cut[window]], baselines=len(cut)),
                    by_text=tuple((own[:, -quarter:] - cut[window]).mean(1).tolist()),
                    key_tokens=on_key_tokens(own[:, -quarter:], longest, is_key),
                    keys=tuple(sum(one) for one in keys),
                    asked=self.study.trials,
                    seconds=min(seconds),
                )
            )
        return window, sorted(found, key=lambda one: one.end.mean)


def on_key_tokens(losses: Tensor, baseline: Tensor, is_key: Tensor) -> PairedDifference | None:
    """The difference on the tokens that ``is_key`` marks; all are [documents, positions]."""
    if int(is_key.any(dim=1).sum()) < 2:
        return None
    marks = [marked for marked in is_key if marked.any()]
    groups = [
        [row[marked] for row, marked in zip(side[is_key.any(dim=1)], marks, strict=True)] for side in (losses, baseline)
    ]
    return grouped_difference(*groups, over="documents")


def split(readings: Sequence[Reading]) -> tuple[Reading, list[Reading], list[Reading]]:
    """The unextended model, the truncations and the methods."""
    plain = next(reading for reading in readings if reading.name == UNPATCHED)
    return (
        plain,
        [reading for reading in readings if reading.window],
        [one for one in readings if not one.is_reference],
    )


def reaching(methods: Sequence[Reading], length: int) -> list[Reading]:
    """Those that are made for just that length, and those that are the same for all."""
    return [one for one in methods if one.reach == length or (one.any_factor and (one.reach or 0) >= length)]


def table(title: str, found: Sequence[Found], trained: int, length: int) -> str:
    """A row for every method, the best first."""
    rows = []
    for one in found:
        inside = f"{one.inside.mean + 0.0:+.4f} ± {one.inside.standard_error:.4f}"
        if one.largest < ROUNDING:
            inside = f"0 (rounding, at most {one.largest:.0e})"
        share = f"{sum(one.keys)}/{len(one.keys) * one.asked}" if one.asked else ""
        rows.append(
            [
                one.reading.label,
                inside,
                f"{one.end.mean:+.4f} ± {one.end.standard_error:.4f}",
                one.end.verdict,
                "" if one.key_tokens is None else str(one.key_tokens),
                share,
                " ".join(map(str, one.keys)) if one.asked else "",
                f"{1000 * one.seconds / length:.2g}",
            ]
        )
    quarter = trained // 4
    count = next((one.key_tokens.tokens for one in found if one.key_tokens), 0)
    header = (
        "method",
        f"inside {tokens_label(trained)}",
        f"{tokens_label(length - quarter)}-{tokens_label(length)}",
        "against the best truncation",
        f"on {count:,} key tokens, against the longest",
        "passkeys found",
        f"at depths {', '.join(f'{depth:g}' for depth in DEPTHS)}",
        "ms/token",
    )
    return markdown_table(title, header, rows)


def draw(path: Path, results: Results, lengths: Sequence[int]) -> None:
    """What a longer context is for, a row for every method: loss at the end, and the passkeys found by depth."""
    found = {length: results.at(length) for length in lengths}
    heights, columns = [len(rows) + 1.6 for _, rows in found.values()], 2 if results.study.trials else 1
    title = "What a longer context is worth without training"
    with saved_figure(path, (9.6, 0.36 * sum(heights) + 0.5), title) as figure:
        shares = (2.4, 1)[:columns]
        grid = figure.subplots(
            len(lengths), columns, squeeze=False, sharex="col", sharey="row", height_ratios=heights, width_ratios=shares
        )
        for panels, (length, (window, rows)) in zip(grid, found.items(), strict=True):
            draw_losses(
                panels[0], rows, window, f"{tokens_label(length - results.study.quarter)}-{tokens_label(length)}"
            )
            for panel in panels[1:]:
                draw_keys(panel, rows)


def draw_losses(panel: Any, rows: Sequence[Found], window: int, span: str) -> None:
    """Losses at the end with 95 percent intervals, and a ring for each text; named on the left."""
    panel.axvline(0, color=COLOURS["truncated"], lw=1.4, ls=DASHED, zorder=1)
    for place, one in enumerate(rows):
        panel.errorbar(one.end.mean, place, xerr=one.end.margin, fmt="o", ms=6, lw=1.6, color=colour_of(one))
        if len(one.by_text) > 1:
            places = [place + 0.24] * len(one.by_text)
            panel.scatter(one.by_text, places, s=22, facecolor="none", edgecolor=colour_of(one), lw=0.9, alpha=0.7)
    panel.set_yticks(range(len(rows)), [one.reading.label for one in rows])
    panel.set_ylim(len(rows) - 0.4, -0.6)
    panel.tick_params(axis="y", length=0)
    several = "; rings: each text" if len(rows[0].by_text) > 1 else ""
    panel.set_xlabel(f"loss minus that of the last {tokens_label(window)} tokens, nats per token{several}")
    panel.tick_params(axis="x", labelbottom=True)
    draw_grid(panel, f"{span}: left of the line is better than dropping the old text", axis="x")


def draw_keys(panel: Any, rows: Sequence[Found]) -> None:
    """Passkeys by depth: a dot for each, a ring where it was not found."""
    for place, one in enumerate(rows):
        colour, apart = colour_of(one), 0.75 / one.asked
        for depth, count in enumerate(one.keys):
            for trial in range(one.asked):
                across = depth + apart * (trial - (one.asked - 1) / 2)
                filled = colour if trial < count else "white"
                panel.scatter(across, place, s=40, facecolor=filled, edgecolor=colour, lw=1.2)
    panel.set_xticks(range(len(DEPTHS)), [f"{100 * depth:g}" for depth in DEPTHS])
    panel.set_xlim(-0.7, len(DEPTHS) - 0.3)
    panel.tick_params(axis="y", length=0)
    panel.tick_params(axis="x", labelbottom=True)
    panel.set_xlabel("depth, percent")
    draw_grid(panel, "passkeys; ring: lost", axis="x")


def colour_of(one: Found) -> str:
    """The method's, whatever its parameters."""
    return COLOURS.get(one.reading.name.split()[0], INK)


@grouped
def main(
    *,
    texts: TextOptions,
    output: Annotated[Path, Option("--output", "-o", help="Folder for what is finished, the table and the figure.")],
    method: Annotated[
        list[str] | None, Option("--method", "-m", help="With its parameters. Repeatable. Default: thirteen of them.")
    ] = None,
    factor: Annotated[list[float] | None, Option("--factor", "-f", help="Repeatable. Default: 2.")] = None,
    trials: Annotated[int, Option(min=0, help="Passkeys per depth.")] = 1,
    source: SourceOptions,
) -> None:
    """Measure methods that need no training at the end of long texts."""
    session = Session(source)
    session.load_weights()
    console, checkpoint = session.console, session.checkpoint
    model = Readings(checkpoint)
    readings, refusals = model.find(chosen_methods(checkpoint.subject, method or METHODS, factor or [2.0]))
    plain, truncations, methods = split(readings)
    for refusal in refusals:
        console.print(f"Not measured: {refusal.label}. {refusal.reason}", markup=False)
    lengths = tuple(sorted({reading.reach for reading in methods if reading.reach is not None}))
    corpus = texts.read(checkpoint, tokens=lengths[-1] + 1, whole=True)
    study = Study(model, corpus, lengths, trials, checkpoint.tokenizer, turning_point(checkpoint.subject))
    jobs: list[LossJob | PromptJob] = []
    for length in lengths:
        jobs += [study.reads(one, length, text) for one in (plain, *truncations) for text in corpus.documents]
        jobs += [study.reads(one, length, text) for text in corpus.documents for one in reaching(methods, length)]
        jobs += [job for reading in reaching(methods, length) for job in study.asks(reading, length)]
    # Only the checkpoint is the journal's identity: a key has the text in it, so that more texts may follow.
    journal = Journal(output / "cells.jsonl", session.group.process, identity="study.json")
    survey = Survey("zero_shot.py", checkpoint, jobs, journal=journal, group=session.group)
    console.print(f"{len(methods)} methods, {len(corpus.documents)} texts.")
    session.measure(survey)
    if session.group.is_main:
        write(console, Results(study, readings, journal), output, session)


def write(console: Console, results: Results, output: Path, session: Session) -> None:
    """The tables of all lengths as Markdown, and the figure."""
    study = results.study
    device = next(session.checkpoint.model.parameters()).device.type
    parts = [
        f"{session.checkpoint.name}, {session.checkpoint.dtype_note}; {len(study.corpus.documents)} texts, "
        f"{study.trials} passkeys per depth; {machine(device)}."
    ]
    for length in study.lengths:
        window, found = results.at(length)
        title = (
            f"At {tokens_label(length)} tokens, against the last {tokens_label(window)}, the best of four truncations"
        )
        parts.append(table(title, found, study.model.trained_length, length))
    text = "\n".join(parts) + "\n"
    (output / "table.md").write_text(text, encoding="utf-8")
    draw(output / "figure.png", results, study.lengths)
    console.print(text, markup=False, soft_wrap=True)


if __name__ == "__main__":
    run_script(main)
