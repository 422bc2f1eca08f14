"""Run a real llama.cpp as ``ctxext export`` says, for every method, and compare it with the patched model.

Tiny random float32 models that were made for 64 tokens are extended by 4. For each shape and method the three ways
that ``export`` knows are gone exactly as it prints them: converting the extended checkpoint, flags for a GGUF file of
the original one, and a copy of that file which ``--gguf`` writes. Log-probabilities after 150 tokens are compared with
those of the patched model. ``make llama-cpp`` gets the converter and a llama.cpp, and runs this with its tests:

    python -m scripts.llama_cpp_proof .venv/llama_cpp_python-0.3.36/vendor/llama.cpp

A way that ``export`` calls exact and that is not is an error; so is one that it refuses without saying why.
"""

from __future__ import annotations

import json
import platform
import re
import tempfile
from dataclasses import asdict, dataclass, field, replace
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
from ctxext.checkpoints.gguf_file import GGUFFile
from ctxext.errors import IncompatibleError
from ctxext.methods import Method
from ctxext.runtimes.base import Export
from scripts.llama_cpp_table import VERSION, Converter, expected, served
from scripts.proof import FACTOR, Proof, distance, methods_for, some_tokens, tiny_of
from tests.walk.tiny import TRAINED_LENGTH

SHAPES = ("llama", "qwen2", "qwen3", "phi3", "gemma", "bloom")
RESULTS = Path(__file__).parents[1] / "docs/results/runtimes/llama-cpp.json"
WAYS = ("extended", "original", "file")


@dataclass
class Bench:
    """A tiny model of one shape, and its GGUF file."""

    shape: str
    converter: Converter
    folder: Path
    plain: PreTrainedModel = field(init=False)
    original: Path = field(init=False)
    tokens: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.plain = tiny_of(self.shape)
        self.plain.save_pretrained(self.folder / "plain")
        self.original = self.converted(self.folder / "plain")
        self.tokens = some_tokens()

    def converted(self, checkpoint: Path) -> Path:
        """Run llama.cpp's converter on a checkpoint."""
        return self.converter.convert(checkpoint, self.converter.of(self.plain))[0]

    def reach(self, method: Method, model: PreTrainedModel, way: str) -> tuple[Export, Path]:
        """Do what ``export`` says for one way: its flags, and the file that they are for."""
        if way == "original":
            made = export(self.folder / "plain", to="llama.cpp", method=method, trained_length=TRAINED_LENGTH)
            return made, self.original
        if way == "file":
            out = self.folder / "out.gguf"
            out.unlink(missing_ok=True)
            return export(model, to="llama.cpp", gguf=(self.original, out)), out
        long = self.folder / "long"
        ctxext.save(model, long)
        made = export(long, to="llama.cpp")
        return made, self.original if made.in_file else self.converted(long)


@torch.no_grad()
def prove(bench: Bench, name: str, method: Method, ways: tuple[str, ...] = WAYS) -> list[Proof]:
    """Go every way of one method, as far as ``export`` lets one."""
    model = ctxext.patch(tiny_of(bench.shape), method, trained_length=TRAINED_LENGTH)
    wanted = expected(model, bench.tokens)
    other = ctxext.patch(tiny_of(bench.shape), "pi", factor=FACTOR) if bench.shape == "bloom" else bench.plain
    matters, found = distance(wanted, expected(other, bench.tokens)), []
    for way in ways:
        what: dict[str, Any] = {"shape": bench.shape, "method": name, "way": way}
        try:
            made, file = bench.reach(method, model, way)
        except IncompatibleError as error:
            found.append(Proof(**what, exact=None, said=str(error)))
            continue
        if made.in_file and way != "file":
            found.append(Proof(**what, exact=None, said=made.notes[0]))
            continue
        error = distance(served(*_overridden(file, made.flags), bench.tokens), wanted)
        said = " ".join(made.notes)
        found.append(Proof(**what, exact=made.exact, said=said, error=error, matters=matters))
    refused = {proof.said for proof in found if proof.exact is None}
    return [replace(found[0], way="any")] if len(found) > 1 == len(refused) and _none_ran(found) else found


def _none_ran(proofs: list[Proof]) -> bool:
    return all(proof.exact is None for proof in proofs)


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


def _short(said: str) -> str:
    return re.sub(r"\s+", " ", said).split(". ")[0][:200]


def main(
    tree: Annotated[Path, typer.Argument(help="llama.cpp, as vendored by llama_cpp_python.")],
    out: Annotated[Path, typer.Option(help="The JSON file to write.")] = RESULTS,
    shapes: Annotated[str, typer.Option(help="Model types, separated by commas.")] = ",".join(SHAPES),
) -> None:
    """Measure everything anew."""
    converter, found = Converter(tree.resolve()), []
    for shape in shapes.split(","):
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(shape, converter, Path(folder))
            for name, method in methods_for(shape).items():
                for proof in prove(bench, name, method):
                    print(shape, name, proof.way, proof.exact, proof.error, proof.matters, _short(proof.said))
                    found.append(proof)
    versions = {
        "converter": f"llama_cpp_python {VERSION}",
        "ran": f"xllamacpp {metadata.version('xllamacpp')}",
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "date": date.today().isoformat(),
        "machine": platform.machine(),
    }
    proofs = [asdict(proof) | {"said": _short(proof.said)} for proof in found]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"versions": versions, "proofs": proofs}, indent=1) + "\n")
    wrong = [proof for proof in found if proof.exact and not proof.right]
    if wrong:
        raise SystemExit("\n".join(["Called exact and not:", *map(str, wrong)]))


if __name__ == "__main__":
    typer.run(main)
