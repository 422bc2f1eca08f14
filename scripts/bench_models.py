"""Whole models, stock against patched: prefill, decoding and a training step, as ratios measured in one run.

    python scripts/bench_models.py                                     # BLOOM-560m and Llama-1B shapes, prefill
    python scripts/bench_models.py --what decode --lengths 2048,8192,32768
    python scripts/bench_models.py --model bloom --lengths 32768 --only alibi --memory

Weights are random: time and memory do not depend on them. One model is patched and unpatched in place, its variants are
timed in turn, round after round, and each median is divided by the stock one. Peak memory is what a fresh process adds
for one call, weights not counted.
"""

from __future__ import annotations

import gc
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from measuring import added_memory, in_fresh_process, machine, markdown_table, synchronize
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, BloomConfig, DynamicCache, LlamaConfig

import ctxext
from ctxext.evaluation.checkpoint import DTYPES

STOCK = "stock"
TRAINED_LENGTH = 2048
CONFIGS: dict[str, Any] = {
    "bloom": lambda layers: BloomConfig(hidden_size=1024, n_head=16, n_layer=layers or 24, vocab_size=4096),
    "llama": lambda layers: LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=layers or 16,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=TRAINED_LENGTH,
        vocab_size=4096,
    ),
}
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "bloom": {"alibi": {"method": "alibi", "factor": 16}, "pi": {"method": "pi", "factor": 16}},
    "llama": {
        "yarn": {"method": "yarn", "factor": 16},
        "dynamic_yarn doubling": {"method": "dynamic_yarn", "factor": 16, "growth": "doubling"},
        "alibi": {"method": "alibi", "factor": 16},
    },
}


@dataclass(frozen=True)
class Setting:
    """One measurement: a model shape, what is done with it, at which length, in which dtype."""

    model: str
    what: str
    length: int
    dtype: str
    device: str
    layers: int | None


@dataclass(frozen=True)
class Measured:
    """A setting and a variant with its numbers."""

    setting: Setting
    variant: str
    seconds: float | None
    ratio: float | None
    peak_mib: float | None
    why_not: str = ""


def build(setting: Setting) -> Any:
    """Return a model with random weights of the setting's shape."""
    torch.manual_seed(0)
    config = CONFIGS[setting.model](setting.layers)
    with torch.device(setting.device):
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[setting.dtype])
    return model.train(setting.what == "train")


def extended(model: Any, variant: str, setting: Setting) -> Any:
    """Patch the model for a variant; stock stays as it is."""
    if variant == STOCK:
        return model
    arguments = VARIANTS[setting.model][variant]
    return ctxext.patch(model, trained_length=TRAINED_LENGTH, **arguments)


