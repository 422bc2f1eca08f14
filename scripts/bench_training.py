"""A LoRA training step of the stock Trainer against the same step held by ctxext: peak memory per token, time, loss.

    python scripts/bench_training.py                                           # SmolLM2-135M, 4K and 8K, on the CPU
    python scripts/bench_training.py --model llama-8b --lengths 65536,131072   # on an 80 GB GPU
    python scripts/bench_training.py --lengths 16384 --shares                  # and the parts of a step's time

A ``Trainer`` takes a step to warm up and then the measured ones, on the same tokens, on a CPU in a process of its own;
the variants of a length take turns, round after round. "Stock" is activation checkpointing as ``TrainingArguments``
sets it, and nothing else; "stock, Liger" has Liger's kernels too (``use_liger_kernel``), and with them a loss in chunks
of Liger's own. "nf4" holds the frozen weights in 4 bits (bitsandbytes). On a CPU "ctxext" gives blocks of 1 MiB and
more back, "large blocks returned" those of twice a layer's hidden states, "freed memory kept" none
(``memory.return_freed`` of the recipe). "ctxext, cuDNN" attends by cuDNN, which plans for each new shape in the first
step, whose seconds stand apart. Memory is what the steps add, at their peak, to what the process held with its
model: adapters' gradients and optimizer state included, weights not; "plan" is what ``ctxext plan`` predicts of it,
over that (gradients that stay between the micro-batches of an update included), and "host" the pinned memory on the
host.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import re
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from typing import Annotated, Any

import bench
import torch
import typer
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging

import ctxext
from ctxext.checkpoints.load import extended_config
from ctxext.measuring.checkpoint import DTYPES
from ctxext.planning.plan import plan_serving, plan_training
from ctxext.training import Memory, return_freed_memory
from ctxext.training.lora import attach_lora
from ctxext.training.memory import MOST_KEPT

STOCK, LIGER, NF4, CUDNN = "stock", "stock, Liger", "ctxext, nf4", "ctxext, cuDNN"
KEPT, LARGE = "ctxext, freed memory kept", "ctxext, large blocks returned"
VARIANTS: dict[str, dict[str, Memory]] = {
    "cpu": {
        STOCK: Memory(loss_chunk=None),
        "ctxext": Memory(),
        LARGE: Memory(),
        KEPT: Memory(),
        "ctxext, attention kept": Memory(save_attention=True),
    },
    "cuda": {
        STOCK: Memory(loss_chunk=None),
        LIGER: Memory(loss_chunk=None),
        "ctxext": Memory(),
        "ctxext, attention kept": Memory(save_attention=True),
        CUDNN: Memory(),
        NF4: Memory(),
        "ctxext, tiled MLP": Memory(mlp_tile=8192),
        "ctxext, offload": Memory(offload=True),
        "ctxext, offload, tiled MLP": Memory(offload=True, mlp_tile=8192),
        "ctxext, offload, tiled MLP, attention kept": Memory(offload=True, mlp_tile=8192, save_attention=True),
    },
}


# What a step does, by the names of torch's operations: the first part whose pattern is found in a name.
PARTS = {
    "attention": "scaled_dot_product|flash|flex|_attention_",
    "products with weights": r"aten::(mm|addmm|bmm)$",
    "loss": "log_softmax|exp_|scatter|gather|masked_fill",
    "optimiser and norm of gradients": "sqrt|lerp|addcdiv|addcmul|_foreach|linalg",
    "copies, casts, zeros": "copy|_to_copy|clone|cat|fill_|zero_|contiguous",
    "all else": "",
}


@dataclass(frozen=True)
class Setting:
    """One measurement.

    Args:
        shape: a key of ``SHAPES``.
        length: tokens of the one sequence of a step.
        variant: a key of ``VARIANTS[device]``.
        device: cpu or cuda.
        dtype: a key of ``DTYPES``.
        rank: of LoRA on all linear layers.
        whole: whether norms and embeddings are trained too, as the recipe does.
        layers: fewer layers than the shape has; 0 for all.
        method: that the model is patched by, to 4 times its length; None for the stock model.
        loss_chunk: tokens whose logits exist at a time, where it is not the variant's.
        steps: measured ones, after one to warm up.
        shares: whether the last step is profiled, which makes it slower.
        warm: tokens of the step that warms up; 0 for all.
        threads: of the CPU; 0 for torch's own choice.
    """

    shape: str
    length: int
    variant: str
    device: str
    dtype: str = "bf16"
    rank: int = 16
    whole: bool = False
    layers: int = 0
    steps: int = 1
    threads: int = 0
    method: str | None = None
    loss_chunk: int | None = None
    shares: bool = False
    warm: int = 0

    @property
    def memory(self) -> Memory:
        """How activations are held."""
        memory = VARIANTS[self.device][self.variant]
        return memory if self.loss_chunk is None else replace(memory, loss_chunk=self.loss_chunk)


@dataclass(frozen=True)
class Measured:
    """What steps took: the first, the median of the others, the memory of all, the losses; or why there is nothing."""

    first: float = math.nan
    seconds: float = math.nan
    added_mib: float = math.nan
    host_mib: float = 0.0
    losses: tuple[float, ...] = ()
    shares: tuple[tuple[str, float], ...] = ()
    why_not: str = ""


class StepTimes(TrainerCallback):  # type: ignore[misc]
    """Seconds of every step, of the optimizer's too; with ``shares``, what the last step spent them on."""

    def __init__(self, device: str, *, shares: bool = False) -> None:
        self.device = device
        self.seconds: list[float] = []
        self.shares: tuple[tuple[str, float], ...] = ()
        self.profile = torch.profiler.profile() if shares else None

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start the clock."""
        if self.profile is not None and state.global_step == state.max_steps - 1:
            self.profile.start()
        bench.synchronize(self.device)
        self._start = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop it."""
        bench.synchronize(self.device)
        self.seconds.append(time.perf_counter() - self._start)
        if self.profile is not None and state.global_step == state.max_steps:
            self.profile.stop()
            self.shares = shares_of(self.profile, self.device)


