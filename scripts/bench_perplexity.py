"""The referee's own cost: time against a bare forward pass, memory, and what published protocols would take instead.

    python scripts/bench_perplexity.py                                        # SmolLM2-135M's shape at 16K tokens
    python scripts/bench_perplexity.py --lengths 32768 --protocols skip       # time and memory of the referee alone
    python scripts/bench_perplexity.py --lengths 4096 --protocols run         # small enough to run those as well

Each length is a process of its own. "bare" runs the layers and no head; "referee" is `loss_by_position`, which gives
the loss at every position up to the length. The protocols are those of `studies/published_perplexity.py` on one
document of twice the length: windows every 256 tokens, and YaRN's sweep of such windows over eight lengths. Their time
is computed from their passes and the time of a pass of each size, or, with `--protocols run`, measured.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import bench
import torch
import typer

sys.path.insert(0, str(Path(__file__).parents[1]))

from ctxext.measuring.loss import Window, loss_by_position, truncation_windows
from scripts.studies.published_perplexity import STRIDE, yarn_windows

STEPS = 8
Protocols = Literal["compute", "run", "skip"]
COLUMNS = (
    *("tokens", "bare s", "referee s", "ratio", "process GiB"),
    *(f"stride {STRIDE}", "YaRN's sweep", "seconds of those"),
)


def measure(length: int, dtype: str, device: str, layers: int, rounds: int, protocols: Protocols) -> bench.Row:
    """Return one row of the table; run it in a fresh process."""
    model = bench.random_model("smollm2", dtype, device, layers, max_position_embeddings=2 * length)
    document = torch.randint(0, model.config.vocab_size, (1, 2 * length), device=device)

    @torch.inference_mode()
    def bare(tokens: int) -> None:
        model.model(document[:, :tokens], use_cache=False)

    bare(64)
    loss_by_position(model, document[:, :64])
    calls = partial(bare, length - 1), lambda: loss_by_position(model, document[:, :length])
    turns = [[bench.seconds_of(call, device) for call in calls] for _ in range(rounds)]
    plain, referee = map(min, zip(*turns, strict=True))
    peak = bench.peak_resident(device)
    row = [f"{length:,}", f"{plain:.1f}", f"{referee:.1f}", f"{referee / plain:.3f}"]
    row.append(bench.shown(None if peak is None else peak / 2**30, ".2f"))
    if protocols == "skip":
        return [*row, "", "", ""]
    lengths = [length * step // STEPS for step in range(1, STEPS + 1)]
    if protocols == "run":
        tokens = document.shape[1]

        def read(windows: tuple[Window, ...]) -> float:
            return bench.seconds_of(lambda: [window.losses(model, document) for window in windows], device)

        stride = read(truncation_windows(tokens - 1, window=length, stride=STRIDE))
        sweep = sum(read(yarn_windows(tokens, length=size)) for size in lengths)
        return [*row, f"{stride / referee:.0f}x", f"{sweep / referee:.0f}x", "measured"]
    # What follows a window of the longest length: the rest of a document of twice that, 256 tokens at a time.
    passes = {size: 1 + -(-(2 * length - size) // STRIDE) for size in lengths}
    each = {size: plain if size == length else bench.seconds_of(partial(bare, size - 1), device) for size in lengths}
    sweep = sum(passes[size] * each[size] for size in lengths)
    return [*row, f"{passes[length] * plain / referee:.0f}x", f"{sweep / referee:.0f}x", "computed"]


def main(
    lengths: bench.Lengths = "16384",
    dtype: bench.Dtype = "bf16",
    layers: bench.Layers = 30,
    rounds: Annotated[int, typer.Option(help="timed rounds; the fastest counts", min=1)] = 1,
    protocols: Annotated[
        Protocols, typer.Option(help="compute what they take from single passes, run them, or skip")
    ] = "compute",
    device: bench.Device = bench.DEVICE,
    markdown: bench.Markdown = None,
) -> None:
    """Measure what the referee costs."""
    sizes = [int(length) for length in bench.listed(lengths)]
    if min(sizes) <= STEPS * STRIDE:
        why = f"must be above {STEPS * STRIDE}, so that every window of the sweep exceeds its stride"
        raise typer.BadParameter(why, param_hint="--lengths")

    def rows(say: bench.Say) -> Iterator[bench.Row]:
        for length in sizes:
            say(f"{length:,} tokens")
            yield bench.in_fresh_process(measure, length, dtype, device, layers, rounds, protocols)

    title = f"SmolLM2-135M's shape, random weights, {layers} layers, {dtype}; {bench.machine(device)}"
    bench.report(title, COLUMNS, rows, markdown)


if __name__ == "__main__":
    typer.run(main)
