"""`ctxext choose --search`: time and peak memory of one step, beside a training step and a pass without gradients.

    python scripts/bench_search.py                           # SmolLM2-135M's shape at 16K tokens, 4 layers
    python scripts/bench_search.py --tokens 65536 --layers 30 --device cuda --markdown table.md

The training step is the leanest one of `ctxext.training`: each layer, its attention included, is computed again in the
backward pass, the logits exist for a chunk at a time, and the only gradient is that of the embedded text. Each is
measured in a process of its own, which has freed nothing yet. Weights are random: nothing depends on them.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer
from measuring import added_memory, in_fresh_process, machine, markdown_table, show_table, synchronize
from rich.console import Console
from shapes import SHAPES
from transformers import LlamaForCausalLM

from ctxext.evaluation.checkpoint import DTYPES

sys.path.insert(0, str(Path(__file__).parents[1]))

import ctxext
from ctxext.choosing.landscape import Example, Landscape, as_method
from ctxext.surgery.rotary import find_sites
from ctxext.training.loss import Pieces
from ctxext.training.memory import Memory, return_freed_memory

COLUMNS = ("what", "dtype", "seconds", "in passes", "peak memory", "to a training step")
# Few, so that layers are what is measured: the logits of a chunk are the same for all.
CHUNK, VOCABULARY = 1024, 256


def build(dtype: str, tokens: int, layers: int, device: str) -> LlamaForCausalLM:
    """A model of SmolLM2-135M's shape that was trained for half of the tokens."""
    config = copy.deepcopy(SHAPES["smollm2"])
    config.num_hidden_layers, config.max_position_embeddings, config.vocab_size = layers, tokens // 2, VOCABULARY
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(device, DTYPES[dtype]).eval()


def forward(model: LlamaForCausalLM, ids: torch.Tensor) -> Callable[[], object]:
    """A pass without gradients."""

    def call() -> None:
        with torch.no_grad():
            Pieces(model, {"input_ids": ids[:, :-1], "use_cache": False}, ids[:, 1:]).at_once(CHUNK)

    return call


def training(model: LlamaForCausalLM, ids: torch.Tensor) -> Callable[[], object]:
    """A training step that keeps as little as `ctxext.training` can on any device."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    Memory(loss_chunk=CHUNK).apply(model)
    model.train()
    embedded = model.get_input_embeddings()(ids[:, :-1]).requires_grad_()

    def call() -> None:
        model(inputs_embeds=embedded, labels=ids[:, :-1], use_cache=False).loss.backward()

    return call


def searching(model: LlamaForCausalLM, ids: torch.Tensor) -> Callable[[], object]:
    """A step of the search."""
    sites = find_sites(model, model.config.max_position_embeddings)
    vector = torch.zeros(sites[0].spec.rotary_dim // 2 + 1, dtype=torch.float64)
    ctxext.patch(model, as_method(vector, 2.0))

    def call() -> None:
        with Landscape(model, sites, 2.0) as landscape:
            landscape.gradient(vector, [Example.mean(ids)])

    return call


KINDS = {"a pass without gradients": forward, "a training step": training, "a step of the search": searching}


def measured(kind: str, dtype: str, tokens: int, layers: int, device: str, threads: int) -> tuple[float, float | None]:
    """Seconds, and MiB at the peak beyond the weights; in a process of its own."""
    if threads:
        torch.set_num_threads(threads)
    return_freed_memory()
    model = build(dtype, tokens, layers, device)
    ids = torch.randint(model.config.vocab_size, (1, tokens + 1), generator=torch.Generator().manual_seed(0)).to(device)
    call = KINDS[kind](model, ids)
    synchronize(device)
    began = time.perf_counter()
    peak = added_memory(device, call)
    synchronize(device)
    return time.perf_counter() - began, peak


def main(
    tokens: Annotated[int, typer.Option(help="Of the text.")] = 16384,
    layers: Annotated[int, typer.Option(help="Of the model; SmolLM2-135M has 30.")] = 4,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtypes: Annotated[str, typer.Option(help="Separated by commas.")] = "fp32",
    threads: Annotated[int, typer.Option(help="Of torch on a CPU; 0 leaves its choice.")] = 0,
    markdown: Annotated[Path | None, typer.Option(help="Write the table here, too.")] = None,
) -> None:
    """Measure and print the table."""
    rows, console = [], Console()
    for dtype in dtypes.split(","):
        found = {}
        for kind in KINDS:
            found[kind] = in_fresh_process(measured, kind, dtype, tokens, layers, device, threads)
        one, least = (found[kind] for kind in list(KINDS)[:2])
        for kind, (seconds, peak) in found.items():
            share = "" if peak is None or not least[1] else f"{peak / least[1]:.2f}"
            shown = "unknown" if peak is None else f"{peak:.0f} MiB"
            rows.append([kind, dtype, f"{seconds:.1f}", f"{seconds / one[0]:.2f}", shown, share])
            console.print(*rows[-1], sep="  ")
    notes = [
        f"SmolLM2-135M's shape with {layers} layers, {tokens:,} tokens; {machine(device)}; {threads or 'all'} threads.",
        "Peak memory is what is added to the weights; the first call of each process, so that seconds are rough.",
    ]
    table = markdown_table("# A step of the search: time and memory", COLUMNS, rows, notes)
    show_table(table, markdown)


if __name__ == "__main__":
    typer.run(main)
