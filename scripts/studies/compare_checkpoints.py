"""Which of several checkpoints of one model predicts long texts better, paired by token: what training runs came to.

    python scripts/studies/compare_checkpoints.py first/merged second/merged -t other.parquet --length 16384 -o losses

Each reads the same whole texts once. The table holds the mean loss of every span, and, for all but the first
checkpoint, the difference to the first with its standard error. Weights may differ in any way; the tokenizer must not.
With ``--truncated`` each also reads the ends of the texts, a quarter of the trained window, through four truncations,
and a second table compares the ends of whole texts with the best one: the checkpoint's own, and that of all of them,
which is the one to beat where one of the checkpoints was trained on the same texts in short sequences. Both tables
are drawn too, as ``figure.png``.
What is read is kept in the output folder: run the same command again after an interruption, or with more checkpoints
of the same texts.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Annotated

import torch
from rich.console import Console
from torch import Tensor
from typer import Argument, Option

sys.path.insert(0, str(Path(__file__).parents[2]))

from ctxext.checkpoints.source import checked_path, gguf_inside
from ctxext.cli.options import TextOptions, grouped, run_script
from ctxext.errors import InvalidParameterError
from ctxext.evaluation.report.figures import (
    COLOURS,
    DASHED,
    colours_for,
    differences_panel,
    draw_grid,
    require_matplotlib,
    saved_figure,
)
from ctxext.measuring.checkpoint import Checkpoint, load_checkpoint
from ctxext.measuring.forward import check_reach, pass_cost, ticking, turning_point
from ctxext.measuring.journal import Journal
from ctxext.measuring.labels import tokens_label
from ctxext.measuring.loss import Window
from ctxext.measuring.readings import known_trained_length
from ctxext.measuring.statistics import PairedDifference, check_finite, document_difference, edges_for, mean_loss
from ctxext.measuring.truncation import tail_windows, windows_of
from ctxext.progress import StageBar
from ctxext.texts.corpus import Corpus, TokenisedDocument
from ctxext.texts.trained import refuse_trained
from scripts.bench import machine, markdown_table

Spans = Sequence[tuple[int, int]]

# The end of the texts is one part in so many of the trained window.
ENDS = 4


@grouped
def main(
    *,
    checkpoints: Annotated[list[str], Argument(help="Directories, adapters or .gguf files, the one to beat first.")],
    texts: TextOptions,
    length: Annotated[int, Option(help="Tokens to read of each text.")],
    output: Annotated[Path, Option("--output", "-o", help="Folder for the losses and the table.")],
    truncated: Annotated[bool, Option(help="Also compare the ends of the texts with the best truncation.")] = False,
    dtype: Annotated[str, Option(help="auto (bf16 where it is safe), bf16, fp16 or fp32.")] = "auto",
    device: Annotated[str | None, Option(help="Where to compute; default a GPU if there is one.")] = None,
) -> None:
    """Read the texts with every checkpoint, and print and write the table."""
    require_matplotlib()  # now, and not when all is read; so with the checkpoints
    require_each_once(checkpoints)
    for name in checkpoints:
        refuse_trained(name, texts.text or (), texts.split)
    console = Console(highlight=False, soft_wrap=True)
    journal = Journal(output / "cells.jsonl", identity="texts.json")
    losses: dict[str, list[Tensor]] = {}
    cut: dict[str, dict[int, list[Tensor]]] = {}
    trained, corpus, place = 0, None, ""
    spans: Spans = ()
    for name, label in labels_of(checkpoints).items():
        checkpoint = load_checkpoint(name, dtype=dtype, device=device)
        check_reach(checkpoint.subject, length)
        trained = trained or known_trained_length(checkpoint.subject)
        spans = spans or list(pairwise(edges_for(trained, length)))
        corpus = texts.read(checkpoint, tokens=length + 1)
        journal.claim({"made_by": "compare_checkpoints", "corpus": {"name": "texts", "sha256": corpus.sha256}})
        place = next(checkpoint.model.parameters()).device.type
        losses[name] = read(checkpoint, corpus, Reading(length), journal, console, label=label)
        for window in windows_of(trained) if truncated else ():
            reading = Reading(length, start=length - trained // ENDS, window=window)
            found = read(checkpoint, corpus, reading, journal, console, label=label)
            cut.setdefault(name, {})[window] = found
        del checkpoint  # before the next one is loaded
    assert corpus is not None, "there is a checkpoint"
    title = f"{len(corpus.documents)} texts, nats per token; {machine(place)}"
    gaps = differences(losses, spans)
    text = markdown_table(title, header(checkpoints), rows(losses, gaps, spans))
    start = length - trained // ENDS
    ends = ends_of(losses, cut, start) if truncated else {}
    if ends:
        told = f"The end of the texts, {tokens_label(start)} to {tokens_label(length)}, against the best truncation"
        head = ["checkpoint", "whole texts", "own best truncation", "minus own", "best of all", "minus best of all"]
        text += "\n\n" + markdown_table(told, head, rows_of_ends(ends))
    (output / "table.md").write_text(text + "\n", encoding="utf-8")
    if gaps or ends:
        draw(output / "figure.png", checkpoints, gaps, spans, ends)
    console.print(text, markup=False)


def require_each_once(checkpoints: list[str]) -> None:
    """Raise ``CtxextError`` for a path that holds no checkpoint, or stands there twice."""
    for number, name in enumerate(checkpoints):
        checked_path(*gguf_inside(name, {}))
        if Path(name) in map(Path, checkpoints[:number]):
            raise InvalidParameterError(f"Every checkpoint is named once; {Path(name)} stands there twice. Drop one.")


@dataclass(frozen=True)
class Reading:
    """How texts are read: whole, or from ``start`` on through the last ``window`` tokens."""

    length: int
    start: int = 0
    window: int | None = None

    def key(self, checkpoint: Checkpoint, document: TokenisedDocument) -> str:
        """What a finished one is found by."""
        whole = f"{checkpoint.sha256}-{document.sha256}-{self.length}"
        return whole if self.window is None else f"{whole}-{self.start}-{self.window}"

    def windows(self, prefix: int) -> tuple[Window, ...]:
        """The forward passes over one text."""
        if self.window is None:
            return (Window(0, self.length + 1, self.length),)
        return tail_windows(self.window, start=self.start, positions=self.length, prefix=prefix)


def read(
    checkpoint: Checkpoint, corpus: Corpus, reading: Reading, journal: Journal, console: Console, *, label: str
) -> list[Tensor]:
    """Nats per token of every text; what is finished is not read again. Messages name the checkpoint by its label."""
    finished, point = journal.finished(), turning_point(checkpoint.subject)
    missing = [one for one in corpus.documents if reading.key(checkpoint, one) not in finished]
    windows = [reading.windows(one.prefix) for one in missing]
    costs = [pass_cost(one.positions, point) for own in windows for one in own]
    told = label if reading.window is None else f"{label}, last {tokens_label(reading.window)}"
    with StageBar(console, math.fsum(costs)) as bar:
        for document, own in zip(missing, windows, strict=True):
            name, parts = f"{told}, {document.name}", []
            for window in own:
                with ticking(checkpoint.model, name, pass_cost(window.positions, point), bar):
                    parts.append(window.losses(checkpoint.model, document.take(reading.length + 1).input_ids)[0])
            found = torch.cat(parts)
            check_finite(found, name)
            line = {"key": reading.key(checkpoint, document), "reading": told}
            journal.keep({**line, "item": document.name}, found)
    lines = journal.finished()
    return [journal.losses(lines[reading.key(checkpoint, one)]) for one in corpus.documents]


def header(checkpoints: list[str]) -> list[str]:
    """A column of losses for each, and for all but the first one of differences."""
    first, *others = checkpoints
    return ["tokens", first, *(title for name in others for title in (name, f"minus {first}"))]


def shown(gap: PairedDifference) -> str:
    """A difference with its standard error, and what it says."""
    return f"{gap.mean:+.4f} ± {gap.standard_error:.4f}: {gap.verdict}"


def differences(losses: dict[str, list[Tensor]], spans: Spans) -> dict[str, list[PairedDifference]]:
    """For all but the first checkpoint: what it differs by from the first, in every span."""
    (_, first), *others = losses.items()

    def gap(some: list[Tensor], start: int, stop: int) -> PairedDifference:
        return document_difference([one[start:stop] for one in some], [one[start:stop] for one in first])

    return {name: [gap(some, *span) for span in spans] for name, some in others}


def rows(losses: dict[str, list[Tensor]], gaps: dict[str, list[PairedDifference]], spans: Spans) -> list[list[str]]:
    """A row for every span."""
    found = []
    for number, (start, stop) in enumerate(spans):
        row = [f"{tokens_label(start)} to {tokens_label(stop)}"]
        for name, some in losses.items():
            row.append(f"{torch.cat([one[start:stop] for one in some]).mean().item():.4f}")
            if name in gaps:
                row.append(shown(gaps[name][number]))
        found.append(row)
    return found


@dataclass(frozen=True)
class End:
    """The ends of one checkpoint's whole texts, beside a truncation on the same tokens.

    Args:
        loss: of the ends, nats per token.
        truncation: the truncation's name: its tokens, and whose it is where that is not the checkpoint's own.
        truncated_loss: nats per token.
        gap: the whole texts' loss minus the truncation's.
    """

    loss: float
    truncation: str
    truncated_loss: float
    gap: PairedDifference


def ends_of(
    losses: dict[str, list[Tensor]], cut: dict[str, dict[int, list[Tensor]]], start: int
) -> dict[str, tuple[End, End]]:
    """For every checkpoint: against its own best truncation, and against the best one of all checkpoints."""
    everyone = {(name, window): found for name, some in cut.items() for window, found in some.items()}

    def mean(some: list[Tensor]) -> float:
        return torch.cat(some).double().mean().item()

    def end(name: str, of: str, window: int, tried: int) -> End:
        ends, baseline = [one[start:] for one in losses[name]], everyone[of, window]
        truncation = f"last {tokens_label(window)}" + (f" of {of}" if tried > len(cut[name]) else "")
        gap = document_difference(ends, baseline, baselines=tried)
        return End(mean(ends), truncation, mean(baseline), gap)

    best = min(everyone, key=lambda one: mean(everyone[one]))
    own = {name: min(one, key=lambda window: (mean_loss([*one[window]]), -window)) for name, one in cut.items()}
    return {name: (end(name, name, own[name], len(cut[name])), end(name, *best, len(everyone))) for name in losses}


def rows_of_ends(ends: dict[str, tuple[End, End]]) -> list[list[str]]:
    """A row for every checkpoint."""
    return [
        [name, f"{own.loss:.4f}"]
        + [part for one in (own, best) for part in (f"{one.truncated_loss:.4f} ({one.truncation})", shown(one.gap))]
        for name, (own, best) in ends.items()
    ]


def labels_of(checkpoints: list[str]) -> dict[str, str]:
    """The parts of their paths by which they differ, from the first such part to the last."""

    def alike(paths: list[tuple[str, ...]]) -> int:
        return sum(1 for _ in takewhile(lambda level: len(set(level)) == 1, zip(*paths, strict=False)))

    parts = [Path(name).parts for name in checkpoints]
    front = alike(parts)
    back = alike([one[front:][::-1] for one in parts])
    return {name: "/".join(one[front : len(one) - back]) or name for name, one in zip(checkpoints, parts, strict=True)}


def draw(
    path: Path,
    checkpoints: list[str],
    gaps: dict[str, list[PairedDifference]],
    spans: Spans,
    ends: dict[str, tuple[End, End]],
) -> None:
    """Both tables' differences side by side, each where there is one."""
    labels = labels_of(checkpoints)
    colours = dict(zip(checkpoints, colours_for(labels.values()), strict=True))
    parts = [bool(gaps), bool(ends)]
    title = "Checkpoints on the same long texts, nats per token"
    with saved_figure(path, (5.2 * sum(parts), 4.5), title) as figure:
        panels = iter(figure.subplots(1, sum(parts), squeeze=False)[0])
        if gaps:
            groups = [(name, labels[name], some) for name, some in gaps.items()]
            columns = [f"{tokens_label(start)}-{tokens_label(stop)}" for start, stop in spans]
            heading = f"Loss minus that of {labels[checkpoints[0]]}, 95 %"
            how = {"below": "it predicts better", "colours": [colours[name] for name in gaps]}
            differences_panel(columns, groups, title=heading, **how).draw(next(panels))
        if ends:
            axes = next(panels)
            draw_grid(axes, "Ends of whole texts minus a truncation's, 95 %")
            axes.axhline(0, color=COLOURS["truncated"], lw=1.4, ls=DASHED)
            for place, (name, both) in enumerate(ends.items()):
                for one, side, filled in zip(both, (-0.12, 0.12), (True, False), strict=True):
                    face = colours[name] if filled else "white"
                    axes.errorbar(
                        place + side, one.gap.mean, yerr=one.gap.margin, fmt="o", color=colours[name], mfc=face
                    )
            axes.set_xticks(range(len(ends)), [labels[name] for name in ends], fontsize=9)
            axes.margins(y=0.25)
            axes.set_xlim(-0.6, len(ends) - 0.4)
            axes.set_xlabel("filled: its own best truncation; hollow: the best of all", fontsize=9)


if __name__ == "__main__":
    run_script(main)
