"""Find out what llama.cpp does with every rotary model type: convert tiny checkpoints and run them.

For each causal language model type of the installed transformers and each rope type that a config may say: a tiny
random model is extended, saved, converted by llama.cpp's own converter and run by a real llama.cpp with the flags of
``ctxext export``, once from the GGUF of the extended checkpoint and once from that of the original one. Then some
frequencies and a scale are written into a copy of the latter, as ``ctxext export --gguf`` does, and it is run without
flags. Log-probabilities beyond the trained window are compared with those of the patched model. What comes out is
``ctxext/runtimes/llama_cpp.json``, which ``export`` reads; nothing in it is written by hand.

    pip download --no-deps --no-binary :all: llama_cpp_python==0.3.36    # and unpack it: the converter
    pip install xllamacpp==2026.10.11549                                 # a llama.cpp for CPUs
    python -m scripts.llama_cpp_table llama_cpp_python-0.3.36/vendor/llama.cpp

A type that aborts the process, as llama.cpp does on what it does not support, is recorded as such.
"""

from __future__ import annotations

import importlib
import inspect
import json
import logging
import math
import os
import pkgutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "critical")

import torch
import transformers
import typer
from transformers import PreTrainedModel

from ctxext.checkpoints.export import read_extended
from ctxext.checkpoints.into_gguf import write_into_gguf
from ctxext.errors import CheckpointError, CtxextError
from ctxext.runtimes.llama_cpp import TABLE, attention_factor, flags_of
from scripts.proof import TARGET, distance, patched_as, some_tokens, tiny_of, write_table
from tests.walk.tiny import VOCABULARY, model_types

VERSION = "0.3.36"  # of llama_cpp_python, whose tree the converter is from
# Numbers that are not the defaults of llama.cpp, so that a parameter that is not read shows.
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "default": ("ntk", {}),
    "linear": ("pi", {}),
    "yarn": ("yarn", {"beta_fast": 16.0, "beta_slow": 2.0}),
    "yarn_attention": ("yarn", {"attention_factor": 1.3}),
    "llama3": ("llama3", {}),
    "longrope": ("longrope", {}),
}

# What the converter raises on a config that it does not know.
REFUSALS = (KeyError, ValueError, TypeError, AttributeError, AssertionError, NotImplementedError, IndexError, OSError)

logging.disable(logging.CRITICAL)
app = typer.Typer(add_completion=False)


class Converter:
    """llama.cpp's converter, imported from its tree, without the tokenizer that a tiny checkpoint has not."""

    def __init__(self, tree: Path) -> None:
        sys.path[:0] = [str(tree), str(tree / "gguf-py")]
        self.tree = tree
        for name in [name for name in sys.modules if name.partition(".")[0] == "gguf"]:
            del sys.modules[name]  # an installed one may be older than the converter
        self.gguf = importlib.import_module("gguf")
        package = importlib.import_module("conversion")
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"conversion.{module.name}")
        self.base = importlib.import_module("conversion.base")
        self.classes = self.base.ModelBase._model_classes[self.base.ModelType.TEXT]
        for kind in self.classes.values():
            kind.set_vocab = _no_vocabulary

    def of(self, model: PreTrainedModel) -> Any:
        """The class that converts a model's architecture; None without one."""
        return self.classes.get((model.config.architectures or [type(model).__name__])[0])

    def convert(
        self, directory: Path, kind: Any, attention_factor: float | None = None
    ) -> tuple[Path, dict[str, Any], list[str]]:
        """Write the GGUF; return its path, what its metadata say about positions, and its tensors of factors.

        An ``attention_factor`` is put into the metadata, where llama.cpp's --override-kv would put it.
        """
        out = directory / "model.gguf"
        vocabulary = {"model": {"vocab": {str(index): index for index in range(VOCABULARY)}}, "added_tokens": []}
        (directory / "tokenizer.json").write_text(json.dumps(vocabulary))  # Gemma's counts it
        hparams = self.base.ModelBase.load_hparams(directory, False)
        made = kind(directory, self.gguf.LlamaFileType.ALL_F32, out, hparams=hparams)
        if attention_factor is not None:
            made.gguf_writer.add_rope_scaling_attn_factors(attention_factor)
        made.write()
        reader = self.gguf.GGUFReader(out)
        keys = {name: field.contents() for name, field in reader.fields.items() if ".rope." in name}
        keys |= {n: f.contents() for n, f in reader.fields.items() if n.endswith((".context_length", ".architecture"))}
        tensors = sorted({t.name.split(".", 2)[-1] if "blk" in t.name else t.name for t in reader.tensors})
        return out, keys, [name for name in tensors if name.startswith("rope_f")]


