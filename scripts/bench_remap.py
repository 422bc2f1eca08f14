"""Position remapping: time and memory beside plain attention, as ratios measured in the same run.

    python scripts/bench_remap.py                            # SmolLM2-135M's shape at 32K tokens, bf16 and fp32
    python scripts/bench_remap.py --device cuda --shape llama-8b --layers 32 --tokens 65536 --markdown table.md

Each number is beside that of plain transformers with SDPA at the same length, which such a model computes but cannot
use: a whole text read into a cache (no head), one more token after it, the keys and values in that cache, and all
tensors at the peak of reading the text. Plain and remapped models take turns. Under ``retrieval_heads`` a fifth of the
key-value groups read far, in two fifths of the layers, as in SmolLM2-135M: of five layers one and two of three.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any

import bench
import torch
import typer
from transformers import DynamicCache

import ctxext
from ctxext.caches.held import held_layers
from ctxext.measuring.checkpoint import DTYPES
from ctxext.measuring.readings import named_method
from ctxext.methods.retrieval_heads import RetrievalHeads

TRAINED = 8192
METHODS = "self_extend,rerope,dual_chunk,streaming,retrieval_heads"
COLUMNS = ("method", "dtype", "text", "step", "cache", "memory")


def plain(shape: str, count: int, dtype: str, device: str) -> Any:
    """Return layers of a shape with few words, where attention is what is measured."""
    few = {"vocab_size": 256, "max_position_embeddings": TRAINED}
    return bench.random_model(shape, dtype, device, layers=count, **few)


def method_for(text: str, tokens: int, groups: int, layers: int) -> Any:
    """Return a method, named as command lines name it; retrieval heads in the first and fourth of every five layers."""
    method = named_method(text, tokens / TRAINED)
    if isinstance(method, RetrievalHeads):
        chosen = {0: range(groups // 3, 2 * (groups // 3)), 3: range(groups - groups // 3)}
        far = [layer * groups + group for layer in range(layers) for group in chosen.get(layer % 5, ())]
        method = named_method(f"{text} heads={far}".replace(", ", ","), tokens / TRAINED)
    return method


def held(cache: DynamicCache) -> int:
    """Return the bytes of keys and values in a cache."""
    near = [layer.near for layer in held_layers(cache) if layer.near is not None]
    return sum(part.keys.nbytes + part.values.nbytes for part in [*cache.layers, *near])


@torch.no_grad()
def measure(models: tuple[Any, Any], head: bench.Row, tokens: int, rounds: int, device: str) -> bench.Row:
    """Return one row of the table, of a plain model and a remapped one."""
    ids = torch.randint(256, (1, tokens), device=device)

    def read(model: Any) -> DynamicCache:
        cache = DynamicCache()
        model.model(ids, past_key_values=cache)
        return cache

    def reading(model: Any) -> Callable[[], object]:
        return lambda: read(model)

    def step(model: Any, cache: DynamicCache) -> Callable[[], object]:
        return lambda: model.model(ids[:, -1:], past_key_values=cache)

    text, long_text = bench.in_turns([*map(reading, models)], rounds, device)
    least, most = (bench.allocated_memory(device, reading(model)) for model in models)
    caches = [read(model) for model in models]
    plain_cache, cache = map(held, caches)
    token, long_token = bench.in_turns([*map(step, models, caches)], 10 * rounds, device)
    return [
        *head,
        f"{long_text / text:.2f} ({text:.3g} s)",
        f"{long_token / token:.2f} ({1e3 * token:.1f} ms)",
        f"{cache / plain_cache:.2f} ({plain_cache / 2**20:.0f} MiB)",
        f"{most / least:.2f} ({least:.0f} MiB)",
    ]


def main(
    tokens: bench.Tokens = 4 * TRAINED,
    rounds: bench.Rounds = 3,
    device: bench.Device = bench.DEVICE,
    dtypes: bench.Dtypes = "bf16,fp32",
    threads: bench.Threads = 0,
    methods: Annotated[str, typer.Option(help="Separated by commas, each with its parameters.")] = METHODS,
    shape: Annotated[str, typer.Option(help=f"one of {', '.join(bench.SHAPES)}")] = "smollm2",
    layers: bench.Layers = 5,
    markdown: bench.Markdown = None,
) -> None:
    """Measure position remapping beside plain attention; steps of decoding take ten times as many rounds."""
    bench.use_threads(threads)
    count = layers or bench.SHAPES[shape].num_hidden_layers

    def rows(say: bench.Say) -> Iterator[bench.Row]:
        for dtype in bench.listed(dtypes, DTYPES):
            for method in bench.listed(methods):
                say(f"{method}, {dtype}")
                try:
                    models = plain(shape, count, dtype, device), plain(shape, count, dtype, device)
                    groups = models[0].config.num_key_value_heads
                    ctxext.patch(models[1], method_for(method, tokens, groups, count))
                    yield measure(models, [method, dtype], tokens, rounds, device)
                except torch.OutOfMemoryError:  # with grouped heads in float32 CUDA's plain attention holds all scores
                    yield [method, dtype, *["does not fit"] * (len(COLUMNS) - 2)]

    notes = [
        f"{tokens:,} tokens, trained length {TRAINED:,}; {bench.machine(device)}.",
        "Ratios to plain transformers with SDPA at the same length in the same run; its own number in brackets.",
        f"`text`: {count} layers of {shape} without a head read the whole text into a cache; `step`: one more "
        "token after it; `cache`: keys and values held; `memory`: all tensors at the peak of reading the text.",
    ]
    bench.report("# Position remapping: time and memory", COLUMNS, rows, markdown, notes)


if __name__ == "__main__":
    typer.run(main)
