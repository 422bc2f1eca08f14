"""Whole models, stock against patched: prefill, decoding and a training step, as ratios measured in one run.

    python scripts/bench_models.py                                     # BLOOM-560m and Llama-1B shapes, prefill
    python scripts/bench_models.py --what decode --lengths 2048,8192,32768
    python scripts/bench_models.py --model bloom --lengths 32768 --only alibi --memory
    python scripts/bench_models.py --model smollm2 --what batch --lengths 1024 --dtypes fp32
    python scripts/bench_models.py --model llama-8b --what prefill,decode,compiled --lengths 32768 --device cuda

One model is patched and unpatched in place, and its variants take turns. Peak memory is what a fresh process adds for
one call, weights not counted. ``batch`` reads 8 prompts of half the length and generates the other half: in one
continuous batch (seconds), and one after the other (the ratio is their seconds over those of the batch). ``compiled``
is a step of decoding with its head, on a static cache, as a graph. ``launches`` counts what an eager step starts in a
layer: kernels and copies on CUDA, operators on a CPU.
"""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

import bench
import torch
import typer
from torch import Tensor
from transformers import ContinuousBatchingConfig, DynamicCache, GenerationConfig

import ctxext
from ctxext.errors import CtxextError
from ctxext.measuring.checkpoint import DTYPES
from tests._steps import compiled_step, launches_a_layer

STOCK = "stock"
TRAINED_LENGTH = 2048
# Of each model: its shape, and the fields that are other here.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("bloom-560m", {"vocab_size": 4096}),
    "llama": ("llama-1b", {"vocab_size": 4096, "max_position_embeddings": TRAINED_LENGTH}),
    "llama-8b": ("llama-8b", {"max_position_embeddings": TRAINED_LENGTH}),
    "smollm2": ("smollm2", {"max_position_embeddings": TRAINED_LENGTH}),
}
KINDS = ("prefill", "decode", "compiled", "launches", "train", "batch")
REQUESTS, PAGE, STEPS = 8, 64, 8
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "bloom": {STOCK: {}, "alibi": {"method": "alibi"}, "pi": {"method": "pi"}},
    "llama": {
        STOCK: {},
        "yarn": {"method": "yarn"},
        "dynamic_yarn doubling": {"method": "dynamic_yarn", "growth": "doubling"},
        "alibi": {"method": "alibi"},
    },
    "llama-8b": {
        STOCK: {},
        "yarn": {"method": "yarn"},
        "self_extend": {"method": "self_extend"},
        "dual_chunk": {"method": "dual_chunk"},
        "alibi": {"method": "alibi"},
    },
    "smollm2": {
        STOCK: {},
        "self_extend": {"method": "self_extend"},
        "dual_chunk": {"method": "dual_chunk"},
        "dynamic_yarn request": {"method": "dynamic_yarn", "growth": "request"},
    },
}
COLUMNS = ("model", "what", "tokens", "dtype", "variant", "seconds or launches", "ratio", "adds MiB")


@dataclass(frozen=True)
class Setting:
    """One measurement: a model shape, what is done with it, at which length, in which dtype."""

    model: str
    what: str
    dtype: str
    length: int
    device: str
    layers: int


def build(setting: Setting) -> Any:
    """Return a model with random weights of the setting's shape."""
    shape, changes = SHAPES[setting.model]
    model = bench.random_model(shape, setting.dtype, setting.device, setting.layers, **changes)
    return model.train(setting.what == "train")


