"""Which of several checkpoints of one model predicts long texts better, paired by token: what training runs came to.

    python scripts/compare_checkpoints.py first/merged second/merged -t other.parquet --length 16384 -o losses

Each reads the same whole texts once. The table holds the mean loss of every span, and, for all but the first
checkpoint, the difference to the first with its standard error. Weights may differ in any way; the tokenizer must not.
What is read is kept in the output folder: run the same command again after an interruption, or with more checkpoints
of the same texts.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import torch
from measuring import machine, markdown_table
from rich.console import Console
from torch import Tensor
from typer import Argument, Option

sys.path.insert(0, str(Path(__file__).parents[1]))

from ctxext.cli.options import TextOptions, grouped, run_script
from ctxext.evaluation.checkpoint import Checkpoint, load_checkpoint
from ctxext.evaluation.corpus import Corpus
from ctxext.evaluation.forward import check_reach, pass_cost, ticking, turning_point
from ctxext.evaluation.journal import Journal
from ctxext.evaluation.labels import tokens_label
from ctxext.evaluation.loss import loss_by_position
from ctxext.evaluation.readings import known_trained_length
from ctxext.evaluation.statistics import document_difference, edges_for
from ctxext.evaluation.survey import check_finite
from ctxext.progress import StageBar


@grouped
def main(
    *,
    checkpoints: Annotated[list[str], Argument(help="Directories, adapters or .gguf files, the one to beat first.")],
    texts: TextOptions,
    length: Annotated[int, Option(help="Tokens to read of each text.")],
    output: Annotated[Path, Option("--output", "-o", help="Folder for the losses and the table.")],
    dtype: Annotated[str, Option(help="auto (bf16 where it is safe), bf16, fp16 or fp32.")] = "auto",
    device: Annotated[str | None, Option(help="Where to compute; default a GPU if there is one.")] = None,
) -> None:
    """Read the texts with every checkpoint, and print and write the table."""
    console = Console(highlight=False, soft_wrap=True)
    journal = Journal(output / "cells.jsonl", identity=output / "texts.json", work="texts")
    losses: dict[str, list[Tensor]] = {}
    trained, corpus, place = 0, None, ""
    for name in checkpoints:
        checkpoint = load_checkpoint(name, dtype=dtype, device=device)
        check_reach(checkpoint.model, length, beyond=False)
        corpus = texts.read(checkpoint, tokens=length + 1)
        journal.claim({"made_by": "compare_checkpoints", "corpus": {"name": "texts", "sha256": corpus.sha256}})
        place = next(checkpoint.model.parameters()).device.type
        trained = trained or known_trained_length(checkpoint.model)
        losses[name] = read(checkpoint, corpus, length, journal, console)
        del checkpoint  # before the next one is loaded
    assert corpus is not None, "there is a checkpoint"
    title = f"{len(corpus.documents)} texts, nats per token; {machine(place)}"
    text = markdown_table(title, header(checkpoints), rows(losses, edges_for(trained, length)))
    (output / "table.md").write_text(text + "\n", encoding="utf-8")
    console.print(text, markup=False)


def read(checkpoint: Checkpoint, corpus: Corpus, length: int, journal: Journal, console: Console) -> list[Tensor]:
    """Nats per token of every text, [length] each; what is finished is not read again."""
    keys = [f"{checkpoint.sha256}-{one.sha256}-{length}" for one in corpus.documents]
    missing = [(key, one) for key, one in zip(keys, corpus.documents, strict=True) if key not in journal.finished()]
    cost = pass_cost(length, turning_point(checkpoint.model))
    with StageBar(console, cost * len(missing), report=not console.is_terminal) as bar:
        for key, document in missing:
            name = f"{checkpoint.name}, {document.name}"
            with ticking(checkpoint.model, name, cost, bar):
                found = loss_by_position(checkpoint.model, document.take(length + 1).input_ids)[0]
            check_finite(found, name)
            journal.keep({"key": key, "reading": checkpoint.name, "item": document.name}, found)
    lines = journal.finished()
    return [journal.losses(lines[key]) for key in keys]


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


if __name__ == "__main__":
    run_script(main)
