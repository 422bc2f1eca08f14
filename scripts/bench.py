"""What the benchmarks share: options, models with random weights, time, memory, fresh processes, the table."""

from __future__ import annotations

import copy
import datetime
import json
import multiprocessing
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib import metadata
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar

import torch
import transformers
from rich.console import Console
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, BloomConfig, LlamaConfig, PreTrainedConfig
from typer import BadParameter, Option

from ctxext.errors import ResultsError
from ctxext.files import digest
from ctxext.measuring import provenance
from ctxext.measuring.checkpoint import DTYPES, Checkpoint
from ctxext.measuring.journal import Journal

Given = ParamSpec("Given")
Result = TypeVar("Result")
Row = Sequence[str]
Say = Callable[[str], object]

# Options

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Device = Annotated[str, Option(help="cpu or cuda")]
Dtype = Annotated[str, Option(help=f"of {', '.join(DTYPES)}")]
Dtypes = Annotated[str, Option(help=f"of {', '.join(DTYPES)}, comma-separated")]
Layers = Annotated[int, Option(help="fewer layers than the shape has; 0 for all", min=0)]
Lengths = Annotated[str, Option(help="tokens, comma-separated")]
Markdown = Annotated[Path | None, Option("--markdown", help="also write the table here, after every row")]
Rounds = Annotated[int, Option(help="timed rounds, after one that warms up; the median counts", min=1)]
Threads = Annotated[int, Option(help="of the CPU; 0 for torch's own choice", min=0)]
Tokens = Annotated[int, Option(help="of the text", min=1)]


def listed(text: str, known: Collection[str] = (), separator: str = ",") -> list[str]:
    """Split an option that holds several values.

    Raises:
        BadParameter: a value is none of the ``known`` ones, where there are any.
    """
    values = [part.strip() for part in text.split(separator) if part.strip()]
    for value in values:
        if known and value not in known:
            raise BadParameter(f"{value!r} is none of {', '.join(known)}")
    return values


def use_threads(count: int) -> None:
    """Let torch compute on ``count`` threads; 0 leaves its own choice."""
    if count:
        torch.set_num_threads(count)


# Models: shapes of published ones with random weights, on which neither time nor memory depends

_LLAMA = {"max_position_embeddings": 131072, "vocab_size": 128256, "num_attention_heads": 32, "num_key_value_heads": 8}
SHAPES: dict[str, PreTrainedConfig] = {
    "smollm2": LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
    ),
    "llama-1b": LlamaConfig(
        **_LLAMA, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, tie_word_embeddings=True
    ),
    "llama-8b": LlamaConfig(**_LLAMA, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32),
    "bloom-560m": BloomConfig(vocab_size=250880, hidden_size=1024, n_layer=24, n_head=16),
}


def config_of(shape: str, layers: int = 0, **changes: Any) -> PreTrainedConfig:
    """Return the config of a shape, with fewer layers and other fields where they are given."""
    config = copy.deepcopy(SHAPES[shape])
    config.num_hidden_layers = layers or config.num_hidden_layers
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def random_model(shape: str, dtype: str, device: str, layers: int = 0, **changes: Any) -> Any:
    """Return a model of a shape with random weights, made on the device; in evaluation mode."""
    torch.manual_seed(0)
    with torch.device(device):
        config = config_of(shape, layers, **changes)
        return AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype]).eval()


def two_layers(dtype: str, device: str) -> Any:
    """Return two layers of SmolLM2-135M's shape with few words, where attention is what is measured."""
    return random_model("smollm2", dtype, device, layers=2, vocab_size=256)


# Time


def synchronize(device: str) -> None:
    """Wait until the device has done what it was asked."""
    if device == "cuda":
        torch.cuda.synchronize()


def seconds_of(call: Callable[[], object], device: str) -> float:
    """Return how long one call takes."""
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - start


def medians(timers: Sequence[Callable[[], float]], rounds: int, *, warm: bool = False) -> list[float]:
    """Let timers take turns for some rounds, and return the median of each; unless ``warm``, a round before warms up.

    A busy machine slows all of them alike, so that ratios of the medians hold.
    """
    times: list[list[float]] = [[timer() for timer in timers] for _ in range(rounds + (not warm))]
    times = times[-rounds:]
    return [statistics.median(column) for column in zip(*times, strict=True)]


