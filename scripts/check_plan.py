"""What ``ctxext plan`` predicts against measured peaks: LoRA steps, and prompts read into a cache.

    python scripts/check_plan.py                                            # a few shapes on the CPU
    python scripts/check_plan.py --shapes smollm2 --layers 0 --lengths 4096,8192
    python scripts/check_plan.py --shapes llama-8b --layers 0 --lengths 32768,65536 --dtypes bf16   # on an 80 GB GPU

Every measurement is a process of its own with random weights. Compared is what a step, or a prompt, adds to a process
that holds the model and its adapter: gradients, optimizer, activations, logits, cache. Weights are not counted, since
they would flatter the agreement.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from bench_training import Setting, build, config_of, in_a_process
from measuring import added_memory, in_fresh_process, machine, markdown_table
from rich.console import Console
from rich.table import Table
from shapes import SHAPES

from ctxext.checkpoints.load import extended_config
from ctxext.evaluation.checkpoint import DTYPES
from ctxext.planning.plan import plan_serving, plan_training
from ctxext.training import return_freed_memory

KINDS = {"train": "ctxext", "train, attention kept": "ctxext, attention kept", "serve": ""}
COLUMNS = ("model", "what", "dtype", "tokens", "predicted MiB", "measured MiB", "off by")


def predicted(setting: Setting) -> float:
    """Return the MiB that the plan says are added."""
    config, dtype = config_of(setting), DTYPES[setting.dtype]
    if setting.method is not None:
        config = extended_config(config, setting.method, factor=4, trained_length=2048)
    if setting.variant:
        planned = plan_training(
            config,
            memory=setting.memory,
            lora_rank=setting.rank,
            norms=setting.whole,
            embeddings=setting.whole,
            dtype=dtype,
        ).at(setting.length)
    else:
        planned = plan_serving(config, dtype=dtype).at(setting.length)
    return (planned.total - planned.weights - planned.adapters) / 2**20


def prefill(setting: Setting) -> float | None:
    """Return the MiB that a prompt adds, with its cache; run it in a fresh process."""
    return_freed_memory()
    model = build(setting).eval()
    ids = torch.ones(1, setting.length, dtype=torch.long, device=setting.device)

    def read(ids: torch.Tensor) -> None:
        with torch.inference_mode():
            model(ids, use_cache=True, logits_to_keep=1)

    read(ids[:, :16])
    return added_memory(setting.device, lambda: read(ids))


def measured(setting: Setting) -> float | None:
    """Return the MiB that are added; None if that cannot be known.

    Raises:
        RuntimeError: the step failed, for want of memory perhaps.
    """
    if not setting.variant:
        return in_fresh_process(prefill, setting)
    found = in_a_process(setting)
    if found.why_not:
        raise RuntimeError(f"{setting}: {found.why_not}")
    return found.added_mib


def row(setting: Setting, what: str, say: Callable[[str], None]) -> list[str]:
    """Return a row of the table."""
    name = f"{setting.shape}, {setting.layers} layers" if setting.layers else setting.shape
    name += f", {setting.method}" if setting.method else ""
    what += f", loss chunk {setting.loss_chunk}" if setting.variant and setting.loss_chunk else ""
    say(f"{name}, {what}, {setting.dtype}, {setting.length:,} tokens")
    plan, peak = predicted(setting), measured(setting)
    off = "" if peak is None else f"{plan / peak - 1:+.0%}"
    shown = "" if peak is None else f"{peak:,.0f}"
    return [name, what, setting.dtype, f"{setting.length:,}", f"{plan:,.0f}", shown, off]


def main(
    shapes: Annotated[
        str, typer.Option(help=f"of {', '.join(SHAPES)}, each with :METHOD to patch it; comma-separated")
    ] = "smollm2,llama-1b,bloom-560m,bloom-560m:alibi",
    lengths: Annotated[str, typer.Option(help="tokens, comma-separated")] = "1024,2048,4096",
    dtypes: Annotated[str, typer.Option(help=f"of {', '.join(DTYPES)}, comma-separated")] = "bf16,fp32",
    what: Annotated[str, typer.Option(help=f"of {'; '.join(KINDS)}, semicolon-separated")] = "train; serve",
    loss_chunk: Annotated[
        int, typer.Option(help="tokens whose logits exist at a time; 0 for what ctxext does by itself", min=0)
    ] = 0,
    layers: Annotated[int, typer.Option(help="fewer layers than the shape has; 0 for all", min=0)] = 4,
    whole: Annotated[bool, typer.Option(help="train norms and embeddings too")] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cuda" if torch.cuda.is_available() else "cpu",
    markdown: Annotated[Path | None, typer.Option(help="also write the table here, after every row")] = None,
) -> None:
    """Compare plans with measurements."""
    base = Setting("", 0, "", device, whole=whole, layers=layers or None, loss_chunk=loss_chunk or None)
    trained = "LoRA, norms and embeddings" if whole else "LoRA"
    title = f"Memory beside the weights, planned and measured; {trained} of rank {base.rank}; {machine(device)}"
    table, rows = Table(*COLUMNS, title=title), []
    console = Console()
    wanted = [[part.strip() for part in text.split(",")] for text in (shapes, dtypes, lengths)]
    with console.status("") as status:
        for shape, kind, dtype, length in itertools.product(wanted[0], what.split(";"), wanted[1], wanted[2]):
            name, _, method = shape.partition(":")
            kind = kind.strip()
            own = {"shape": name, "method": method or None, "variant": KINDS[kind], "dtype": dtype}
            rows.append(row(replace(base, length=int(length), **own), kind, status.update))
            table.add_row(*rows[-1])
            if markdown is not None:
                markdown.write_text(markdown_table(title, COLUMNS, rows))
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
