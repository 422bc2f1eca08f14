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

import torch
import typer
from transformers.utils import logging

from scripts import mlx_lm_table, proof

SHAPES = ("llama", "qwen3", "phi3", "gemma", "mixtral")
RESULTS = Path(__file__).parents[1] / "docs/evidence/runtimes/mlx-lm.json"


class Bench(proof.Bench):
    """One shape as mlx-lm runs it."""

    to, ways = "mlx-lm", ("extended",)

    def served(self, place: Path, flags: tuple[str, ...]) -> torch.Tensor:
        """Return log-probabilities of all tokens but the first."""
        assert not flags, "it has none"
        return mlx_lm_table.served(place, self.tokens)


def main(out: proof.Out = RESULTS, shapes: proof.Shapes = "", only: proof.Only = "") -> None:
    """Measure everything that is missing."""
    logging.disable_progress_bar()
    ran = f"mlx-lm {metadata.version('mlx-lm')} and mlx {metadata.version('mlx')}"
    proof.measure(Bench, out, shapes=shapes or ",".join(SHAPES), only=only, ran=ran)


if __name__ == "__main__":
    typer.run(main)
