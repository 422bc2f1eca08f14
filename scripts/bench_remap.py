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
from dataclasses import dataclass
from typing import Annotated, Any

import bench
import torch
import typer
from transformers import DynamicCache

import ctxext
from ctxext.evaluation.checkpoint import DTYPES
from ctxext.evaluation.readings import named_method
from ctxext.methods import RetrievalHeads
from ctxext.surgery.bounded import SplitLayer

TRAINED = 8192
METHODS = "self_extend,rerope,dual_chunk,streaming,retrieval_heads"
COLUMNS = ("method", "dtype", "text", "step", "cache", "memory")


@dataclass(frozen=True)
class Layers:
    """Layers of a shape with few words, where attention is what is measured.

    Args:
        shape: a key of ``bench.SHAPES``.
        count: layers.
        tokens: of the text.
        device: where they run.
    """

    shape: str
    count: int
    tokens: int
    device: str

    def plain(self, dtype: str) -> Any:
        """Return them with random weights."""
        few = {"vocab_size": 256, "max_position_embeddings": TRAINED}
        return bench.random_model(self.shape, dtype, self.device, layers=self.count, **few)

    def remapped(self, text: str, dtype: str) -> Any:
        """Return them with a method on it, named as command lines name it."""
        method = named_method(text, self.tokens / TRAINED)
        if isinstance(method, RetrievalHeads):
            method = named_method(f"{text} heads={self.far()}".replace(", ", ","), self.tokens / TRAINED)
        return ctxext.patch(self.plain(dtype), method)

    def far(self) -> list[int]:
        """Return the numbers of the groups that read far, in the first and fourth of every five layers."""
        groups = bench.SHAPES[self.shape].num_key_value_heads
        few = groups // 3
        chosen = {0: range(few, 2 * few), 3: range(groups - few)}
        return [layer * groups + group for layer in range(self.count) for group in chosen.get(layer % 5, ())]


def held(cache: DynamicCache) -> int:
    """Return the bytes of keys and values in a cache."""
    near = [layer.near for layer in cache.layers if isinstance(layer, SplitLayer) and layer.near is not None]
    return sum(part.keys.nbytes + part.values.nbytes for part in [*cache.layers, *near])


@torch.no_grad()
def measure(method: str, dtype: str, layers: Layers, rounds: int) -> bench.Row:
    """Return one row of the table."""
    device = layers.device
    models = layers.plain(dtype), layers.remapped(method, dtype)
    ids = torch.randint(256, (1, layers.tokens), device=device)

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
        method,
        dtype,
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
    measured = Layers(shape, layers or bench.SHAPES[shape].num_hidden_layers, tokens, device)

    def rows(say: bench.Say) -> Iterator[bench.Row]:
        for dtype in bench.listed(dtypes, DTYPES):
            for method in bench.listed(methods):
                say(f"{method}, {dtype}")
                try:
                    yield measure(method, dtype, measured, rounds)
                except torch.OutOfMemoryError:  # with grouped heads in float32 CUDA's plain attention holds all scores
                    yield [method, dtype, *["does not fit"] * (len(COLUMNS) - 2)]

    notes = [
        f"{tokens:,} tokens, trained length {TRAINED:,}; {bench.machine(device)}.",
        "Ratios to plain transformers with SDPA at the same length in the same run; its own number in brackets.",
        f"`text`: {measured.count} layers of {shape} without a head read the whole text into a cache; `step`: one more "
        "token after it; `cache`: keys and values held; `memory`: all tensors at the peak of reading the text.",
    ]
    bench.report("# Position remapping: time and memory", COLUMNS, rows, markdown, notes)


if __name__ == "__main__":
    typer.run(main)
