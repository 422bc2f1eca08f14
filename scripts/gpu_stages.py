"""Stages of ``gpu_run.sh`` that no other benchmark is: a first look at every method, and launches a layer.

    python scripts/gpu_stages.py smoke --device cuda --markdown smoke.md
    python scripts/gpu_stages.py launches --device cuda --markdown launches.md

``smoke`` reads a text and four more tokens, on a dynamic cache and as a graph on a static one. It holds the error
against float64 on a CPU to twice that of the plain model in the same dtype on the same device.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import bench
import bench_models
import torch
import typer
from torch import Tensor
from transformers import DynamicCache

import ctxext
from ctxext.errors import IncompatibleError
from tests._tokenizer import make_tokenizer

TRAINED, LENGTH, STEPS = 64, 150, 4
METHODS: dict[str, dict[str, Any]] = {
    "self_extend": {},
    "dual_chunk": {},
    "rerope": {},
    "streaming": {},
    "retrieval_heads": {"heads": (0,)},
    "alibi": {},
}
TINY = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
WAYS = ("text", "step", "compiled step")
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def tiny(method: str, like: dict[str, Tensor] | None, dtype: torch.dtype, device: str) -> Any:
    """Return a Llama of two layers on a device, with given weights and a method on it; no name leaves it plain."""
    small = bench.random_model(
        "llama-1b", "bf16", "cpu", 2, **TINY, vocab_size=256, max_position_embeddings=TRAINED, initializer_range=0.06
    )
    small.load_state_dict(like or small.state_dict())
    model = small.to(device, dtype)
    return ctxext.patch(model, method, factor=4, **METHODS[method]) if method else model


@torch.no_grad()
def read(model: Any, ids: Tensor, way: str) -> Tensor:
    """Return the logits of a text, or of the steps after it."""
    ids, text = ids.to(model.device), ids[:, :LENGTH].to(model.device)
    cache, step = DynamicCache(config=model.config), None
    if way == "compiled step":
        step = bench.compiled_step(model, text, LENGTH + STEPS)
    else:
        read: Tensor = model(text, past_key_values=cache).logits
        if way == "text":
            return read.double().cpu()
    steps = [
        step(token) if step else model(token, past_key_values=cache).logits for token in ids[:, LENGTH:].split(1, 1)
    ]
    return torch.cat(steps, 1).double().cpu()


def errors(method: str, ids: Tensor, device: str, way: str) -> float:
    """Return the root mean square by which bfloat16 on a device is off, over that of the logits."""
    found = tiny(method, None, torch.bfloat16, device)
    with torch.no_grad():
        right = tiny(method, None, torch.float64, "cpu")(ids, use_cache=False).logits
    right = right[:, :LENGTH] if way == "text" else right[:, LENGTH:]
    return float((read(found, ids, way) - right).norm() / right.norm())


def verdict(method: str, ids: Tensor, device: str, way: str, plain: float, failures: list[str]) -> bench.Row:
    """Return the last cells of a row; a failure is also noted whole."""
    try:
        off = errors(method, ids, device, way)
        return [f"{off:.2e}", f"{plain:.2e}", "right" if off <= 2 * plain else "WRONG"]
    except IncompatibleError as error:
        return ["", "", f"refused: {bench_models.first_line(error)}"]
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        failures.append(traceback.format_exc())
        return ["", "", f"FAILED: {bench_models.first_line(error)}"]
    finally:
        torch.compiler.reset()


@app.command()
def smoke(device: bench.Device = bench.DEVICE, markdown: bench.Markdown = None) -> None:
    """Look whether every method computes what it should; the first failure is printed whole."""
    ids = torch.randint(256, (1, LENGTH + STEPS), generator=torch.Generator().manual_seed(0))
    failures: list[str] = []

    def rows(say: bench.Say) -> Iterator[bench.Row]:
        for way in WAYS:
            plain = errors("", ids, device, way)
            for method in METHODS:
                say(f"{method}, {way}")
                yield [method, way, *verdict(method, ids, device, way, plain, failures)]

    title = f"Error of bfloat16 over the logits, against float64 on a CPU; {bench.machine(device)}"
    written = bench.report(title, ("method", "what", "error", "plain model's", "verdict"), rows, markdown)
    if failures:
        print(failures[0])
    raise typer.Exit(any(row[-1].startswith(("WRONG", "FAILED")) for row in written))


@torch.no_grad()
def step_of(setting: bench_models.Setting, variant: str, layers: int) -> Callable[[], object]:
    """Return a step of a model with so many layers, whose cache is filled and whose first step was taken."""
    few = replace(setting, layers=layers)
    model = bench_models.build(few)
    bench_models.extend(model, variant, few)
    step = partial(bench_models.run, model, few, bench_models.filled_cache(model, few.length - bench_models.STEPS))
    step()
    return step


@app.command()
def launches(
    model: str = "llama-8b",
    tokens: bench.Tokens = 4096,
    only: str = "stock,yarn,self_extend,dual_chunk",
    device: bench.Device = bench.DEVICE,
    markdown: bench.Markdown = None,
) -> None:
    """Count what one step of decoding launches in a layer."""
    setting = bench_models.Setting(model, "decode", "bf16", tokens, device, 0)
    variants = [name for name in bench_models.VARIANTS[model] if name in bench.listed(only)]

    def rows(say: bench.Say) -> Iterator[bench.Row]:
        plain = None
        for variant in variants:
            say(variant)
            count = bench.launches_a_layer(partial(step_of, setting, variant), device, (1, 3))
            plain = count if plain is None else plain
            yield [model, str(tokens), variant, f"{count:g}", f"{count / plain:.2f}"]

    what = "kernels and copies" if device == "cuda" else "operators dispatched"
    title = f"Launches a layer in an eager step ({what}), on a dynamic cache; {bench.machine(device)}"
    bench.report(title, ("model", "tokens", "variant", "launches", "ratio"), rows, markdown)


@app.command("tiny")
def write_tiny(folder: Path) -> None:
    """Write a checkpoint with random weights that reads bytes, to try the stages that need a real one."""
    few = {"vocab_size": 257, "max_position_embeddings": 2048}
    bench.random_model("llama-1b", "bf16", "cpu", 2, **TINY, **few).save_pretrained(folder)
    make_tokenizer(bos=True).save_pretrained(folder)


if __name__ == "__main__":
    app()