def in_turns(calls: Sequence[Callable[[], object]], rounds: int, device: str, *, warm: bool = False) -> list[float]:
    """Return the median seconds of each call; see ``medians``."""
    return medians([partial(seconds_of, call, device) for call in calls], rounds, warm=warm)


# Memory


def in_fresh_process(measure: Callable[Given, Result], *args: Given.args, **kwargs: Given.kwargs) -> Result:
    """Call a function in a process of its own: what others left in memory does not count there.

    Raises:
        BrokenProcessPool: if the system kills it, for its memory as a rule.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as fresh:
        return fresh.submit(measure, *args, **kwargs).result()


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


# What is finished


def claim(output: Path, made_by: str, checkpoint: Checkpoint, **settings: object) -> None:
    """Write down what the results in a folder or file are of, or refuse those of another checkpoint or setting.

    Raises:
        ResultsError: if they are, or nothing says what they are of.
    """
    said = json.dumps(settings, sort_keys=True, default=str)
    beside = output.with_suffix(".study.jsonl")  # of a file; a folder has the claim inside
    if output.suffix and output.exists() and not beside.exists():
        raise ResultsError(f"{output} holds results, and no {beside.name} says of which checkpoint. Move it away.")
    journal = Journal(beside) if output.suffix else Journal(output / "study.jsonl", identity="study.json")
    of_checkpoint = {"name": checkpoint.name, "sha256": checkpoint.sha256}
    journal.claim({"made_by": made_by, "checkpoint": of_checkpoint, "settings": {"name": said, "sha256": digest(said)}})


# The table


def machine(device: str) -> str:
    """Return the machine, the libraries, the commit (with a plus where files differ from it) and the date in a line."""
    state = provenance.git_state(Path(__file__).parent) or {"commit": "unknown", "dirty": False}
    commit = os.environ.get("CTXEXT_COMMIT") or state["commit"][:10] + "+" * state["dirty"]
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(asked, capture_output=True, text=True, check=False).stdout if device == "cuda" else ""
    card = f"driver {driver.split()[0]}; triton {metadata.version('triton')}; " if driver else ""
    versions = f"torch {torch.__version__}; transformers {transformers.__version__}; commit {commit}"
    return f"{provenance.machine(device)}; {card}{versions}; {datetime.datetime.now(datetime.UTC):%Y-%m-%d}"


def shown(number: float | None, form: str) -> str:
    """Return a number as a cell of a table, which is empty where there is none."""
    return "" if number is None else format(number, form)


def _line(cells: Row) -> str:
    return f"| {' | '.join(cells)} |"


def markdown_table(title: str, columns: Row, rows: Sequence[Row], notes: Sequence[str] = ()) -> str:
    """Return a table as Markdown, with a line per note below."""
    lines = [title, "", _line(columns), f"|{'---|' * len(columns)}", *map(_line, rows)]
    return "\n".join([*lines, "", *(f"- {note}" for note in notes)]).rstrip() + "\n"


def report(
    title: str,
    columns: Row,
    measure: Callable[[Say], Iterable[Row]],
    markdown: Path | None,
    notes: Sequence[str] = (),
) -> None:
    """Print a table row by row while it is measured; where a file is named, write the table after every row.

    Args:
        title: the line above the table.
        columns: their names.
        measure: yields the rows; what it is given shows what is being measured.
        markdown: the file.
        notes: lines below the table; ``measure`` may add to them.
    """
    console, rows = Console(soft_wrap=True, markup=False, highlight=False), []
    console.print(markdown_table(title, columns, []), end="")
    with console.status("") as status:
        for row in measure(status.update):
            rows.append(row)
            console.print(_line(row))
            if markdown is not None:
                markdown.write_text(markdown_table(title, columns, rows, notes), encoding="utf-8")
    console.print("", *(f"- {note}" for note in notes), sep="\n")
    if markdown is not None:
        markdown.write_text(markdown_table(title, columns, rows, notes), encoding="utf-8")
