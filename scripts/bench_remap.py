"""Position remapping: time and memory of attention in pieces, as ratios to stock measured in the same run.

    python scripts/bench_remap.py                            # SmolLM2-135M's shape at 16K tokens, bf16 and fp32
    python scripts/bench_remap.py --device cuda --tokens 65536 --markdown table.md

Three numbers for each method, each beside stock transformers with SDPA: a whole text read at once (two layers, no
head), one attention call of it alone, and one step of decoding after it.
Stock and remapped take turns, round after round, and
medians are divided, so that a busy machine slows both alike. Memory is what the attention call adds at its peak,
output included. Weights are random: neither time nor memory depends on them.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from measuring import DTYPES, added_memory, machine, markdown_table, synchronize
from rich.console import Console
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import ctxext
from ctxext.attention import Layout
from ctxext.surgery.positions import LayoutMask

TRAINED = 8192
METHODS = ("self_extend", "self_extend window=0.25", "rerope", "dual_chunk", "streaming")
COLUMNS = ("method", "dtype", "text", "attention", "step", "memory")


def build(dtype: torch.dtype, device: str) -> LlamaForCausalLM:
    """Two layers of SmolLM2-135M's shape."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=2,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=TRAINED,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(device, dtype).eval()


def in_turns(one: Callable[[], object], other: Callable[[], object], rounds: int, device: str) -> tuple[float, float]:
    """The ratio of the second to the first, and seconds of the first: medians of ``rounds`` turns but the first."""
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds + 1):
        for call, found in zip((one, other), times, strict=True):
            synchronize(device)
            start = time.perf_counter()
            call()
            synchronize(device)
            if turn:
                found.append(time.perf_counter() - start)
    first, second = map(statistics.median, times)
    return second / first, first


@torch.no_grad()
def measure(method: str, dtype: str, tokens: int, rounds: int, device: str) -> list[str]:
    """One row of the table."""
    name, *parameters = method.split()
    stock = build(DTYPES[dtype], device)
    given = {key: float(value) for key, value in (part.split("=") for part in parameters)}
    remapped = ctxext.patch(copy.deepcopy(stock), name, factor=tokens / TRAINED, **given)
    ids = torch.randint(256, (1, tokens), device=device)

    def read(model: LlamaForCausalLM) -> Callable[[], object]:
        return lambda: model.model(ids, use_cache=False)

    text, seconds = in_turns(read(stock), read(remapped), rounds, device)

    attend = remapped.model.layers[0].self_attn._ctxext_attend
    q, k, v = (torch.randn(1, heads, tokens, 64, dtype=DTYPES[dtype], device=device) for heads in (9, 3, 3))
    mask = LayoutMask(Layout.causal(1, tokens, device=device))

    def plain() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=0.125)

    def in_pieces() -> torch.Tensor:
        found: torch.Tensor = attend(q, k, v, mask, scale=0.125, window=None, dropout=0.0)
        return found

    alone, _ = in_turns(plain, in_pieces, rounds, device)
    memory = [added_memory(device, call) for call in (plain, in_pieces)]

    def step(model: LlamaForCausalLM) -> Callable[[], object]:
        cache = DynamicCache()
        model.model(ids[:, :-64], past_key_values=cache)
        return lambda: model.model(ids[:, -1:], past_key_values=cache)

    decoding, step_seconds = in_turns(step(stock), step(remapped), 5 * rounds, device)
    share = (
        "unknown" if memory[0] is None or memory[1] is None else f"{memory[1] / memory[0]:.2f} ({memory[0]:.0f} MiB)"
    )
    return [
        method,
        dtype,
        f"{text:.2f} ({seconds:.1f} s)",
        f"{alone:.2f}",
        f"{decoding:.2f} ({1e3 * step_seconds:.1f} ms)",
        share,
    ]


def main(
    tokens: Annotated[int, typer.Option(help="Of the text.")] = 2 * TRAINED,
    rounds: Annotated[int, typer.Option(help="Turns of each pair; steps of decoding take five times as many.")] = 3,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtypes: Annotated[str, typer.Option(help="Separated by commas.")] = "bfloat16,float32",
    threads: Annotated[int, typer.Option(help="Of torch on a CPU; 0 leaves its choice.")] = 0,
    markdown: Annotated[Path | None, typer.Option(help="Write the table here, too.")] = None,
) -> None:
    """Measure and print the table."""
    if threads:
        torch.set_num_threads(threads)
    console, rows = Console(), []
    for dtype in dtypes.split(","):
        for method in METHODS:
            rows.append(measure(method, dtype, tokens, rounds, device))
            console.print(*rows[-1], sep="  ")
    notes = [
        f"{tokens:,} tokens, trained length {TRAINED:,}; {machine(device)}; {torch.get_num_threads()} threads.",
        "Ratios to stock transformers with SDPA in the same run; stock's own number in brackets.",
        "`text`: two layers without a head read the whole text; `attention`: one call of it; `step`: one more token, "
        "on a cache of the text; `memory`: what the attention call adds at its peak.",
    ]
    table = markdown_table("# Position remapping: time and memory", COLUMNS, rows, notes)
    console.print(table, markup=False)
    if markdown is not None:
        markdown.write_text(table, encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
