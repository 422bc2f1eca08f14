"""Encodings in the place of rotation: what a step of training, a text and a new token cost, as ratios to rotation.

    python scripts/bench_encodings.py                        # SmolLM2-135M's shape at 8K tokens, fp32
    python scripts/bench_encodings.py --device cuda --dtypes bf16,fp32 --tokens 32768 --markdown table.md

Each encoding and plain rotation with SDPA take turns. Memory is what the tensors of reading the text take at its peak,
at the whole length and at half of it: what is written out for all pairs of tokens would take four times as much at the
whole. A new file in ``ctxext/methods`` has its row without another line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any

import bench
import torch
import typer
from transformers import DynamicCache

import ctxext
from ctxext.measuring.checkpoint import DTYPES
from ctxext.methods import EncodingMethod, known_methods

COLUMNS = ("encoding", "dtype", "training step", "text", "new token", "memory", "to half the text")


def encodings() -> list[str]:
    """Return everything that can take the place of rotation, and no positions at all."""
    return [
        name for name, kind in known_methods().items() if issubclass(kind, EncodingMethod) or name in ("alibi", "nope")
    ]


def reading(model: Any, tokens: int) -> Callable[[], object]:
    """Return a call that reads a text at once, without a head."""
    ids = torch.randint(256, (1, tokens), device=model.device)
    return torch.no_grad()(lambda: model.model(ids, use_cache=False))


def training(model: Any, tokens: int) -> Callable[[], object]:
    """Return a call that takes a step of training on a text, without the optimizer."""
    ids = torch.randint(256, (1, tokens), device=model.device)

    def step() -> object:
        model.zero_grad()
        return model(ids, labels=ids, use_cache=False).loss.backward()

    return step


@torch.no_grad()
def decoding(model: Any, tokens: int) -> Callable[[], object]:
    """Return a call that reads one more token after a text."""
    ids, cache = torch.randint(256, (1, tokens), device=model.device), DynamicCache()
    model.model(ids[:, :-64], past_key_values=cache)
    return torch.no_grad()(lambda: model.model(ids[:, -1:], past_key_values=cache))


def measure(name: str, dtype: str, tokens: int, train: int, rounds: int, device: str) -> bench.Row:
    """Return one row of the table."""
    models = [bench.two_layers(dtype, device), ctxext.patch(bench.two_layers(dtype, device), name, factor=4.0)]
    cells = []
    for kind, length in ((training, train), (reading, tokens), (decoding, tokens)):
        rotation, encoding = bench.in_turns([kind(model, length) for model in models], rounds, device)
        cells.append(f"{encoding / rotation:.2f} ({1e3 * rotation:.0f} ms)")
    whole, half = (bench.allocated_memory(device, reading(models[1], length)) for length in (tokens, tokens // 2))
    return [name, dtype, *cells, f"{whole:.0f} MiB", f"{whole / half:.1f}"]


def main(
    tokens: bench.Tokens = 8192,
    train: Annotated[int, typer.Option(help="tokens of a step of training")] = 2048,
    rounds: bench.Rounds = 3,
    device: bench.Device = bench.DEVICE,
    dtypes: bench.Dtypes = "fp32",
    only: Annotated[str, typer.Option(help="names, comma-separated; all if empty")] = "",
    threads: bench.Threads = 0,
    markdown: bench.Markdown = None,
) -> None:
    """Measure encodings beside rotation."""
    bench.use_threads(threads)
    names = bench.listed(only, known_methods()) or encodings()

    def rows(say: bench.Say) -> Iterator[bench.Row]:
        for dtype in bench.listed(dtypes, DTYPES):
            for name in names:
                say(f"{name}, {dtype}")
                yield measure(name, dtype, tokens, train, rounds, device)

    notes = [
        f"SmolLM2-135M's shape with 2 layers; {bench.machine(device)}.",
        "Ratios to rotation with SDPA in the same run; rotation's own time in brackets.",
        f"`training step`: forward and backward on {train:,} tokens; `text`: {tokens:,} tokens at once; `new token`: "
        f"one more after them; `memory`: what the tensors of reading them take at its peak, and how much more than for "
        f"half of them.",
    ]
    bench.report("# Encodings: what they cost", COLUMNS, rows, markdown, notes)


if __name__ == "__main__":
    typer.run(main)
