"""What the benchmark scripts share: the machine in a line, peak memory, tables."""

from __future__ import annotations

import datetime
import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch
from rich.console import Console
from torch.profiler import ProfilerActivity, profile

from ctxext.evaluation import provenance

Given = ParamSpec("Given")
Found = TypeVar("Found")


def synchronize(device: str) -> None:
    """Wait until the device has done what it was asked."""
    if device == "cuda":
        torch.cuda.synchronize()


def in_fresh_process(measure: Callable[Given, Found], *args: Given.args, **kwargs: Given.kwargs) -> Found:
    """Call a function in a process of its own: what others left in memory does not count there.

    Raises:
        BrokenProcessPool: if the system kills it, for its memory as a rule.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as fresh:
        return fresh.submit(measure, *args, **kwargs).result()


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


def added_memory(device: str, call: Callable[[], object]) -> float | None:
    """Return the MiB that ``call`` adds at its peak to what this process holds; None if that cannot be known.

    On a CPU everything counts, and the code that a first call loads (some 10 MiB): for whole models.
    """
    if device == "cuda":
        return allocated_memory(device, call)
    if not Path("/proc/self/clear_refs").exists():
        return None
    Path("/proc/self/clear_refs").write_text("5")  # Linux: sets the peak back to what is resident now
    resident = _resident("VmRSS")
    call()
    return _resident("VmHWM") - resident


def allocated_memory(device: str, call: Callable[[], object]) -> float:
    """Return the MiB of tensors that ``call`` makes and holds at its peak, as torch's allocator counts them."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return float(torch.cuda.max_memory_allocated() - before) / 2**20
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        call()
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return max(held, default=0) / 2**20


def peak_resident(device: str) -> float | None:
    """Return the most bytes that this process has held, on the device for CUDA; None if that cannot be known."""
    if device == "cuda":
        return float(torch.cuda.max_memory_allocated())
    return _resident("VmHWM") * 2**20 if Path("/proc/self/status").exists() else None


def _resident(field: str) -> float:
    """Return a field of /proc/self/status in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 2**10
    raise KeyError(field)


def machine(device: str) -> str:
    """Return the machine, the library and the date in a line."""
    return f"{provenance.machine(device)}; torch {torch.__version__}; {datetime.datetime.now(datetime.UTC):%Y-%m-%d}"


def markdown_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str] = ()) -> str:
    """Return a table as Markdown, with a line per note below."""
    lines = [title, "", f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([*lines, "", *(f"- {note}" for note in notes)]).rstrip() + "\n"


def show_table(table: str, markdown: Path | None) -> None:
    """Print a table of ``markdown_table``, and write it where a file is named."""
    Console().print(table, markup=False)
    if markdown is not None:
        markdown.write_text(table, encoding="utf-8")
