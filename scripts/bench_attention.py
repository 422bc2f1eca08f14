"""Speed and memory of attention, as ratios to plain causal SDPA measured in the same run.

    python scripts/bench_attention.py                             # kernels, 2K to 8K tokens, bf16 and fp32
    python scripts/bench_attention.py --device cuda --lengths 8192,16384,32768,65536 --markdown table.md

Variants are timed in turn, round after round, and the median of each is divided by the median of the plain one, so that
a busy machine slows all of them alike. Peak memory is what one call adds, measured in a process of its own.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from measuring import added_memory, in_fresh_process, machine, markdown_table, synchronize
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor

from ctxext.attention import BACKENDS, AttentionBackend, Layout, Need
from ctxext.attention.flex import Flex
from ctxext.evaluation.checkpoint import DTYPES
from ctxext.methods.formulas import alibi_slopes

QKV = tuple[Tensor, Tensor, Tensor]
Run = Callable[[QKV], Tensor]
PLAIN = "plain causal SDPA"
DENSE = "dense bias, prepared"
CUTOFF = 60.0
"""Of the window per head: what lies farther than this over the slope is dropped (see ``ctxext.attention.flex``)."""
DENSE_LIMIT = 8 << 30
"""Bytes of bias beyond which the dense variant is left out: it says so in the table."""


@dataclass(frozen=True)
class Setting:
    """One line of the table, before it is measured.

    Args:
        length: tokens.
        heads: query heads, and key heads.
        head_dim: of q, k and v.
        dtype: a key of ``DTYPES``.
        backward: whether the backward is timed too.
        device: where it runs.
    """

    length: int
    heads: int
    head_dim: int
    dtype: str
    backward: bool
    device: str

    @property
    def scale(self) -> float:
        """What multiplies q.k."""
        return 1 / math.sqrt(self.head_dim)


@dataclass(frozen=True)
class Measured:
    """A setting and a variant with its numbers, or why it has none."""

    setting: Setting
    variant: str
    milliseconds: float | None = None
    ratio: float | None = None
    peak_mib: float | None = None
    why_not: str = ""


def tensors(setting: Setting) -> QKV:
    """Return random q, k and v."""
    size = (1, setting.heads, setting.length, setting.head_dim)
    dtype, device = DTYPES[setting.dtype], setting.device
    q, k, v = (torch.randn(size, device=device, dtype=dtype, requires_grad=setting.backward) for _ in range(3))
    return q, k, v


def plain(qkv: QKV) -> Tensor:
    """Causal attention as stock models call it."""
    q, k, v = qkv
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def variants(setting: Setting) -> dict[str, Run | str]:
    """Return every variant as a function of q, k and v, or the reason why it cannot run."""
    slopes = alibi_slopes(setting.heads).to(setting.device)
    layout = Layout.causal(1, setting.length, device=setting.device)
    found: dict[str, Run | str] = {PLAIN: plain}
    for name in ("sdpa", "flash", "flash3", "flash4", "flex"):
        backend = BACKENDS[name]()
        if name == "sdpa":
            found["sdpa, no bias"] = _call(backend, setting, layout, None)
        found[f"{name}, ALiBi"] = _why_not(backend, setting) or _call(backend, setting, layout, slopes)
    windowed = Flex(cutoff=CUTOFF)
    found[f"flex, cutoff {CUTOFF:g}"] = _why_not(windowed, setting) or _call(windowed, setting, layout, slopes)
    found[DENSE] = _dense(setting, slopes)
    return found


def _call(backend: AttentionBackend, setting: Setting, layout: Layout, slopes: Tensor | None) -> Run:
    return lambda qkv: backend(*qkv, layout, scale=setting.scale, slopes=slopes)


def _why_not(backend: AttentionBackend, setting: Setting) -> str | None:
    capability = torch.cuda.get_device_capability() if setting.device == "cuda" else None
    return backend.why_not(
        Need(
            device=setting.device,
            capability=capability,
            dtype=DTYPES[setting.dtype],
            head_dim=setting.head_dim,
            heads=setting.heads,
            kv_heads=setting.heads,
            query_length=setting.length,
            key_length=setting.length,
            training=setting.backward,
            biased=True,
        )
    )


def _dense(setting: Setting, slopes: Tensor) -> Run | str:
    """Return SDPA with the bias as a tensor, built at the first call and kept: what stock models would do at best."""
    dtype = torch.float32 if setting.device == "cpu" else DTYPES[setting.dtype]
    size = setting.heads * setting.length**2 * dtype.itemsize
    if size > DENSE_LIMIT:
        return f"the bias alone takes {size / 2**30:.0f} GiB"
    kept: list[Tensor] = []

    def run(qkv: QKV) -> Tensor:
        if not kept:
            bias = torch.empty(1, setting.heads, setting.length, setting.length, dtype=dtype, device=setting.device)
            places = torch.arange(setting.length, device=setting.device)
            distance = (places[:, None] - places[None, :]).float()
            future = distance < 0
            for head, slope in enumerate(slopes.tolist()):
                bias[0, head] = (-slope * distance).masked_fill(future, -torch.inf)
            kept.append(bias)
        q, k, v = qkv
        return F.scaled_dot_product_attention(q, k, v, attn_mask=kept[0], scale=setting.scale)

    return run


def once(setting: Setting, run: Run, qkv: QKV) -> None:
    """Run a variant once and wait for it."""
    with torch.set_grad_enabled(setting.backward):
        out = run(qkv)
        if setting.backward:
            torch.autograd.grad(out, qkv, torch.ones_like(out))
    synchronize(setting.device)


def peak(setting: Setting, variant: str) -> float | None:
    """Return the MiB that one call adds to what this process holds; run it in a fresh one. None if it cannot know."""
    run = variants(setting)[variant]
    if isinstance(run, str):
        raise ValueError(run)
    small = replace(setting, length=256)
    once(small, plain, tensors(small))  # libraries and thread pools are there before memory is counted
    qkv = tensors(setting)
    gc.collect()
    return added_memory(setting.device, lambda: once(setting, run, qkv))


def measure(setting: Setting, *, rounds: int, memory: bool) -> list[Measured]:
    """Time all variants of a setting in turn, and their memory one by one."""
    offered = variants(setting)
    able = {name: run for name, run in offered.items() if not isinstance(run, str)}
    unable = {name: why for name, why in offered.items() if isinstance(why, str)}
    qkv = tensors(setting)
    times: dict[str, list[float]] = {name: [] for name in able}
    for number in range(rounds + 1):
        for name, run in able.items():
            start = time.perf_counter()
            once(setting, run, qkv)
            if number:  # the first round warms up and compiles
                times[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(values) for name, values in times.items()}
    peaks: dict[str, float | None] = {}
    if memory:
        peaks = {name: in_fresh_process(peak, setting, name) for name in able}
    return [
        Measured(setting, name, seconds * 1e3, seconds / medians[PLAIN], peaks.get(name))
        for name, seconds in medians.items()
    ] + [Measured(setting, name, why_not=why) for name, why in unable.items()]


COLUMNS = ("tokens", "dtype", "head_dim", "pass", "variant", "ms", "ratio", "peak MiB")


def cells(row: Measured) -> list[str]:
    """Return a row of the table as text."""
    setting = row.setting
    numbers = ((row.milliseconds, "{:.1f}"), (row.ratio, "{:.2f}"), (row.peak_mib, "{:.0f}"))
    return [
        str(setting.length),
        setting.dtype,
        str(setting.head_dim),
        "fwd+bwd" if setting.backward else "fwd",
        row.variant,
        *("" if number is None else form.format(number) for number, form in numbers),
    ]


def left_out(rows: Iterable[Measured]) -> list[str]:
    """Return every reason why a variant has no numbers, once, with where it holds."""
    where: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.why_not:
            what = f"{row.setting.length} {row.setting.dtype}" + " backward" * row.setting.backward
            where.setdefault((row.variant, row.why_not), []).append(what)
    return [f"{variant}: {why} ({', '.join(sorted(set(at)))})" for (variant, why), at in where.items()]


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cuda" if torch.cuda.is_available() else "cpu",
    lengths: Annotated[str, typer.Option(help="tokens, comma-separated")] = "2048,4096,8192",
    dtypes: Annotated[str, typer.Option(help=f"of {', '.join(DTYPES)}")] = "bf16,fp32",
    head_dims: Annotated[str, typer.Option(help="comma-separated")] = "64,128",
    heads: Annotated[int, typer.Option(help="query and key heads", min=1)] = 16,
    rounds: Annotated[int, typer.Option(help="timed rounds; the median counts", min=1)] = 5,
    backward: Annotated[bool, typer.Option(help="also time forward + backward")] = True,
    memory: Annotated[bool, typer.Option(help="also measure peak memory, one process per variant")] = True,
    flush_denormals: Annotated[bool, typer.Option(help="torch.set_flush_denormal, before any thread starts")] = False,
    markdown_file: Annotated[Path | None, typer.Option("--markdown", help="also write the table here")] = None,
) -> None:
    """Measure attention kernels with and without ALiBi."""
    if flush_denormals and not torch.set_flush_denormal(True):
        raise typer.BadParameter("this processor cannot flush denormals", param_hint="--flush-denormals")
    for name in dtypes.split(","):
        if name not in DTYPES:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(DTYPES)}", param_hint="--dtypes")
    settings = [
        Setting(int(length), heads, int(head_dim), dtype, both, device)
        for dtype in dtypes.split(",")
        for head_dim in head_dims.split(",")
        for length in lengths.split(",")
        for both in ([False, True] if backward else [False])
    ]
    title = f"Attention kernels, {heads} heads; {machine(device)}" + ("; denormals flushed" * flush_denormals)
    table = Table(*(Column(name, no_wrap=True) for name in COLUMNS), title=title)
    console = Console()
    rows: list[Measured] = []
    with console.status("") as status:
        for setting in settings:
            status.update(f"{setting}")
            for row in measure(setting, rounds=rounds, memory=memory):
                rows.append(row)
                if not row.why_not:
                    table.add_row(*cells(row))
    console.print(table)
    for line in left_out(rows):
        console.print(f"left out: {line}", markup=False)
    if markdown_file is not None:
        shown = [cells(row) for row in rows if not row.why_not]
        notes = [f"Left out: {line}" for line in left_out(rows)]
        markdown_file.write_text(markdown_table(title, COLUMNS, shown, notes))


if __name__ == "__main__":
    typer.run(main)
