"""Speed and memory of attention, as ratios to plain causal SDPA measured in the same run.

    python scripts/bench_attention.py                             # kernels, 2K to 8K tokens, bf16 and fp32
    python scripts/bench_attention.py --device cuda --lengths 8192,16384,32768,65536 --markdown table.md

Variants take turns, and the median of each is divided by the median of the plain one. Peak memory is what one call
adds, measured in a process of its own.
"""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

import bench
import torch
import torch.nn.functional as F
import typer
from torch import Tensor

from ctxext.kernels import BACKENDS, AttentionBackend, Layout, Need
from ctxext.measuring.checkpoint import DTYPES
from ctxext.methods.formulas import alibi_slopes

QKV = tuple[Tensor, Tensor, Tensor]
Run = Callable[[QKV], Tensor]
PLAIN = "plain causal SDPA"
DENSE = "dense bias, prepared"
EAGER = "eager ALiBi, as stock BLOOM"
DENSE_LIMIT = 8 << 30
"""Bytes of bias or scores beyond which what holds them all is left out: it says so in the table."""


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
    found[DENSE] = _dense(setting, slopes)
    found[EAGER] = _eager(setting, slopes)
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


def _eager(setting: Setting, slopes: Tensor) -> Run | str:
    """Return the calls of transformers' BLOOM: scores on the bias, a mask, a softmax in float32, all of them held."""
    size = 3 * setting.heads * setting.length**2 * DTYPES[setting.dtype].itemsize
    if size > DENSE_LIMIT:
        return f"its scores take {size / 2**30:.0f} GiB"
    keys = torch.arange(setting.length, device=setting.device)
    future = keys[None, :] > keys[:, None]

    def run(qkv: QKV) -> Tensor:
        q, k, v = (x[0] for x in qkv)
        bias = (slopes[:, None, None] * keys).to(q.dtype)
        scores = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=setting.scale)
        scores = scores.masked_fill(future, torch.finfo(q.dtype).min)
        return (scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v)[None]

    return run


def once(setting: Setting, run: Run, qkv: QKV) -> None:
    """Run a variant once."""
    with torch.set_grad_enabled(setting.backward):
        out = run(qkv)
        if setting.backward:
            torch.autograd.grad(out, qkv, torch.ones_like(out))


def peak(setting: Setting, variant: str) -> float | None:
    """Return the MiB that one call adds to what this process holds; run it in a fresh one. None if it cannot know."""
    run = variants(setting)[variant]
    if isinstance(run, str):
        raise ValueError(run)
    small = replace(setting, length=256)
    once(small, plain, tensors(small))  # libraries and thread pools are there before memory is counted
    qkv = tensors(setting)
    gc.collect()
    return bench.added_memory(setting.device, lambda: once(setting, run, qkv))


def measure(setting: Setting, rounds: int, memory: bool, left_out: LeftOut) -> Iterator[bench.Row]:
    """Time all variants of a setting in turn, measure their memory one by one, and yield a row for each."""
    offered, qkv = variants(setting), tensors(setting)
    able = {name: run for name, run in offered.items() if not isinstance(run, str)}
    seconds = bench.in_turns([partial(once, setting, run, qkv) for run in able.values()], rounds, setting.device)
    for name, median in zip(able, seconds, strict=True):
        added = bench.in_fresh_process(peak, setting, name) if memory else None
        yield [
            *(str(setting.length), setting.dtype, str(setting.head_dim), "fwd+bwd" if setting.backward else "fwd"),
            *(name, f"{1e3 * median:.1f}", f"{median / seconds[0]:.2f}", bench.shown(added, ".0f")),
        ]
    where = f"{setting.length} {setting.dtype}" + " backward" * setting.backward
    for name, why in offered.items():
        if isinstance(why, str):
            left_out.setdefault((name, why), set()).add(where)


LeftOut = dict[tuple[str, str], set[str]]
"""Of each variant and reason why it has no numbers, where that holds."""
COLUMNS = ("tokens", "dtype", "head_dim", "pass", "variant", "ms", "ratio", "peak MiB")


def main(
    device: bench.Device = bench.DEVICE,
    lengths: bench.Lengths = "2048,4096,8192",
    dtypes: bench.Dtypes = "bf16,fp32",
    head_dims: Annotated[str, typer.Option(help="comma-separated")] = "64,128",
    heads: Annotated[int, typer.Option(help="query and key heads", min=1)] = 16,
    rounds: bench.Rounds = 5,
    backward: Annotated[bool, typer.Option(help="also time forward + backward")] = True,
    memory: Annotated[bool, typer.Option(help="also measure peak memory, one process per variant")] = True,
    flush_denormals: Annotated[bool, typer.Option(help="torch.set_flush_denormal, before any thread starts")] = False,
    markdown: bench.Markdown = None,
) -> None:
    """Measure attention kernels with and without ALiBi."""
    if flush_denormals and not torch.set_flush_denormal(True):
        raise typer.BadParameter("this processor cannot flush denormals", param_hint="--flush-denormals")
    passes = [False, True] if backward else [False]
    wanted = (bench.listed(dtypes, DTYPES), map(int, bench.listed(head_dims)), map(int, bench.listed(lengths)), passes)
    left_out: LeftOut = {}
    notes: list[str] = []

    def rows(say: bench.Say) -> Iterator[bench.Row]:
        for dtype, head_dim, length, both in itertools.product(*wanted):
            setting = Setting(length, heads, head_dim, dtype, both, device)
            say(f"{setting}")
            yield from measure(setting, rounds, memory, left_out)
            notes[:] = [f"Left out: {name}: {why} ({', '.join(sorted(at))})" for (name, why), at in left_out.items()]

    title = f"Attention kernels, {heads} heads; {bench.machine(device)}" + ("; denormals flushed" * flush_denormals)
    bench.report(title, COLUMNS, rows, markdown, notes)


if __name__ == "__main__":
    typer.run(main)