def _no_vocabulary(self: Any) -> None:
    count = self.hparams["vocab_size"]
    tokens = ["<s>", "</s>", "a", "b", "ab", *(f"t{index}" for index in range(5, count))]
    writer = self.gguf_writer
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (count - 2))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)


def served(path: Path, flags: tuple[str, ...], tokens: list[int]) -> torch.Tensor:
    """Log-probabilities of the next token from a real llama.cpp, [vocabulary]."""
    return next_token(server(path, flags), tokens, VOCABULARY)


def server(path: Path, flags: tuple[str, ...], threads: int = 1) -> Any:
    """A real llama.cpp that has loaded a file."""
    import xllamacpp

    said = xllamacpp.CommonParams()
    said.model.path, said.n_gpu_layers, said.n_parallel, said.warmup = str(path), 0, 1, False
    said.cpuparams.n_threads = said.cpuparams_batch.n_threads = threads
    said.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    said.cache_type_k = said.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    for flag, value in zip(flags[::2], flags[1::2], strict=True):
        match flag:
            case "-c":
                said.n_ctx = int(value)
            case "--rope-scaling":
                kinds = xllamacpp.llama_rope_scaling_type
                said.rope_scaling_type = getattr(kinds, f"LLAMA_ROPE_SCALING_TYPE_{value.upper()}")
            case "--rope-scale":
                said.rope_freq_scale = 1 / float(value)
            case "--yarn-orig-ctx":
                said.yarn_orig_ctx = int(value)
            case "--rope-freq-base" | "--yarn-beta-fast" | "--yarn-beta-slow" | "--yarn-ext-factor":
                setattr(said, flag.removeprefix("--").replace("-", "_"), float(value))
            case "--flash-attn" if value == "off":
                pass  # as above
            case _:
                raise ValueError(f"This script knows no flag {flag}.")
    return xllamacpp.Server(said)


def next_token(server: Any, tokens: list[int], vocabulary: int, *, cached: bool = False) -> torch.Tensor:
    """Log-probabilities of the token after some, [vocabulary]; ``cached`` keeps what an earlier call began with."""
    request = {"prompt": tokens, "n_predict": 1, "n_probs": vocabulary, "temperature": 0.0, "cache_prompt": cached}
    answer = server.handle_completions(request | {"samplers": []})
    answer = json.loads(answer) if isinstance(answer, str | bytes) else answer
    if "error" in answer:
        raise RuntimeError(str(answer["error"])[:200])
    found = answer.get("completion_probabilities") or answer["choices"][0]["logprobs"]["content"]
    logs = torch.full((vocabulary,), math.nan)
    for entry in found[0]["top_logprobs"]:
        logs[entry["id"]] = entry["logprob"]
    return logs


