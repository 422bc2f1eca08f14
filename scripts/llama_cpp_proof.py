"""Run a real llama.cpp as ``ctxext export`` says, for every method, and compare it with the patched model.

Tiny random float32 models that were made for 64 tokens are extended by 4. For each shape and method the three ways
that ``export`` knows are gone exactly as it prints them: converting the extended checkpoint, flags for a GGUF file of
the original one, and a copy of that file which ``--gguf`` writes. Log-probabilities after 150 tokens are compared with
those of the patched model. ``make llama-cpp`` gets the converter and a llama.cpp, and runs this with its tests:

    python -m scripts.llama_cpp_proof .venv/llama_cpp_python-0.3.36/vendor/llama.cpp

A way that ``export`` calls exact and that is not is an error; so is one that it refuses without saying why.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import PreTrainedModel

from ctxext.checkpoints.export import export
from ctxext.checkpoints.gguf_file import GGUFFile
from ctxext.methods import Method
from ctxext.runtimes.base import Export
from scripts import proof
from scripts.llama_cpp_table import VERSION, Converter, expected, served
from scripts.proof import Proof

SHAPES = ("llama", "qwen2", "qwen3", "phi3", "gemma", "bloom")
RESULTS = Path(__file__).parents[1] / "docs/evidence/runtimes/llama-cpp.json"


class Bench(proof.Bench):
    """One shape as llama.cpp runs it, with the GGUF file of its original; log-probabilities are of the next token."""

    to, ways = "llama.cpp", ("extended", "original", "file")

    def __init__(self, shape: str, folder: Path, converter: Converter) -> None:
        super().__init__(shape, folder)
        self.converter = converter
        self.original = self.converted(folder / "plain")

    def converted(self, checkpoint: Path) -> Path:
        """Run llama.cpp's converter on a checkpoint."""
        return self.converter.convert(checkpoint, self.converter.of(self.plain))[0]

    def reach(self, method: Method, model: PreTrainedModel, way: str) -> tuple[Export, Path]:
        """Do what ``export`` says for one way, and return it with the file that its flags are for."""
        if way == "file":
            out = self.folder / "out.gguf"
            out.unlink(missing_ok=True)
            return export(model, to=self.to, gguf=(self.original, out)), out
        made, place = super().reach(method, model, way)
        return made, self.original if way == "original" or made.in_file else self.converted(place)

    def served(self, place: Path, flags: tuple[str, ...]) -> torch.Tensor:
        """Return log-probabilities of the next token."""
        return served(*_overridden(place, flags), self.tokens)

    def expected(self, model: PreTrainedModel) -> torch.Tensor:
        """Return the same from transformers."""
        return expected(model, self.tokens)

    def prove(self, name: str, method: Method) -> list[Proof]:
        """Go every way of one method; one refusal stands for all where all are alike."""
        proofs = super().prove(name, method)
        alike = len({proof.said for proof in proofs}) == 1 and all(proof.exact is None for proof in proofs)
        return [replace(proofs[0], way="any")] if alike else proofs


def _overridden(file: Path, flags: tuple[str, ...]) -> tuple[Path, tuple[str, ...]]:
    """What --override-kv does, done to a copy of the file: the wheel has no such setting."""
    told = dict(zip(flags[::2], flags[1::2], strict=True))
    pairs = (item.split("=", 1) for item in told.pop("--override-kv", "").split(",") if item)
    kinds = {"int": int, "float": float}
    keys = {key: kinds[typed.partition(":")[0]](typed.partition(":")[2]) for key, typed in pairs}
    if keys:
        out = file.with_name("overridden.gguf")
        out.unlink(missing_ok=True)
        GGUFFile(file).copy(out, keys=keys, drop=lambda key: False)
        file = out
    return file, tuple(part for pair in told.items() for part in pair)


def main(
    tree: Annotated[Path, typer.Argument(help="llama.cpp, as vendored by llama_cpp_python.")],
    out: proof.Out = RESULTS,
    shapes: proof.Shapes = "",
    only: proof.Only = "",
) -> None:
    """Measure everything that is missing."""
    versions = {"converter": f"llama_cpp_python {VERSION}", "ran": f"xllamacpp {metadata.version('xllamacpp')}"}
    bench = partial(Bench, converter=Converter(tree.resolve()))
    proof.measure(bench, out, shapes=shapes or ",".join(SHAPES), only=only, **versions)


if __name__ == "__main__":
    typer.run(main)
