"""Position remapping: time and memory of attention in pieces, as ratios to stock measured in the same run.

    python scripts/bench_remap.py                            # SmolLM2-135M's shape at 16K tokens, bf16 and fp32
    python scripts/bench_remap.py --device cuda --tokens 65536 --markdown table.md

Three numbers for each method, each beside stock transformers with SDPA: a whole text read at once (two layers, no
head), one attention call of it alone, and one step of decoding after it. Stock and remapped take turns, round after
round, and medians are divided, so that a busy machine slows both alike. Memory is what the tensors of the attention
call take at its peak, output included. Weights are random: neither time nor memory depends on them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from measuring import allocated_memory, in_turns, machine, markdown_table, show_table
from rich.console import Console
from shapes import two_layers
from transformers import DynamicCache, LlamaForCausalLM

import ctxext
from ctxext.attention import Layout
from ctxext.evaluation.checkpoint import DTYPES
from ctxext.surgery.positions import LayoutMask

TRAINED = 8192
METHODS = ("self_extend", "self_extend window=0.25", "rerope", "dual_chunk", "streaming")
COLUMNS = ("method", "dtype", "text", "attention", "step", "memory")


def remapped(method: str, dtype: str, tokens: int, device: str) -> LlamaForCausalLM:
    """The model with a method of ``METHODS`` on it."""
    name, *parameters = method.split()
    given = {key: float(value) for key, value in (part.split("=") for part in parameters)}
    return ctxext.patch(two_layers(DTYPES[dtype], device), name, factor=tokens / TRAINED, **given)


def calls(method: str, dtype: str, tokens: int, device: str) -> tuple[Callable[[], object], Callable[[], object]]:
    """One attention call by plain causal SDPA, and one in pieces."""
    attend = remapped(method, dtype, tokens, device).model.layers[0].self_attn._ctxext_attend
    q, k, v = (torch.randn(1, heads, tokens, 64, dtype=DTYPES[dtype], device=device) for heads in (9, 3, 3))

    def plain() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=0.125)

    def in_pieces() -> torch.Tensor:
        mask = LayoutMask(Layout.causal(1, tokens, device=device))
        found: torch.Tensor = attend(q, k, v, mask, scale=0.125, window=None, dropout=0.0)
        return found

    return plain, in_pieces


@torch.no_grad()
def measure(method: str, dtype: str, tokens: int, rounds: int, device: str) -> list[str]:
    """One row of the table."""
    models = two_layers(DTYPES[dtype], device), remapped(method, dtype, tokens, device)
    ids = torch.randint(256, (1, tokens), device=device)

    def read(model: LlamaForCausalLM) -> Callable[[], object]:
        return lambda: model.model(ids, use_cache=False)

    def step(model: LlamaForCausalLM) -> Callable[[], object]:
        cache = DynamicCache()
        model.model(ids[:, :-64], past_key_values=cache)
        return lambda: model.model(ids[:, -1:], past_key_values=cache)

    text, seconds = in_turns(*map(read, models), rounds, device)
    plain, in_pieces = calls(method, dtype, tokens, device)
    alone, _ = in_turns(plain, in_pieces, rounds, device)
    least, most = (allocated_memory(device, call) for call in (plain, in_pieces))
    decoding, step_seconds = in_turns(*map(step, models), 5 * rounds, device)
    return [
        method,
        dtype,
        f"{text:.2f} ({seconds:.1f} s)",
        f"{alone:.2f}",
        f"{decoding:.2f} ({1e3 * step_seconds:.1f} ms)",
        f"{most / least:.2f} ({least:.0f} MiB)",
    ]


def main(
    tokens: Annotated[int, typer.Option(help="Of the text.")] = 2 * TRAINED,
    rounds: Annotated[int, typer.Option(help="Turns of each pair; steps of decoding take five times as many.")] = 3,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtypes: Annotated[str, typer.Option(help="Separated by commas.")] = "bf16,fp32",
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
        f"{tokens:,} tokens, trained length {TRAINED:,}; {machine(device)}.",
        "Ratios to stock transformers with SDPA in the same run; stock's own number in brackets.",
        "`text`: two layers without a head read the whole text; `attention`: one call of it; `step`: one more token, "
        "on a cache of the text; `memory`: what the tensors of the attention call take at its peak.",
    ]
    table = markdown_table("# Position remapping: time and memory", COLUMNS, rows, notes)
    show_table(table, markdown)


if __name__ == "__main__":
    typer.run(main)
