"""Run a real vLLM as ``ctxext export`` says, for every method, and compare it with the patched model.

Tiny random float32 models that were made for 64 tokens are extended by 4 and served in the two ways that ``export``
knows, with the flags that it prints, read by vLLM's own parser: the extended checkpoint, and the original one with
overrides. The log-probabilities of 150 tokens are compared with those of the patched model. It runs in an environment
that vLLM shares with ctxext; ``make vllm`` makes one on a CPU, and runs this with its tests:

    .venv/vllm/bin/python -m scripts.vllm_proof

A way that ``export`` calls exact and that is not is an error.
"""

from __future__ import annotations

import gc
import os
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import typer

from scripts import proof

SHAPES = ("llama", "qwen3", "phi3", "gemma", "bloom")
RESULTS = Path(__file__).parents[1] / "docs/evidence/runtimes/vllm.json"
# Told to vLLM before it is imported: one process, little memory for caches, nothing fetched.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}


class Bench(proof.Bench):
    """One shape as vLLM serves it."""

    to = "vllm"

    def served(self, place: Path, flags: tuple[str, ...]) -> torch.Tensor:
        """Return log-probabilities of all tokens but the first."""
        from vllm import LLM, SamplingParams
        from vllm.distributed import cleanup_dist_env_and_memory

        asked: dict[str, Any] = {"max_model_len": proof.TARGET} | parsed(flags)
        engine = LLM(model=str(place), skip_tokenizer_init=True, dtype="float32", enforce_eager=True, **asked)
        sampling = SamplingParams(max_tokens=1, prompt_logprobs=1, detokenize=False, temperature=0)
        try:
            [answer] = engine.generate({"prompt_token_ids": self.tokens}, sampling, use_tqdm=False)
        finally:
            del engine
            gc.collect()
            cleanup_dist_env_and_memory()
        pairs = zip(answer.prompt_logprobs[1:], self.tokens[1:], strict=True)
        return torch.tensor([choices[token].logprob for choices, token in pairs])


def parsed(flags: tuple[str, ...]) -> dict[str, Any]:
    """Return what ``vllm serve`` understands by flags, as arguments of its ``LLM``."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    read = vars(parser.parse_args([*flags]))
    return {name: read[name] for name in (flag.removeprefix("--").replace("-", "_") for flag in flags[::2])}


def main(out: proof.Out = RESULTS, shapes: proof.Shapes = "", only: proof.Only = "") -> None:
    """Measure everything that is missing."""
    os.environ.update(ENVIRONMENT)
    proof.measure(
        Bench, out, shapes=shapes or ",".join(SHAPES), only=only, ran=f"vllm-cpu {metadata.version('vllm-cpu')}"
    )


if __name__ == "__main__":
    typer.run(main)
