"""What ``ctxext plan`` predicts against measured peaks: LoRA steps, and prompts read into a cache.

    python scripts/check_plan.py                                            # a few shapes on the CPU
    python scripts/check_plan.py --shapes smollm2 --layers 0 --lengths 4096,8192
    python scripts/check_plan.py --shapes llama-8b --layers 0 --lengths 32768,65536 --dtypes bf16   # on an 80 GB GPU

Every measurement is a process of its own. Compared is what a step, or a prompt, adds to a process
that holds the model and its adapter: gradients, optimizer, activations, logits, cache. Weights are not counted, since
they would flatter the agreement.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated

import bench
import torch
import typer
from bench_training import Setting, build, in_a_process, predicted

from ctxext.measuring.checkpoint import DTYPES
from ctxext.training import return_freed_memory

KINDS = {"train": "ctxext", "train, attention kept": "ctxext, attention kept", "serve": ""}
COLUMNS = ("model", "what", "dtype", "tokens", "predicted MiB", "measured MiB", "off by")


def prefill(setting: Setting) -> float | None:
    """Return the MiB that a prompt adds, with its cache; run it in a fresh process."""
    return_freed_memory()
    model = build(setting).eval()
    ids = torch.ones(1, setting.length, dtype=torch.long, device=setting.device)

    def read(ids: torch.Tensor) -> None:
        with torch.inference_mode():
            model(ids, use_cache=True, logits_to_keep=1)

    read(ids[:, :16])
    return bench.added_memory(setting.device, lambda: read(ids))


def measured(setting: Setting) -> float | None:
    """Return the MiB that are added; None if that cannot be known.

    Raises:
        RuntimeError: the step failed, for want of memory perhaps.
    """
    if not setting.variant:
        return bench.in_fresh_process(prefill, setting)
    found = in_a_process(setting)
    if found.why_not:
        raise RuntimeError(f"{setting}: {found.why_not}")
    return found.added_mib


def row(setting: Setting, what: str, say: bench.Say) -> bench.Row:
    """Return a row of the table."""
    name = f"{setting.shape}, {setting.layers} layers" if setting.layers else setting.shape
    name += f", {setting.method}" if setting.method else ""
    what += f", loss chunk {setting.loss_chunk}" if setting.variant and setting.loss_chunk else ""
    say(f"{name}, {what}, {setting.dtype}, {setting.length:,} tokens")
    plan, peak = predicted(setting), measured(setting)
    off = None if peak is None else plan / peak - 1
    return [
        name,
        what,
        setting.dtype,
        f"{setting.length:,}",
        f"{plan:,.0f}",
        bench.shown(peak, ",.0f"),
        bench.shown(off, "+.0%"),
    ]


def main(
    shapes: Annotated[
        str, typer.Option(help=f"of {', '.join(bench.SHAPES)}, each with :METHOD to patch it; comma-separated")
    ] = "smollm2,llama-1b,bloom-560m,bloom-560m:alibi",
    lengths: bench.Lengths = "1024,2048,4096",
    dtypes: bench.Dtypes = "bf16,fp32",
    what: Annotated[str, typer.Option(help=f"of {'; '.join(KINDS)}, semicolon-separated")] = "train; serve",
    loss_chunk: Annotated[
        int, typer.Option(help="tokens whose logits exist at a time; 0 for what ctxext does by itself", min=0)
    ] = 0,
    layers: bench.Layers = 4,
    whole: Annotated[bool, typer.Option(help="train norms and embeddings too")] = False,
    device: bench.Device = bench.DEVICE,
    markdown: bench.Markdown = None,
) -> None:
    """Compare plans with measurements."""
    base = Setting("", 0, "", device, whole=whole, layers=layers, loss_chunk=loss_chunk or None)
    wanted = [bench.listed(shapes), bench.listed(what, KINDS, ";"), bench.listed(dtypes, DTYPES), bench.listed(lengths)]

    def rows(say: bench.Say) -> Iterator[bench.Row]:
        for model, kind, dtype, length in itertools.product(*wanted):
            shape, _, method = model.partition(":")
            setting = replace(base, shape=shape, method=method or None, variant=KINDS[kind], dtype=dtype)
            yield row(replace(setting, length=int(length)), kind, say)

    trained = "LoRA, norms and embeddings" if whole else "LoRA"
    title = f"Memory beside the weights, planned and measured; {trained} of rank {base.rank}; {bench.machine(device)}"
    bench.report(title, COLUMNS, rows, markdown)


if __name__ == "__main__":
    typer.run(main)
