"""The referee's own cost: time against a bare forward pass, memory, and what published protocols would take instead.

    python scripts/bench_perplexity.py                                        # SmolLM2-135M's shape at 16K tokens
    python scripts/bench_perplexity.py --lengths 32768 --protocols skip       # time and memory of the referee alone
    python scripts/bench_perplexity.py --lengths 4096 --protocols run         # small enough to run those as well

Weights are random: time and memory do not depend on them. Each length is a process of its own. "bare" runs the layers
and no head; "referee" is `loss_by_position`, which gives the loss at every position up to the length. The protocols
are those of `ctxext.evaluation.loss` on one document of twice the length: windows every 256 tokens, and YaRN's
sweep of such windows over eight lengths. Their time is computed from their passes and the time of a pass of each size,
or, with `--protocols run`, measured.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from measuring import in_fresh_process, machine, markdown_table, peak_resident, synchronize
from rich.console import Console
from rich.table import Table
from shapes import SHAPES
from transformers import AutoModelForCausalLM

from ctxext.evaluation.checkpoint import DTYPES
from ctxext.evaluation.loss import STRIDE, loss_by_position, sliding, yarn

STEPS = 8
PROTOCOLS = ("compute", "run", "skip")
COLUMNS = (
    "tokens",
    "bare s",
    "referee s",
    "ratio",
    "process GiB",
    f"stride {STRIDE}",
    "YaRN's sweep",
    "seconds of those",
)


@dataclass(frozen=True)
class Measured:
    """One length.

    Args:
        length: tokens.
        bare: seconds of the layers alone.
        referee: seconds of the loss at every position.
        peak: bytes that the process held at most, weights and Python included.
        stride: seconds of windows every 256 tokens; None where not asked for.
        sweep: seconds of YaRN's sweep over eight lengths; likewise.
        how: where these two come from.
    """

    length: int
    bare: float
    referee: float
    peak: float | None
    stride: float | None
    sweep: float | None
    how: str

    def cells(self) -> list[str]:
        """Return a row of the table as text."""
        peak = "" if self.peak is None else f"{self.peak / 2**30:.2f}"
        ratios = ["" if other is None else f"{other / self.referee:.0f}x" for other in (self.stride, self.sweep)]
        times = [f"{seconds:.1f}" for seconds in (self.bare, self.referee)]
        return [f"{self.length:,}", *times, f"{self.referee / self.bare:.3f}", peak, *ratios, self.how]


def measure(length: int, dtype: str, device: str, layers: int, rounds: int, protocols: str) -> Measured:
    """Measure one length; run it in a fresh process."""
    torch.manual_seed(0)
    config = copy.deepcopy(SHAPES["smollm2"])
    config.num_hidden_layers, config.max_position_embeddings = layers, 2 * length
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype]).eval()
    document = torch.randint(0, config.vocab_size, (1, 2 * length), device=device)

    def bare(tokens: int) -> None:
        with torch.inference_mode():
            model.model(document[:, :tokens], use_cache=False)

    def seconds(call: Callable[[], object]) -> float:
        start = time.perf_counter()
        call()
        synchronize(device)
        return time.perf_counter() - start

    bare(64)
    loss_by_position(model, document[:, :64])
    pairs = [
        (seconds(lambda: bare(length - 1)), seconds(lambda: loss_by_position(model, document[:, :length])))
        for _ in range(rounds)
    ]
    plain, referee = (min(column) for column in zip(*pairs, strict=True))
    peak = peak_resident(device)
    if protocols == "skip":
        return Measured(length, plain, referee, peak, None, None, "")
    lengths = [length * step // STEPS for step in range(1, STEPS + 1)]
    if protocols == "run":
        stride = seconds(lambda: sliding(model, [document], length=length, stride=STRIDE))
        sweep = sum(seconds(lambda n=n: yarn(model, [document], length=n)) for n in lengths)
        return Measured(length, plain, referee, peak, stride, sweep, "measured")
    # What follows a window of the longest length: the rest of a document of twice that, 256 tokens at a time.
    passes = {n: 1 + -(-(2 * length - n) // STRIDE) for n in lengths}
    each = {n: plain if n == length else seconds(lambda n=n: bare(n - 1)) for n in lengths}
    sweep = sum(passes[n] * each[n] for n in lengths)
    return Measured(length, plain, referee, peak, passes[length] * each[length], sweep, "computed")


def main(
    lengths: Annotated[str, typer.Option(help="tokens, comma-separated")] = "16384",
    dtype: Annotated[str, typer.Option(help=f"of {', '.join(DTYPES)}")] = "bf16",
    layers: Annotated[int, typer.Option(help="of the shape's 30", min=1)] = 30,
    rounds: Annotated[int, typer.Option(help="timed rounds; the fastest counts", min=1)] = 1,
    protocols: Annotated[
        str, typer.Option(help="compute what they take from single passes, run them, or skip")
    ] = "compute",
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cuda" if torch.cuda.is_available() else "cpu",
    markdown: Annotated[Path | None, typer.Option(help="also write the table here")] = None,
) -> None:
    """Measure what the referee costs."""
    asked = [int(length) for length in lengths.split(",")]
    if protocols not in PROTOCOLS:
        raise typer.BadParameter(f"--protocols must be one of {', '.join(PROTOCOLS)}, found {protocols!r}")
    if min(asked) <= STEPS * STRIDE:
        raise typer.BadParameter(
            f"must be above {STEPS * STRIDE}, so that every window of the sweep exceeds its stride"
        )
    title = f"SmolLM2-135M's shape, random weights, {layers} layers, {dtype}; {machine(device)}"
    console = Console()
    table = Table(*COLUMNS, title=title)
    rows = []
    with console.status("") as status:
        for length in asked:
            status.update(f"{length:,} tokens")
            rows.append(in_fresh_process(measure, length, dtype, device, layers, rounds, protocols).cells())
            table.add_row(*rows[-1])
    console.print(table)
    if markdown is not None:
        markdown.write_text(markdown_table(title, COLUMNS, rows))


if __name__ == "__main__":
    typer.run(main)
