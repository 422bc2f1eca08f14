"""Which of several checkpoints of one model predicts long texts better, paired by token: what training runs came to.

    python scripts/compare_checkpoints.py first/merged second/merged -t other.parquet --length 16384 -o losses

Each reads the same whole texts once. The table holds the mean loss of every span, and, for all but the first
checkpoint, the difference to the first with its standard error. Weights may differ in any way; the tokenizer must not.
With ``--truncated`` each also reads the ends of the texts, a quarter of the trained window, through four truncations,
and a second table compares the ends of whole texts with the best one: the checkpoint's own, and that of all of them,
which is the one to beat where one of the checkpoints was trained on the same texts in short sequences.
What is read is kept in the output folder: run the same command again after an interruption, or with more checkpoints
of the same texts.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import torch
from measuring import machine, markdown_table
from rich.console import Console
from torch import Tensor, nn
from typer import Argument, Option

sys.path.insert(0, str(Path(__file__).parents[1]))

from ctxext.cli.options import TextOptions, grouped, run_script
from ctxext.evaluation.checkpoint import Checkpoint, load_checkpoint
from ctxext.evaluation.corpus import Corpus, TokenisedDocument
from ctxext.evaluation.forward import check_reach, pass_cost, ticking, turning_point
from ctxext.evaluation.journal import Journal
from ctxext.evaluation.labels import tokens_label
from ctxext.evaluation.loss import loss_by_position
from ctxext.evaluation.readings import known_trained_length
from ctxext.evaluation.statistics import document_difference, edges_for
from ctxext.evaluation.survey import check_finite
from ctxext.evaluation.truncation import best_window, tail_losses, tail_passes, windows_of
from ctxext.progress import StageBar

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
    console = Console(highlight=False, soft_wrap=True)
    journal = Journal(output / "cells.jsonl", identity=output / "texts.json", work="texts")
    losses: dict[str, list[Tensor]] = {}
    cut: dict[str, dict[int, list[Tensor]]] = {}
    trained, corpus, place = 0, None, ""
    for name in checkpoints:
        checkpoint = load_checkpoint(name, dtype=dtype, device=device)
        check_reach(checkpoint.model, length, beyond=False)
        corpus = texts.read(checkpoint, tokens=length + 1)
        journal.claim({"made_by": "compare_checkpoints", "corpus": {"name": "texts", "sha256": corpus.sha256}})
        place = next(checkpoint.model.parameters()).device.type
        trained = trained or known_trained_length(checkpoint.model)
        losses[name] = read(checkpoint, corpus, Reading(length), journal, console)
        for window in windows_of(trained) if truncated else ():
            reading = Reading(length, start=length - trained // ENDS, window=window)
            cut.setdefault(name, {})[window] = read(checkpoint, corpus, reading, journal, console)
        del checkpoint  # before the next one is loaded
    assert corpus is not None, "there is a checkpoint"
    title = f"{len(corpus.documents)} texts, nats per token; {machine(place)}"
    text = markdown_table(title, header(checkpoints), rows(losses, edges_for(trained, length)))
    if truncated:
        start = length - trained // ENDS
        ends = f"The end of the texts, {tokens_label(start)} to {tokens_label(length)}, against the best truncation"
        head = ["checkpoint", "whole texts", "own best truncation", "minus own", "best of all", "minus best of all"]
        text += "\n\n" + markdown_table(ends, head, rows_of_ends(losses, cut, start))
    (output / "table.md").write_text(text + "\n", encoding="utf-8")
    console.print(text, markup=False)


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

    def losses(self, model: nn.Module, document: TokenisedDocument) -> Tensor:
        """Nats per token from ``start`` on."""
        ids = document.take(self.length + 1).input_ids
        if self.window is None:
            return loss_by_position(model, ids)[0]
        return tail_losses(model, ids, window=self.window, start=self.start, prefix=document.prefix)[0]

    def passes(self, prefix: int) -> int:
        """How many forward passes one text takes."""
        if self.window is None:
            return 1
        return tail_passes(self.window, start=self.start, positions=self.length, prefix=prefix)


def read(checkpoint: Checkpoint, corpus: Corpus, reading: Reading, journal: Journal, console: Console) -> list[Tensor]:
    """Nats per token of every text; what is finished is not read again."""
    finished, point = journal.finished(), turning_point(checkpoint.model)
    missing = [one for one in corpus.documents if reading.key(checkpoint, one) not in finished]
    costs = [reading.passes(one.prefix) * pass_cost(reading.window or reading.length, point) for one in missing]
    told = "" if reading.window is None else f", last {tokens_label(reading.window)}"
    with StageBar(console, math.fsum(costs), report=not console.is_terminal) as bar:
        for document, cost in zip(missing, costs, strict=True):
            name = f"{checkpoint.name}{told}, {document.name}"
            with ticking(checkpoint.model, name, cost / reading.passes(document.prefix), bar):
                found = reading.losses(checkpoint.model, document)
            check_finite(found, name)
            line = {"key": reading.key(checkpoint, document), "reading": f"{checkpoint.name}{told}"}
            journal.keep({**line, "item": document.name}, found)
    lines = journal.finished()
    return [journal.losses(lines[reading.key(checkpoint, one)]) for one in corpus.documents]


def header(checkpoints: list[str]) -> list[str]:
    """A column of losses for each, and for all but the first one of differences."""
    first, *others = checkpoints
    return ["tokens", first, *(title for name in others for title in (name, f"minus {first}"))]


def rows(losses: dict[str, list[Tensor]], edges: tuple[int, ...]) -> list[list[str]]:
    """A row for every span."""
    found = []
    for start, stop in pairwise(edges):
        spans = {name: [one[start:stop] for one in some] for name, some in losses.items()}
        first = next(iter(spans.values()))
        row = [f"{tokens_label(start)} to {tokens_label(stop)}"]
        for number, some in enumerate(spans.values()):
            row.append(f"{torch.cat(some).mean().item():.4f}")
            if number:
                gap = document_difference(some, first)
                row.append(f"{gap.mean:+.4f} ± {gap.standard_error:.4f}: {gap.verdict}")
        found.append(row)
    return found


def rows_of_ends(
    losses: dict[str, list[Tensor]], cut: dict[str, dict[int, list[Tensor]]], start: int
) -> list[list[str]]:
    """A row for every checkpoint: the ends of whole texts, against truncations on the same tokens."""
    everyone = {(name, window): found for name, some in cut.items() for window, found in some.items()}

    def mean(some: list[Tensor]) -> float:
        return torch.cat(some).double().mean().item()

    best = min(everyone, key=lambda one: mean(everyone[one]))
    found = []
    for name, some in losses.items():
        ends, own = [one[start:] for one in some], best_window(cut[name])
        row = [name, f"{mean(ends):.4f}"]
        for (of, window), tried in (((name, own), len(cut[name])), (best, len(everyone))):
            shown = everyone[of, window]
            gap = document_difference(ends, shown, baselines=tried)
            what = f"last {tokens_label(window)}" + (f" of {of}" if tried > len(cut[name]) else "")
            row += [f"{mean(shown):.4f} ({what})", f"{gap.mean:+.4f} ± {gap.standard_error:.4f}: {gap.verdict}"]
        found.append(row)
    return found


if __name__ == "__main__":
    run_script(main)
