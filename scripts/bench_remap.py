"""Position remapping: time and memory of attention in pieces, as ratios to stock measured in the same run.

    python scripts/bench_remap.py                            # SmolLM2-135M's shape at 16K tokens, bf16 and fp32
    python scripts/bench_remap.py --device cuda --tokens 65536 --markdown table.md

Three numbers for each method, each beside stock transformers with SDPA: a whole text read at once (two layers, no
head), one attention call of it alone, and one step of decoding after it. Stock and remapped take turns. Memory is what
the tensors of the attention call take at its peak, output included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import bench
import torch
import torch.nn.functional as F
import typer
from transformers import DynamicCache

import ctxext
from ctxext.attention import Layout
from ctxext.evaluation.checkpoint import DTYPES
from ctxext.surgery.positions import LayoutMask

TRAINED = 8192
METHODS = ("self_extend", "self_extend window=0.25", "rerope", "dual_chunk", "streaming")
COLUMNS = ("method", "dtype", "text", "attention", "step", "memory")


def remapped(method: str, dtype: str, tokens: int, device: str) -> Any:
    """Return the model with a method of ``METHODS`` on it."""
    name, *parameters = method.split()
    given = {key: float(value) for key, value in (part.split("=") for part in parameters)}
    return ctxext.patch(bench.two_layers(dtype, device), name, factor=tokens / TRAINED, **given)


def calls(method: str, dtype: str, tokens: int, device: str) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return one attention call by plain causal SDPA, and one in pieces."""
    layer = remapped(method, dtype, tokens, device).model.layers[0].self_attn
    q, k, v = (torch.randn(1, heads, tokens, 64, dtype=DTYPES[dtype], device=device) for heads in (9, 3, 3))

    def plain() -> object:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=0.125)

    def in_pieces() -> object:
        mask = LayoutMask(Layout.causal(1, tokens, device=device))
        return layer._ctxext_attend(q, k, v, mask, scale=0.125, window=None, dropout=0.0, module=layer, given={})

    return plain, in_pieces


@torch.no_grad()
def measure(method: str, dtype: str, tokens: int, rounds: int, device: str) -> bench.Row:
    """Return one row of the table."""
    models = bench.two_layers(dtype, device), remapped(method, dtype, tokens, device)
    ids = torch.randint(256, (1, tokens), device=device)

    def read(model: Any) -> Callable[[], object]:
        return lambda: model.model(ids, use_cache=False)

    def step(model: Any) -> Callable[[], object]:
        cache = DynamicCache()
        model.model(ids[:, :-64], past_key_values=cache)
        return lambda: model.model(ids[:, -1:], past_key_values=cache)

    text, long_text = bench.in_turns([*map(read, models)], rounds, device)
    attention = calls(method, dtype, tokens, device)
    plain, in_pieces = bench.in_turns(attention, rounds, device)
    least, most = (bench.allocated_memory(device, call) for call in attention)
    token, long_token = bench.in_turns([*map(step, models)], 5 * rounds, device)
    return [
        method,
        dtype,
        f"{long_text / text:.2f} ({text:.1f} s)",
        f"{in_pieces / plain:.2f}",
        f"{long_token / token:.2f} ({1e3 * token:.1f} ms)",
        f"{most / least:.2f} ({least:.0f} MiB)",
    ]


def main(
    tokens: bench.Tokens = 2 * TRAINED,
    rounds: bench.Rounds = 3,
    device: bench.Device = bench.DEVICE,
    dtypes: bench.Dtypes = "bf16,fp32",
    threads: bench.Threads = 0,
    markdown: bench.Markdown = None,
) -> None:
    """Measure position remapping beside plain attention; steps of decoding take five times as many rounds."""
    bench.use_threads(threads)

    def rows(say: bench.Say) -> Iterator[bench.Row]:
        for dtype in bench.listed(dtypes, DTYPES):
            for method in METHODS:
                say(f"{method}, {dtype}")
                yield measure(method, dtype, tokens, rounds, device)

    notes = [
        f"{tokens:,} tokens, trained length {TRAINED:,}; {bench.machine(device)}.",
        "Ratios to stock transformers with SDPA in the same run; stock's own number in brackets.",
        "`text`: two layers without a head read the whole text; `attention`: one call of it; `step`: one more token, "
        "on a cache of the text; `memory`: what the tensors of the attention call take at its peak.",
    ]
    bench.report("# Position remapping: time and memory", COLUMNS, rows, markdown, notes)


if __name__ == "__main__":
    typer.run(main)