def shares_of(profile: torch.profiler.profile, device: str) -> tuple[tuple[str, float], ...]:
    """Return the share of every part of ``PARTS`` in the time of a profiled step's operations."""
    spent = dict.fromkeys(PARTS, 0.0)
    for event in profile.key_averages():
        if event.device_type.name != "CPU":  # a kernel, counted in the operation that launched it
            continue
        part = next(name for name, pattern in PARTS.items() if re.search(pattern, event.key))
        spent[part] += event.self_device_time_total if device == "cuda" else event.self_cpu_time_total
    whole = sum(spent.values())
    return tuple((part, seconds / whole) for part, seconds in spent.items())


def build(setting: Setting) -> Any:
    """Return a model with random weights, patched where that is asked for."""
    bench.use_threads(setting.threads)
    model = bench.random_model(setting.shape, setting.dtype, setting.device, setting.layers)
    if setting.method is not None:
        ctxext.patch(model, setting.method, factor=4, trained_length=2048)
    if setting.variant == NF4:
        hold_in_four_bits(model, DTYPES[setting.dtype], setting.device)
    return model


def hold_in_four_bits(model: Any, dtype: torch.dtype, device: str) -> None:
    """Replace the linear layers but the head, as transformers does where it loads a checkpoint with nf4."""
    from bitsandbytes.nn import Linear4bit

    head = model.get_output_embeddings()
    linear = [(name, layer) for name, layer in model.named_modules() if type(layer) is nn.Linear and layer is not head]
    for name, layer in linear:
        with torch.device("meta"):
            packed = Linear4bit(layer.in_features, layer.out_features, False, dtype, quant_type="nf4")
        packed.weight = type(packed.weight)(layer.weight.data, requires_grad=False, quant_type="nf4").to(device)
        model.set_submodule(name, packed)
    model.is_loaded_in_4bit = True  # PEFT reads it