def filled_cache(model: Any, length: int) -> DynamicCache:
    """Return a cache that holds ``length`` random tokens."""
    config = model.config
    heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    size = (1, heads, length, config.hidden_size // config.num_attention_heads)
    cache = DynamicCache(config=config)
    for layer in range(config.num_hidden_layers):
        k, v = (torch.randn(size, device=model.device, dtype=model.dtype) for _ in range(2))
        cache.update(k, v, layer)
    return cache


def run(model: Any, setting: Setting, cache: DynamicCache | None) -> None:
    """Do once what is measured."""
    ids = torch.ones(1, 1 if setting.what == "decode" else setting.length, dtype=torch.long, device=model.device)
    if setting.what == "train":
        hidden = model.base_model(ids, use_cache=False).last_hidden_state
        hidden.float().square().mean().backward()
        model.zero_grad()
    else:
        with torch.inference_mode():
            model.base_model(ids, past_key_values=cache, use_cache=cache is not None)
    synchronize(setting.device)


def timed(model: Any, setting: Setting, variant: str) -> float:
    """Patch, time one call, unpatch."""
    extended(model, variant, setting)
    # Up to the length and not beyond it: at a power of two a doubling method would have to recompute its cache.
    repeats = 8 if setting.what == "decode" else 1
    cache = filled_cache(model, setting.length - repeats - 1) if setting.what == "decode" else None
    if cache is not None:
        run(model, setting, cache)
    start = time.perf_counter()
    for _ in range(repeats):
        run(model, setting, cache)
    seconds = (time.perf_counter() - start) / repeats
    if variant != STOCK:
        ctxext.unpatch(model)
    return seconds


def peak(setting: Setting, variant: str) -> float | None:
    """Return the MiB that one call adds; run it in a fresh process."""
    model = extended(build(setting), variant, setting)
    small = Setting(setting.model, setting.what, 64, setting.dtype, setting.device, setting.layers)
    run(model, small, None)
    cache = filled_cache(model, setting.length - 1) if setting.what == "decode" else None
    gc.collect()
    return added_memory(setting.device, lambda: run(model, setting, cache))


def measure(setting: Setting, names: list[str], *, rounds: int, memory: bool) -> list[Measured]:
    """Time the variants of a setting in turn, and their memory one by one."""
    model = build(setting)
    times: dict[str, list[float]] = {name: [] for name in names}
    failed: dict[str, str] = {}
    for number in range(rounds + 1):
        for name in names:
            if name in failed:
                continue
            try:
                seconds = timed(model, setting, name)
            except (RuntimeError, MemoryError) as error:  # stock code needs more memory than there is
                failed[name] = str(error).splitlines()[0][:90]
                continue
            if number or rounds == 1:  # the first round warms up
                times[name].append(seconds)
    del model
    gc.collect()
    peaks: dict[str, float | None] = {}
    if memory:
        peaks = {name: in_fresh_process(peak, setting, name) for name in names if name not in failed}
    medians = {name: statistics.median(values) for name, values in times.items() if values}
    base = medians.get(STOCK)
    return [
        Measured(setting, name, seconds, seconds / base if base else None, peaks.get(name))
        for name, seconds in medians.items()
    ] + [Measured(setting, name, None, None, None, why) for name, why in failed.items()]


COLUMNS = ("model", "what", "tokens", "dtype", "variant", "seconds", "ratio", "adds MiB")


def cells(row: Measured) -> list[str]:
    """Return a row of the table as text."""
    setting = row.setting
    numbers = ((row.seconds, "{:.3f}"), (row.ratio, "{:.3f}"), (row.peak_mib, "{:.0f}"))
    shown = ["" if number is None else form.format(number) for number, form in numbers]
    shown[0] = shown[0] or row.why_not
    return [setting.model, setting.what, str(setting.length), setting.dtype, row.variant, *shown]


def main(
    model: Annotated[str, typer.Option(help=f"of {', '.join(CONFIGS)}, comma-separated")] = "bloom,llama",
    what: Annotated[str, typer.Option(help="of prefill, decode, train, comma-separated")] = "prefill",
    lengths: Annotated[str, typer.Option(help="tokens, comma-separated")] = "2048,8192",
    dtypes: Annotated[str, typer.Option(help=f"of {', '.join(DTYPES)}")] = "bf16",
    only: Annotated[str, typer.Option(help="variants, comma-separated; all if empty")] = "",
    layers: Annotated[int, typer.Option(help="fewer layers than the shape has; 0 for all", min=0)] = 0,
    rounds: Annotated[int, typer.Option(help="timed rounds; the median counts", min=1)] = 3,
    memory: Annotated[bool, typer.Option(help="also measure memory, one process per variant")] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cuda" if torch.cuda.is_available() else "cpu",
    markdown: Annotated[Path | None, typer.Option(help="also write the table here")] = None,
) -> None:
    """Measure whole models with and without ctxext."""
    settings = [
        Setting(shape, doing, int(length), dtype, device, layers or None)
        for shape in model.split(",")
        for doing in what.split(",")
        for dtype in dtypes.split(",")
        for length in lengths.split(",")
    ]
    title = f"Whole models, random weights{f', {layers} layers' if layers else ''}; {machine(device)}"
    rows: list[Measured] = []
    console = Console()
    with console.status("") as status:
        for setting in settings:
            status.update(f"{setting}")
            names = [STOCK, *VARIANTS[setting.model]]
            if only:
                names = [name for name in names if name in only.split(",")]
            rows += measure(setting, names, rounds=rounds, memory=memory)
    table = Table(*COLUMNS, title=title)
    for row in rows:
        table.add_row(*cells(row))
    console.print(table)
    if markdown is not None:
        markdown.write_text(markdown_table(title, COLUMNS, [cells(row) for row in rows]))


if __name__ == "__main__":
    typer.run(main)
