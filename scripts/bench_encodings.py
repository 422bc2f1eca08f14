"""Encodings in the place of rotation: what a step of training, a text and a new token cost, as ratios to rotation.

    python scripts/bench_encodings.py                        # SmolLM2-135M's shape at 8K tokens, fp32
    python scripts/bench_encodings.py --device cuda --dtypes bf16,fp32 --tokens 32768 --markdown table.md

Each encoding and plain rotation with SDPA take turns, round after round, and medians are divided, so that a busy
machine slows both alike. Memory is what the tensors of reading the text take at its peak, at the whole length and at
half of it: what is written out for all pairs of tokens would take four times as much at the whole. Weights are random:
neither time nor memory depends on them. A new file in ``ctxext/methods`` has its row without another line.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer
from measuring import allocated_memory, in_turns, machine, markdown_table, show_table
from rich.console import Console
from shapes import two_layers
from transformers import DynamicCache, LlamaForCausalLM

import ctxext
from ctxext.evaluation.checkpoint import DTYPES
from ctxext.methods import EncodingMethod, known_methods

ROPE = "rope"
COLUMNS = ("encoding", "dtype", "training step", "text", "new token", "memory", "to half the text")


def encodings() -> list[str]:
    """Everything that can take the place of rotation, and no positions at all."""
    return [
        name for name, kind in known_methods().items() if issubclass(kind, EncodingMethod) or name in ("alibi", "nope")
    ]


def encoded(name: str, dtype: str, device: str) -> LlamaForCausalLM:
    """The model with an encoding on it, or as it is."""
    model = two_layers(DTYPES[dtype], device)
    return model if name == ROPE else ctxext.patch(model, name, factor=4.0)


def reading(model: LlamaForCausalLM, tokens: int) -> Callable[[], object]:
    """Read a text at once, without a head."""
    ids = torch.randint(256, (1, tokens), device=model.device)

    @torch.no_grad()
    def read() -> object:
        return model.model(ids, use_cache=False)

    return read


def training(model: LlamaForCausalLM, tokens: int) -> Callable[[], object]:
    """A step of training on a text, without the optimizer."""
    ids = torch.randint(256, (1, tokens), device=model.device)

    def step() -> object:
        model.zero_grad()
        loss = model(ids, labels=ids, use_cache=False).loss
        return loss.backward()

    return step


def decoding(model: LlamaForCausalLM, tokens: int) -> Callable[[], object]:
    """Read one more token after a text."""
    ids, cache = torch.randint(256, (1, tokens), device=model.device), DynamicCache()
    with torch.no_grad():
        model.model(ids[:, :-64], past_key_values=cache)

    @torch.no_grad()
    def step() -> object:
        return model.model(ids[:, -1:], past_key_values=cache)

    return step


def measure(name: str, dtype: str, tokens: int, train: int, rounds: int, device: str) -> list[str]:
    """One row of the table."""
    models = [encoded(one, dtype, device) for one in (ROPE, name)]
    cells = []
    for kind, length in ((training, train), (reading, tokens), (decoding, tokens)):
        ratio, seconds = in_turns(*(kind(model, length) for model in models), rounds, device)
        cells.append(f"{ratio:.2f} ({1e3 * seconds:.0f} ms)")
    whole, half = (allocated_memory(device, reading(models[1], length)) for length in (tokens, tokens // 2))
    return [name, dtype, *cells, f"{whole:.0f} MiB", f"{whole / half:.1f}"]


def main(
    tokens: Annotated[int, typer.Option(help="Of the text.")] = 8192,
    train: Annotated[int, typer.Option(help="Tokens of a step of training.")] = 2048,
    rounds: Annotated[int, typer.Option(help="Turns of each pair.")] = 3,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtypes: Annotated[str, typer.Option(help="Separated by commas.")] = "fp32",
    only: Annotated[str, typer.Option(help="Names, separated by commas; default all.")] = "",
    threads: Annotated[int, typer.Option(help="Of torch on a CPU; 0 leaves its choice.")] = 0,
    markdown: Annotated[Path | None, typer.Option(help="Write the table here, too.")] = None,
) -> None:
    """Measure and print the table."""
    if threads:
        torch.set_num_threads(threads)
    console, rows = Console(), []
    for dtype in dtypes.split(","):
        for name in only.split(",") if only else encodings():
            rows.append(measure(name, dtype, tokens, train, rounds, device))
            console.print(*rows[-1], sep="  ")
    notes = [
        f"SmolLM2-135M's shape with 2 layers; {machine(device)}.",
        "Ratios to rotation with SDPA in the same run; rotation's own time in brackets.",
        f"`training step`: forward and backward on {train:,} tokens; `text`: {tokens:,} tokens at once; `new token`: "
        f"one more after them; `memory`: what the tensors of reading them take at its peak, and how much more than for "
        f"half of them.",
    ]
    table = markdown_table("# Encodings: what they cost", COLUMNS, rows, notes)
    show_table(table, markdown)


if __name__ == "__main__":
    typer.run(main)
