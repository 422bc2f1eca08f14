"""What the benchmark scripts share: the machine in a line, peak memory, tables."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def synchronize(device: str) -> None:
    """Wait until the device has done what it was asked."""
    if device == "cuda":
        torch.cuda.synchronize()


def added_memory(device: str, call: Callable[[], object]) -> float | None:
    """Return the MiB that ``call`` adds at its peak to what this process holds; None if that cannot be known."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return float(torch.cuda.max_memory_allocated() - before) / 2**20
    if not Path("/proc/self/clear_refs").exists():
        return None
    Path("/proc/self/clear_refs").write_text("5")  # Linux: sets the peak back to what is resident now
    resident = _resident("VmRSS")
    call()
    return _resident("VmHWM") - resident


def _resident(field: str) -> float:
    """Return a field of /proc/self/status in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 2**10
    raise KeyError(field)


def machine(device: str) -> str:
    """Return the machine, the library and the date in a line."""
    what = torch.cuda.get_device_name() if device == "cuda" else f"{_processor()}, {torch.get_num_threads()} threads"
    return f"{what}; torch {torch.__version__}; {datetime.datetime.now(datetime.UTC):%Y-%m-%d}"


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def markdown_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str] = ()) -> str:
    """Return a table as Markdown, with a line per note below."""
    lines = [title, "", f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([*lines, "", *(f"- {note}" for note in notes)]).rstrip() + "\n"