@torch.no_grad()
def expected(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """The same from transformers."""
    logits: torch.Tensor = model(torch.tensor([tokens])).logits[0, -1]
    return logits.float().log_softmax(-1)


def _line(model_type: str, converter: Converter) -> dict[str, Any]:
    """Everything about one type."""
    plain = tiny_of(model_type, TARGET)
    kind = converter.of(plain)
    if kind is None:
        return {"converter": None}
    source, number = Path(inspect.getsourcefile(kind) or ""), inspect.getsourcelines(kind)[1]
    line: dict[str, Any] = {"converter": f"{source.relative_to(converter.tree)}:{number} {kind.__name__}"}
    tokens = some_tokens()
    with tempfile.TemporaryDirectory() as where:
        plain.save_pretrained(where)
        try:
            original, keys, _ = converter.convert(Path(where), kind)
        except REFUSALS as error:
            return line | {"fails": _said(error)}
        arch = keys["general.architecture"]
        line |= {"architecture": arch, "plain": _short(keys, arch)}
        try:
            line["noise"] = distance(served(original, ("-c", str(TARGET)), tokens), expected(plain, tokens))
        except RuntimeError as error:
            line["not_run"] = str(error)
        line["written"] = _written(model_type, original, plain, tokens, arch)
        line["forms"] = {form: _form(model_type, form, converter, kind, original, tokens, plain) for form in FORMS}
    return line


def _said(error: Exception) -> str:
    """What a converter says, without the paths of this machine."""
    said = Path(str(error.filename)).name if isinstance(error, OSError) else str(error)
    return f"{type(error).__name__}: {said}"[:150]


def _short(keys: dict[str, Any], arch: str) -> dict[str, Any]:
    return {name.removeprefix(f"{arch}."): value for name, value in keys.items() if name != "general.architecture"}


def _form(
    model_type: str,
    form: str,
    converter: Converter,
    kind: Any,
    original: Path,
    tokens: list[int],
    plain: PreTrainedModel,
) -> dict[str, Any]:
    try:
        model = patched_as(model_type, FORMS[form])
    except CtxextError as error:
        return {"refused": str(error)[:150]}
    extended = read_extended(model.config)
    if extended.rope_type != form.partition("_")[0]:
        return {"refused": f"stored as {extended.rope_type}"}
    flags, wanted = flags_of(extended), expected(model, tokens)
    found: dict[str, Any] = {"matters": distance(wanted, expected(plain, tokens))}
    override = attention_factor(extended) if form == "yarn_attention" else None
    with tempfile.TemporaryDirectory() as where, tempfile.TemporaryDirectory() as source:
        model.save_pretrained(where)
        try:
            path, keys, tensors = converter.convert(Path(where), kind, override)
            if override is not None:
                plain.save_pretrained(source)
                original = converter.convert(Path(source), kind, override)[0]
        except REFUSALS as error:
            return found | {"fails": _said(error)}
        found |= {"gguf": _short(keys, keys["general.architecture"]), "tensors": tensors}
        for name, file in (("extended", path), ("original", original)):
            try:
                found[name] = distance(served(file, (*flags, "-c", str(TARGET)), tokens), wanted)
            except RuntimeError as error:
                found[name] = str(error)
    return found


def _written(
    model_type: str, original: Path, plain: PreTrainedModel, tokens: list[int], architecture: str
) -> dict[str, Any]:
    """How far a llama.cpp is from the patched model that finds the extension in the file."""
    try:
        model = patched_as(model_type, FORMS["longrope"])
        extended = read_extended(model.config)
    except CtxextError as error:
        return {"error": str(error)[:150]}
    if extended.layer_type is not None or extended.rope_type != "longrope":
        return {"error": "not all layers have the same frequencies"}
    wanted = expected(model, tokens)
    found: dict[str, Any] = {"matters": distance(wanted, expected(plain, tokens))}
    out = original.with_name("written.gguf")
    try:
        write_into_gguf(extended, plain.config, original, out, architecture=architecture)
        return found | {"error": distance(served(out, ("-c", str(TARGET)), tokens), wanted)}
    except (CheckpointError, RuntimeError) as error:
        return found | {"error": str(error).replace(f"{original.parent}/", "")[:150]}


@app.command()
def main(
    tree: Annotated[Path, typer.Argument(help="llama.cpp, as vendored by llama_cpp_python.")],
    only: Annotated[str, typer.Option(help="Types, separated by commas.")] = "",
    worker: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Write the table anew."""
    wanted = only.split(",") if only else model_types()
    tree = tree.resolve()
    if worker:
        converter = Converter(tree)
        for name in wanted:
            print("\n@" + json.dumps([name, _line(name, converter)]), flush=True)
        return
    lines: dict[str, Any] = {}
    kept = json.loads(TABLE.read_text())["types"] if only else {}
    while rest := [name for name in wanted if name not in lines]:
        command = [sys.executable, "-m", "scripts.llama_cpp_table", str(tree), "--worker", "--only", ",".join(rest)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        lines |= dict(json.loads(line[1:]) for line in done.stdout.splitlines() if line.startswith("@"))
        if done.returncode and (missing := [name for name in rest if name not in lines]):
            said = done.stderr.strip().splitlines()
            reason = said[-1][:150] if said and done.returncode > 0 else "llama.cpp aborts on a tiny model"
            lines[missing[0]] = {"aborts": reason}
            print(f"{missing[0]}: {lines[missing[0]]}", file=sys.stderr)
    commit = subprocess.run(["git", "-C", str(tree), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    versions = {
        "converter": f"llama_cpp_python {VERSION} (llama.cpp {commit.stdout.strip()[:9]})",
        "ran": f"xllamacpp {metadata.version('xllamacpp')}",
        "transformers": transformers.__version__,
    }
    write_table(TABLE, versions, kept | lines)


if __name__ == "__main__":
    app()