def predicted(setting: Setting) -> float:
    """Return the MiB that ``ctxext plan`` says a step adds; without a variant, a prompt."""
    config, dtype = bench.config_of(setting.shape, setting.layers), DTYPES[setting.dtype]
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
            quantisation="nf4" if setting.variant == NF4 else None,
        ).at(setting.length)
    else:
        planned = plan_serving(config, dtype=dtype).at(setting.length)
    return (planned.total - planned.weights - planned.adapters) / 2**20


def host_bytes(device: str, when: str) -> int:
    """Return the pinned memory of this process, at its ``"peak"`` or ``"current"``; what was freed is kept."""
    return int(torch.cuda.host_memory_stats()[f"allocated_bytes.{when}"]) if device == "cuda" else 0


def measure(setting: Setting) -> Measured:
    """Take the steps; on a CPU, run it in a fresh process."""
    logging.set_verbosity_error()
    model = build(setting).train()
    if setting.variant not in (STOCK, LIGER, KEPT):
        hidden_states = setting.length * model.config.hidden_size * DTYPES[setting.dtype].itemsize
        return_freed_memory(above=min(2 * hidden_states, MOST_KEPT) if setting.variant == LARGE else 2**20)
    model.config.use_cache = False
    model = attach_lora(model, rank=setting.rank, norms=setting.whole, embeddings=setting.whole)
    setting.memory.apply(model)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(model.config.vocab_size, (setting.length,), generator=generator)
    first = ids[: setting.warm or None]
    rows = [{"input_ids": first, "labels": first}, *[{"input_ids": ids, "labels": ids}] * setting.steps]
    times = StepTimes(setting.device, shares=setting.shares)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=len(rows),
            per_device_train_batch_size=1,
            learning_rate=1e-4,
            use_liger_kernel=setting.variant == LIGER,
            bf16=setting.dtype == "bf16",
            use_cpu=setting.device == "cpu",
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            report_to=[],
            dataloader_pin_memory=False,
            train_sampling_strategy="sequential",
        )
        trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[times])
        trainer.remove_callback(PrinterCallback)
        pinned = host_bytes(setting.device, "current")
        by_cudnn = sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if setting.variant == CUDNN else contextlib.nullcontext()
        try:
            with by_cudnn:
                added = bench.added_memory(setting.device, trainer.train)
        except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
            return Measured(why_not=str(error).splitlines()[0][:90])
    losses = tuple(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    host = (host_bytes(setting.device, "peak") - pinned) / 2**20
    seconds = statistics.median(times.seconds[1:])
    added = math.nan if added is None else added
    return Measured(times.seconds[0], seconds, added, host, losses, times.shares)


def in_a_process(setting: Setting) -> Measured:
    """Measure; on a CPU in a process of its own, where one that the system kills for its memory is a finding.

    So with Liger everywhere: it replaces classes of transformers, for all models of the process from then on.
    """
    if setting.device == "cuda" and setting.variant != LIGER:  # torch counts what a model adds, whatever was before
        gc.collect()
        torch.cuda.empty_cache()
        return measure(setting)
    try:
        return bench.in_fresh_process(measure, setting)
    except BrokenProcessPool:
        return Measured(why_not="killed: out of memory")


def compared(setting: Setting, names: list[str], rounds: int, say: bench.Say) -> dict[str, Measured]:
    """Measure the variants in turn, round after round: the median time, the largest memory."""
    results: dict[str, list[Measured]] = {name: [] for name in names}
    for number, name in itertools.product(range(rounds), names):
        if not any(measured.why_not for measured in results[name]):
            say(f"{setting.shape}, {setting.length:,} tokens, {name}, round {number + 1} of {rounds}")
            results[name].append(in_a_process(replace(setting, variant=name)))
    return {
        name: Measured(
            measured[0].first,
            statistics.median(m.seconds for m in measured),
            max(m.added_mib for m in measured),
            max(m.host_mib for m in measured),
            measured[0].losses,
            measured[-1].shares,
            next((m.why_not for m in measured if m.why_not), ""),
        )
        for name, measured in results.items()
    }


COLUMNS = (
    "tokens",
    "variant",
    "first",
    "seconds",
    "tokens/s",
    "time",
    "adds MiB",
    "memory",
    "plan",
    "host MiB",
    "loss",
)


def cells(setting: Setting, measured: Measured, stock: Measured | None) -> list[str]:
    """Return a row of the table as text; ``time`` and ``memory`` are ratios to stock."""
    length, name = setting.length, setting.variant
    if measured.why_not:
        return [f"{length:,}", name, measured.why_not, *[""] * (len(COLUMNS) - 3 + len(measured.shares))]
    ratios = ("", "")
    if stock is not None and not stock.why_not:
        ratios = (f"{measured.seconds / stock.seconds:.2f}", f"{measured.added_mib / stock.added_mib:.2f}")
    return [
        f"{length:,}",
        name,
        f"{measured.first:.1f}",
        f"{measured.seconds:.1f}",
        f"{length / measured.seconds:,.0f}",
        ratios[0],
        f"{measured.added_mib:,.0f}",
        ratios[1],
        "" if name == LIGER else f"{predicted(setting) / measured.added_mib:.2f}",
        f"{measured.host_mib:,.0f}",
        f"{measured.losses[-1]:.5f}",
        *(f"{share:.1%}" for _, share in measured.shares),
    ]


def main(
    model: Annotated[str, typer.Option(help=f"one of {', '.join(bench.SHAPES)}")] = "smollm2",
    lengths: bench.Lengths = "4096,8192",
    only: Annotated[str, typer.Option(help="variants, semicolon-separated; all if empty")] = "",
    dtype: bench.Dtype = "bf16",
    rank: Annotated[int, typer.Option(help="of LoRA on all linear layers", min=1)] = 16,
    whole: Annotated[bool, typer.Option(help="train norms and embeddings too")] = False,
    layers: bench.Layers = 0,
    rounds: Annotated[int, typer.Option(help="processes per variant and length", min=1)] = 1,
    steps: Annotated[int, typer.Option(help="measured steps per process", min=1)] = 1,
    threads: bench.Threads = 0,
    device: bench.Device = bench.DEVICE,
    shares: Annotated[bool, typer.Option("--shares", help="profile a step: the share of each part")] = False,
    warm: Annotated[int, typer.Option(help="tokens of the step that warms up; 0 for all", min=0)] = 0,
    markdown: bench.Markdown = None,
) -> None:
    """Measure a LoRA training step with and without ctxext."""
    chosen = bench.listed(only, VARIANTS[device], ";")
    names = [name for name in VARIANTS[device] if not chosen or name in chosen]
    setting = Setting(model, 0, names[0], device, dtype, rank, whole, layers, steps, threads, shares=shares, warm=warm)
    columns = (*COLUMNS, *PARTS) if shares else COLUMNS

    def rows(say: bench.Say) -> Iterator[bench.Row]:
        for length in map(int, bench.listed(lengths)):
            at = replace(setting, length=length)
            results: dict[str, Measured] = {}
            for turns in [names] if rounds > 1 else [[name] for name in names]:
                for name, measured in compared(at, turns, rounds, say).items():
                    results[name] = measured
                    yield cells(replace(at, variant=name), measured, results.get(STOCK))

    trained = "LoRA, norms and embeddings" if whole else "LoRA"
    shape = f"{model}{f', {layers} layers' if layers else ''}, {dtype}, {trained} of rank {rank}"
    title = f"One training step of a random model of the shape of {shape}; {bench.machine(device)}"
    bench.report(title, columns, rows, markdown)


if __name__ == "__main__":
    typer.run(main)
