"""`ctxext choose --search`: time and peak memory of one step, beside a training step and a pass without gradients.

    python scripts/bench_search.py                           # SmolLM2-135M's shape at 16K tokens, 4 layers
    python scripts/bench_search.py --tokens 65536 --layers 30 --device cuda --markdown table.md

The training step is the leanest one of `ctxext.training`: each layer, its attention included, is computed again in the
backward pass, the logits exist for a chunk at a time, and the only gradient is that of the embedded text. Each is
measured in a process of its own, which has freed nothing yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import bench
import torch
import typer

import ctxext
from ctxext.choosing.landscape import Example, Landscape, as_method
from ctxext.core.rotary import find_sites
from ctxext.core.subject import Subject
from ctxext.measuring.checkpoint import DTYPES
from ctxext.training.loss import Pieces
from ctxext.training.memory import Memory, return_freed_memory

COLUMNS = ("what", "dtype", "seconds", "in passes", "peak memory", "to a training step")
# Few, so that layers are what is measured: the logits of a chunk are the same for all.
CHUNK, VOCABULARY = 1024, 256


def forward(model: Any, ids: torch.Tensor) -> Callable[[], object]:
    """Return a pass without gradients."""
    given = {"input_ids": ids[:, :-1], "use_cache": False}
    return torch.no_grad()(lambda: Pieces(model, given, ids[:, 1:]).at_once(CHUNK))


def training(model: Any, ids: torch.Tensor) -> Callable[[], object]:
    """Return a training step that keeps as little as `ctxext.training` can on any device."""
    model.requires_grad_(False)
    Memory(loss_chunk=CHUNK).apply(model)
    model.train()
    embedded = model.get_input_embeddings()(ids[:, :-1]).requires_grad_()
    return lambda: model(inputs_embeds=embedded, labels=ids[:, :-1], use_cache=False).loss.backward()


def searching(model: Any, ids: torch.Tensor) -> Callable[[], object]:
    """Return a step of the search."""
    sites = find_sites(Subject.of(model), model.config.max_position_embeddings)
    vector = torch.zeros(sites[0].spec.rotary_dim // 2 + 1, dtype=torch.float64)
    ctxext.patch(model, as_method(vector, 2.0))

    def call() -> None:
        with Landscape(model, sites, 2.0) as landscape:
            landscape.gradient(vector, [Example.mean(ids)])

    return call


KINDS = {"a pass without gradients": forward, "a training step": training, "a step of the search": searching}


def measured(kind: str, dtype: str, tokens: int, layers: int, device: str, threads: int) -> tuple[float, float | None]:
    """Return the seconds of a call, and the MiB that it adds to the weights; run it in a fresh process."""
    bench.use_threads(threads)
    return_freed_memory()
    trained = {"max_position_embeddings": tokens // 2}
    model = bench.random_model("smollm2", dtype, device, layers, **trained, vocab_size=VOCABULARY)
    ids = torch.randint(VOCABULARY, (1, tokens + 1), generator=torch.Generator().manual_seed(0)).to(device)
    call, peaks = KINDS[kind](model, ids), []
    seconds = bench.seconds_of(lambda: peaks.append(bench.added_memory(device, call)), device)
    return seconds, peaks[0]


def main(
    tokens: bench.Tokens = 16384,
    layers: bench.Layers = 4,
    device: bench.Device = bench.DEVICE,
    dtypes: bench.Dtypes = "fp32",
    threads: bench.Threads = 0,
    markdown: bench.Markdown = None,
) -> None:
    """Measure a step of the search."""

    def rows(say: bench.Say) -> Iterator[bench.Row]:
        for dtype in bench.listed(dtypes, DTYPES):
            results = {}
            for kind in KINDS:
                say(f"{kind}, {dtype}")
                results[kind] = bench.in_fresh_process(measured, kind, dtype, tokens, layers, device, threads)
            (one_pass, _), (_, training_peak), _ = results.values()
            for kind, (seconds, peak) in results.items():
                share = "" if peak is None or not training_peak else f"{peak / training_peak:.2f}"
                added = "unknown" if peak is None else f"{peak:.0f} MiB"
                yield [kind, dtype, f"{seconds:.1f}", f"{seconds / one_pass:.2f}", added, share]

    notes = [
        f"SmolLM2-135M's shape with {layers or 'all'} layers, {tokens:,} tokens; {bench.machine(device)}; "
        f"{threads or 'all'} threads.",
        "Peak memory is what is added to the weights; the first call of each process, so that seconds are rough.",
    ]
    bench.report("# A step of the search: time and memory", COLUMNS, rows, markdown, notes)


if __name__ == "__main__":
    typer.run(main)
