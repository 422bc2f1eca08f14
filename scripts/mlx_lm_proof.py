"""Run a real mlx-lm on what ``ctxext.save`` writes, for every method, and compare it with the patched model.

Tiny random float32 models that were made for 64 tokens are extended by 4 and read 150 tokens by mlx-lm, whose
log-probabilities are compared with those of the patched model. ``make mlx-lm`` gets an mlx-lm for CPUs, and runs this
with its tests:

    python -m scripts.mlx_lm_proof

What ``export`` calls exact and is not is an error.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers.utils import logging

from scripts import mlx_lm_table
from scripts.proof import measure

SHAPES = ("llama", "qwen3", "phi3", "gemma", "mixtral")
RESULTS = Path(__file__).parents[1] / "docs/results/runtimes/mlx-lm.json"


def served(checkpoint: Path, flags: tuple[str, ...], tokens: list[int]) -> torch.Tensor:
    """Log-probabilities of all tokens but the first, by mlx-lm."""
    assert not flags, "it has none"
    return mlx_lm_table.served(checkpoint, tokens)


def main(
    out: Annotated[Path, typer.Option(help="The JSON file to write; what it holds already is not measured again.")] = (
        RESULTS
    ),
    shapes: Annotated[str, typer.Option(help="Model types, separated by commas.")] = ",".join(SHAPES),
    only: Annotated[str, typer.Option(help="Methods, separated by commas.")] = "",
) -> None:
    """Measure everything that is missing."""
    logging.disable_progress_bar()
    ran = f"mlx-lm {metadata.version('mlx-lm')} and mlx {metadata.version('mlx')}"
    measure("mlx-lm", served, out, ways=("extended",), shapes=shapes.split(","), only=only, ran=ran)


if __name__ == "__main__":
    typer.run(main)