def extend(model: Any, variant: str, setting: Setting) -> None:
    """Patch the model for a variant; stock stays as it is. A batch has texts four times as long as its window."""
    if variant != STOCK:
        reach = (16, TRAINED_LENGTH) if setting.what != "batch" else (4, setting.length // 4)
        ctxext.patch(model, factor=reach[0], trained_length=reach[1], **VARIANTS[setting.model][variant])


@torch.no_grad()
def filled_cache(model: Any, length: int) -> DynamicCache:
    """Return a cache of ``length`` tokens: one that the model reads, so that the cache is its own, and random ones."""
    config = model.config
    heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    size = (1, heads, length - 1, config.hidden_size // config.num_attention_heads)
    cache = DynamicCache(config=config)
    model.base_model(torch.ones(1, 1, dtype=torch.long, device=model.device), past_key_values=cache)
    for layer in cache.layers:  # whose update takes keys from a call of the model alone
        more = (torch.randn(size, device=model.device, dtype=model.dtype) for _ in range(2))
        layer.keys, layer.values = (torch.cat(parts, 2) for parts in zip((layer.keys, layer.values), more, strict=True))
    return cache


def run(model: Any, setting: Setting, cache: DynamicCache | None) -> None:
    """Do once what is measured."""
    ids = torch.ones(
        1, setting.length if setting.what in ("prefill", "train") else 1, dtype=torch.long, device=model.device
    )
    if setting.what == "train":
        hidden = model.base_model(ids, use_cache=False).last_hidden_state
        hidden.float().square().mean().backward()
        model.zero_grad()
    else:
        with torch.inference_mode():
            model.base_model(ids, past_key_values=cache, use_cache=cache is not None)


def serve(model: Any, setting: Setting, together: bool) -> None:
    """Generate the second half of 8 texts, in a continuous batch or one after the other."""
    new = setting.length // 2
    prompts = torch.randint(4096, (REQUESTS, setting.length - new), generator=torch.Generator().manual_seed(0))
    settings = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    if not together:
        for prompt in prompts[:, None].to(model.device):
            model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=settings)
        return
    blocks = REQUESTS * (setting.length // PAGE + 2)
    size = ContinuousBatchingConfig(num_blocks=blocks, page_size=PAGE, max_batch_tokens=setting.length)
    results = model.generate_batch(
        prompts.tolist(), generation_config=settings, continuous_batching_config=size, warmup=False
    )
    if any(result.error for result in results.values()):
        raise RuntimeError(next(iter(results.values())).error)


def batches(setting: Setting, names: list[str], rounds: int) -> Iterator[bench.Row]:
    """Yield a row for every variant: the seconds of a batch, and those of its requests in turn over them."""
    model = build(setting)
    for name in names:
        extend(model, name, setting)
        turns = [partial(serve, model, setting, together) for together in (True, False)]
        serve(model, replace(setting, length=64), together=True)  # warm: a round takes minutes
        batch, alone = bench.in_turns(turns, rounds, setting.device, warm=True)
        if name != STOCK:
            ctxext.unpatch(model)
        head = [setting.model, setting.what, str(setting.length), setting.dtype, name]
        yield [*head, f"{batch:.1f}", f"{alone / batch:.2f}", ""]


def first_line(error: BaseException) -> str:
    """Return what fits into a table of an error."""
    return (str(error).splitlines() or [type(error).__name__])[0][:150].replace("|", "/")


def _times(count: int, call: Callable[[Tensor], object], given: Tensor) -> None:
    for _ in range(count):
        call(given)


def compiled(setting: Setting, names: list[str], rounds: int) -> Iterator[bench.Row]:
    """Yield a row for every variant, one after the other, since each is compiled once."""
    model, seconds = build(setting), {}
    ids = torch.ones(1, setting.length - STEPS * (rounds + 1), dtype=torch.long, device=setting.device)
    for name in names:
        head = [setting.model, setting.what, str(setting.length), setting.dtype, name]
        extend(model, name, setting)
        try:
            step = compiled_step(model, ids, setting.length)
            steps = partial(_times, STEPS, step, ids[:, :1])
            [taken] = bench.in_turns([steps], rounds, setting.device)
            seconds[name] = taken / STEPS
            ratio = seconds[name] / seconds[STOCK] if STOCK in seconds else None
            yield [*head, f"{seconds[name]:.4f}", bench.shown(ratio, ".3f"), ""]
        except (CtxextError, RuntimeError, MemoryError) as error:  # torch's own of graphs are RuntimeErrors
            yield [*head, first_line(error), "", ""]
        finally:
            torch.compiler.reset()
            if name != STOCK:
                ctxext.unpatch(model)


def warm_step(setting: Setting, variant: str, layers: int) -> Callable[[], object]:
    """Return a step of a model with so many layers; the first one was taken."""
    model = build(replace(setting, layers=layers))
    extend(model, variant, setting)
    step = partial(run, model, setting, filled_cache(model, setting.length - STEPS))
    step()
    return step


def launched(setting: Setting, names: list[str], rounds: int) -> Iterator[bench.Row]:
    """Yield a row for every variant: what a further layer adds to the launches of a step."""
    counts: dict[str, float] = {}
    for name in names:
        counts[name] = launches_a_layer(partial(warm_step, setting, name), setting.device, (1, 3))
        ratio = counts[name] / counts[STOCK] if STOCK in counts else None
        head = [setting.model, setting.what, str(setting.length), setting.dtype, name]
        yield [*head, f"{counts[name]:g}", bench.shown(ratio, ".3f"), ""]


def timed(model: Any, setting: Setting, variant: str, failed: dict[str, str]) -> float:
    """Patch, time one call, unpatch; note what failed, and do not try it again."""
    if variant in failed:
        return math.nan
    extend(model, variant, setting)
    # Up to the length and not beyond it: at a power of two a doubling method would have to recompute its cache.
    repeats = STEPS if setting.what == "decode" else 1
    try:
        cache = filled_cache(model, setting.length - repeats - 1) if setting.what == "decode" else None
        if cache is not None:
            run(model, setting, cache)
        return bench.seconds_of(lambda: [run(model, setting, cache) for _ in range(repeats)], setting.device) / repeats
    except (RuntimeError, MemoryError) as error:  # stock code needs more memory than there is
        failed[variant] = first_line(error)
        return math.nan
    finally:
        if variant != STOCK:
            ctxext.unpatch(model)


def peak(setting: Setting, variant: str) -> float | None:
    """Return the MiB that one call adds; run it in a fresh process."""
    model = build(setting)
    extend(model, variant, setting)
    run(model, replace(setting, length=64), None)
    cache = filled_cache(model, setting.length - 1) if setting.what == "decode" else None
    gc.collect()
    return bench.added_memory(setting.device, lambda: run(model, setting, cache))


def measure(setting: Setting, names: list[str], rounds: int, memory: bool) -> Iterator[bench.Row]:
    """Yield a row for every variant of a setting; those that failed come last."""
    model, failed = build(setting), {}
    timers = [partial(timed, model, setting, name, failed) for name in names]
    seconds = dict(zip(names, bench.medians(timers, rounds), strict=True))
    del model
    gc.collect()
    head = [setting.model, setting.what, str(setting.length), setting.dtype]
    for name in sorted(names, key=lambda name: name in failed):
        if name in failed:
            yield [*head, name, failed[name], "", ""]
            continue
        ratio = seconds[name] / seconds[STOCK] if STOCK in names and STOCK not in failed else None
        added = bench.in_fresh_process(peak, setting, name) if memory else None
        yield [*head, name, f"{seconds[name]:.4f}", bench.shown(ratio, ".3f"), bench.shown(added, ".0f")]


def main(
    model: Annotated[str, typer.Option(help=f"of {', '.join(SHAPES)}, comma-separated")] = "bloom,llama",
    what: Annotated[str, typer.Option(help=f"of {', '.join(KINDS)}, comma-separated")] = "prefill",
    lengths: bench.Lengths = "2048,8192",
    dtypes: bench.Dtypes = "bf16",
    only: Annotated[str, typer.Option(help="variants, comma-separated; all if empty")] = "",
    layers: bench.Layers = 0,
    rounds: bench.Rounds = 3,
    memory: Annotated[bool, typer.Option(help="also measure memory, one process per variant")] = False,
    device: bench.Device = bench.DEVICE,
    markdown: bench.Markdown = None,
) -> None:
    """Measure whole models with and without ctxext."""
    chosen = bench.listed(only, {name for variants in VARIANTS.values() for name in variants})
    asked = [
        bench.listed(model, SHAPES),
        bench.listed(what, KINDS),
        bench.listed(dtypes, DTYPES),
        map(int, bench.listed(lengths)),
    ]

    def rows(say: bench.Say) -> Iterator[bench.Row]:
        for parts in itertools.product(*asked):
            setting = Setting(*parts, device, layers)
            say(f"{setting}")
            names = [name for name in VARIANTS[setting.model] if not chosen or name in chosen]
            others = {"batch": batches, "compiled": compiled, "launches": launched}
            if setting.what in others:
                yield from others[setting.what](setting, names, rounds)
            else:
                yield from measure(setting, names, rounds, memory)

    title = f"Whole models, random weights{f', {layers} layers' if layers else ''}; {bench.machine(device)}"
    bench.report(title, COLUMNS, rows, markdown)


if __name__ == "__main__":
    typer.run(main)
