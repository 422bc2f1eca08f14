"""Help, completions, and mistakes that are cheap to see are told before torch is imported or a checkpoint is loaded."""

from __future__ import annotations

import json
import os
import shlex
import socket
from pathlib import Path
from typing import Any, get_args

import pytest
from huggingface_hub import constants
from typer.main import get_command

import ctxext
from ctxext.cli.app import app
from ctxext.cli.eval.ruler import TASKS as RULER
from ctxext.cli.lab import BASELINES, TASKS
from ctxext.cli.options import Dtype
from ctxext.errors import NAMED_ELSEWHERE, CheckpointError, InvalidParameterError, UnknownNameError
from ctxext.evaluation.ruler.tasks import TASKS as RULER_MADE
from ctxext.files import refuse_read_only
from ctxext.laboratory.subjects import subjects
from ctxext.laboratory.tasks import TASKS as PUZZLES
from ctxext.measuring import checkpoint
from ctxext.measuring.checkpoint import DTYPES, load_checkpoint
from ctxext.methods import METHODS, known_methods
from ctxext.mistakes import DEVICES, refuse_mistakes, refuse_no_checkpoint, refuse_unknown_method
from ctxext.registry import method_names
from ctxext.texts.documents import require_sources
from ctxext.training.checkpoints import COMPLETE
from recipes import finetune
from tests._programs import ROOT, ran

HEAVY = ["torch", "transformers", "safetensors", "peft", "matplotlib"]
# Runs programs one after the other in one process, and tells after each which heavy packages are there by now.
PROGRAM = """
import contextlib, io, json, runpy, sys
from typer.testing import CliRunner
sys.argv = ["ctxext"]
from ctxext.cli.app import app

def recipe(words, environment):
    sys.argv = ["recipes/finetune.py", *words]
    try:
        runpy.run_path(RECIPE, run_name="__main__")
    except SystemExit as ended:
        return 1, ended.code

def command(words, environment):
    done = CliRunner().invoke(app, words, env={"COLUMNS": "400"} | environment, prog_name="ctxext")
    return done.exit_code, done.output

RECIPE, heavy, lines = json.load(sys.stdin)
answers = []
for program, words, environment in lines:
    code, output = vars()[program](words, environment)
    answers.append([code, output, sorted({*heavy} & sys.modules.keys())])
print(json.dumps(answers))
"""
# Command lines that are right, and a word of what is said.
RIGHT = {"--help": "inspect", "-h": "inspect", "patch -h": "--trained-length", "eval perplexity --help": "--text"}
RIGHT |= {"--version": ctxext.__version__, "methods": "self_extend, to extend without training", "lab methods": "cope"}
RIGHT |= {"methods --json": '"method": "yarn"', "methods --markdown": "| `yarn` | rotary |"}
COMPLETIONS = {"ctxext ins": "inspect", "ctxext patch SRC DST -m ya": "yarn", "ctxext patch --meth": "--method"}
NO_WEIGHTS, NO_GGUF = "bare has its weights in a GGUF file", "broken.gguf cannot be read as GGUF: "
# The recipe's words, of a config that is right without them.
OF_THE_RECIPE = {
    "--data.train ./no.txt": "Cannot read the text './no.txt'",
    "--evaluation.text ./no.txt": "Cannot read the text './no.txt'",
    "--evaluation.text ./text.txt": "text.txt is trained on: data.train names",
    "--method yran": "Did you mean 'yarn'?",
    "--method 'yarn ramp=turns'": "where parameters are apart: give yarn, and extension.parameters.ramp.",
    "--extension.parameters.rampe turns": "Unknown yarn parameter 'rampe'. Did you mean 'ramp'?",
    "--checkpoint /no/where": "There is no checkpoint at /no/where",
    "--checkpoint bare": NO_WEIGHTS,
    "--data.trian text.txt": "Did you mean 'data.train'?",
    "--dtype fp33": "found 'fp33'",
    "--output text.txt/out": "text.txt is a file and no directory",
    "--data.train bare --output bare/run": "bare/run lies in bare, whose files are read: the next run would read",
}
YARN = "-m yarn -f 2"
OUTPUT = "give a file that ends in"
MISSING = "Cannot read the text './no.txt'"
# What typer itself says and does to a path, which its oldest version does otherwise.
NEW_TYPER = hasattr(get_command(app).params[0], "type_descriptor")
TOO_SMALL = "Input should be greater than or equal to 1" if NEW_TYPER else "0 is not in the range x>=1"
MISSING_PATH = "Cannot read the text 'no.txt'" if NEW_TYPER else MISSING
GOOD: dict[str, Any] = {"output": "out", "extension": {"method": "yarn", "factor": 2}}
GOOD |= {"data": {"train": ["text.txt"], "length": 32}, "training": {"steps": 1, "learning_rate": 1e-4}}
WITHOUT_A_FACTOR = {"patch HERE out": "yarn", "patch HERE another": "dynamic_ntk", "serve HERE": "pi"}
WITHOUT_A_FACTOR |= {"export HERE --to vllm": "self_extend", "check HERE --url http://127.0.0.1:1": "stretch"}
WITHOUT_A_FACTOR |= {"eval perplexity HERE": "llama3"}
HOW_FAR = "needs to know how far to reach. Give factor (--factor), which is target_length / trained_length, or "
HOW_FAR += "target_length (--target)"
# The command line, in which HERE is a checkpoint, and what is said of it.
MISTAKES = {
    "insepct": "inspect",
    "patch HERE out -m yran -f 2": "Did you mean 'yarn'?",
    f"patch HERE out {YARN} -p betafast=1": "Unknown yarn parameter 'betafast'. Did you mean 'beta_fast'?",
    f"patch HERE out {YARN} -p beta_fast": "--param must be KEY=VALUE",
    f"patch HERE out {YARN} -p beta_fast=1 -p beta_fast=2": "beta_fast is given twice, as 1 and as 2",
    "patch HERE out -m longrope -f 2 -p short_factor=@no.json": "there is no file no.json",
    f"patch HERE out {YARN} -p trained_length=4": "give it as --trained-length",
    **{
        f"{command} -m 'yarn ramp=turns beta_fast=4' -f 2": "is not a method here, where parameters are apart: give "
        "yarn, and --param ramp=..., --param beta_fast=..."
        for command in ("patch HERE out", "serve HERE", "ask HERE -t text.txt -q x", "export HERE --to vllm")
    },
    **{f"{command} -m {method}": f"Method '{method}' {HOW_FAR}" for command, method in WITHOUT_A_FACTOR.items()},
    "patch HERE out": "--method",
    "patch HERE out -m yarn -f abc": "--factor",
    f"export HERE --to vllm {YARN} --sliding-window open": "'open' is not one of",
    "patch HERE out -m no.json": "Cannot read the method in 'no.json': no such file",
    "export HERE --to vllm -m ./no.json": "Cannot read the method in './no.json': no such file",
    "serve HERE -m HERE/choice.json": "Cannot read the method in 'HERE/choice.json': no such file",
    "eval compare HERE -m yarn -m no.json": "Cannot read the method in 'no.json': no such file",
    "choose HERE --target 4096 --budget '1 pass'": "The budget is too small: it comes to 1.0 passes",
    "choose HERE --target 4096 --budget '3.9 passes'": "Any choice takes more than 4",
    "patch HERE out -m yarn -f 0.5": "factor must be a finite number, at least 1, found 0.5",
    f"patch /no/where out {YARN}": "There is no checkpoint at /no/where",
    f"patch HERE HERE {YARN}": "already exists and is never overwritten",
    f"patch HERE /no/where/out {YARN}": "there is no directory /no/where",
    f"patch HERE HERE/config.json/out {YARN}": "there is no directory HERE/config.json",
    "patch HERE out -m yarn --target big": "'big' is no number of tokens",
    "inspect /no/where": "There is no checkpoint at /no/where",
    "inspect .": "has no config.json (found: ",
    f"serve . {YARN}": "has no config.json (found: ",
    "inspect no.gguf": "There is no file no.gguf",
    "patch bare out -m yarn -f 2": NO_WEIGHTS,
    "patch bare/broken.gguf out -m yarn -f 2": NO_GGUF,
    "export bare/whole.gguf --to vllm -m yarn -f 2": "is a GGUF file. Give the checkpoint that it was converted from",
    "ask HERE -t bare/empty.txt -q x": "2 tokens are needed, and the longest of 1 has 0 bytes",
    "eval perplexity HERE -t text.txt -t bare/empty.txt -l 2K": "2,048 tokens are needed, and the longest of 2 has 4",
    "choose HERE -t text.txt --target 4096": "4,096 tokens are needed, and the longest of 1 has 4 bytes",
    "inspect no-such-model": "There is no directory no-such-model here. The hub cannot be asked",
    f"export HERE --to vlm {YARN}": "Unknown export target 'vlm'. Did you mean 'vllm'?",
    "export HERE --to vllm -m yran": "Did you mean 'yarn'?",
    "plan HERE --memory lots": "An amount of memory is written like 2GiB",
    "plan HERE --length 16K --dtype fp33": "'fp33' is not one of",
    "plan HERE --length 16K --quantisation nf5": "'nf5' is not one of 'nf4'",
    "choose HERE --target 4096 --budget small": "A budget is written like 30min",
    "choose HERE --target 4096 -t ./no.txt": MISSING,
    "choose HERE --target 4096 --dtype fp33": "'fp33' is not one of",
    "choose HERE --target 4096 -o out.xls": OUTPUT,
    "choose HERE --target 4096 -o /no/where/out.json": "there is no directory /no/where",
    "choose HERE --target 4096 --save HERE": "already exists and is never overwritten",
    "choose --target 4096 --save out": "--save copies a checkpoint directory",
    "eval perplexity HERE -m yran": "Did you mean 'yarn'?",
    "eval perplexity HERE --dtype fp33": "'fp33' is not one of",
    "eval perplexity HERE --device toaster": "Device 'toaster' cannot be used here",
    "eval perplexity HERE --sliding-window lif": "'lif' is not one of",
    "eval perplexity HERE --reference /no/where": "There is no checkpoint at /no/where",
    "eval perplexity HERE -o loss.svg": OUTPUT,
    "eval perplexity HERE --memory 2": "An amount of memory needs a unit, such as 2GiB",
    "eval compare HERE -m yarn --method yran": "Did you mean 'yarn'?",
    "eval compare HERE -m 'yran ramp=turns'": "Did you mean 'yarn'?",
    "eval compare HERE -m 'yarn rampe=turns'": "Unknown yarn parameter 'rampe'. Did you mean 'ramp'?",
    "eval compare HERE -m 'yarn \"'": "cannot be read: no closing quotation",
    "eval compare HERE -o HERE/config.json/report": "HERE/config.json is a file and no directory",
    "eval compare HERE -t ./no.txt": MISSING,
    "eval passkey HERE -m selfextend": "Did you mean 'self_extend'?",
    "eval passkey HERE -t ./no.txt": MISSING,
    "eval passkey HERE -o nowhere/keys.json": "there is no directory nowhere",
    "eval ruler HERE --task vx": "Unknown RULER task 'vx'",
    "eval masked HERE -t ./no.txt": MISSING,
    "eval masked HERE --dtype fp33": "'fp33' is not one of",
    "eval retrieval HERE --task round": "Unknown retrieval task 'round'. Did you mean 'rounds'?",
    "eval retrieval HERE -l 2048 --base 1024": "Give --length 1024 too",
    "heads HERE -t ./no.txt": MISSING,
    "heads HERE -o x.xls": OUTPUT,
    "heads HERE --split train": "--split: only with --text",
    "eval passkey HERE --column text": "--column: only with --text",
    "eval perplexity HERE --column text --split train": "--split, --column: only with --text",
    "lab run --task tezt": "Unknown task 'tezt'. Did you mean 'text'?",
    "lab run --only rop": "Unknown encoding or baseline 'rop'. Did you mean 'rope'?",
    "lab run --seeds 0": TOO_SMALL,
    "lab run --workers 0": TOO_SMALL,
    "lab run --preset fast": "'fast' is not one of",
    "lab run --text ./no.txt": MISSING,
    "lab run -o HERE/config.json": "HERE/config.json is a file and no directory",
    "show yran": "Did you mean 'yarn'?",
    "show yarn -o x.xls": OUTPUT,
    "show 'fire widht=3'": "Unknown fire parameter 'widht'. Did you mean 'width'?",
    "show yarn --model /no/where": "There is no checkpoint at /no/where",
    "show yarn --text no.txt": "there is no such file",
    "plot frequencies HERE -m yran": "Did you mean 'yarn'?",
    "plot positions -m yran": "Did you mean 'yarn'?",
    "plot frequencies /no/where": "There is no checkpoint at /no/where",
    "serve HERE -m yran": "Did you mean 'yarn'?",
    "serve HERE --cors localhost:3000": "no origin of web pages",
    "serve HERE --dtype fp33": "'fp33' is not one of",
    "serve HERE --device cudda": "Device 'cudda' cannot be used here",
    "check HERE --url http://127.0.0.1:1 --length 31": "31 tokens are too few. Give 32 or more.",
    "serve HERE --continuous-batching --compile": "--compile is for requests one by one. Leave it out, or",
    "serve HERE --continuous-batching --keep-tokens 0": "--keep-tokens is for requests one by one. Leave it out, or",
    "serve HERE --cached-tokens 99": "--cached-tokens is for --continuous-batching. Leave it out, or give both.",
    "serve HERE --api-key ''": "--api-key is empty. Give a key, or leave it out",
    "ask HERE -t bare/whole.gguf -q x --keep kept --compile": "--keep writes a cache that grows, and --compile needs",
    "ask HERE -t bare/whole.gguf -q x --keep kept --select 512": "--keep is for a whole text. Leave --select out",
    "ask HERE -t bare/whole.gguf --select 512": "--select chooses by the question. Leave --select out, or give",
    "eval perplexity HERE -t bare/notes.md -o bare/../bare/notes.md": "notes.md is a text that is read. Give another",
    "eval perplexity HERE -t bare -o bare/loss.json": "bare/loss.json lies in bare, whose files are read: the next run",
    "eval compare HERE -t .": "report lies in ., whose files are read: the next run would read it too",
    "choose HERE -t text.txt -t bare/../ --target 4096 -o a.md": "a.md lies in bare/../, whose files are read",
    "choose HERE -t bare --target 4096 --save bare/longer": "bare/longer lies in bare, whose files are read",
    "show yarn --target 64": "No such option: --target",
    "demo --target 64": "No such option: --target",
    "serve HERE --cached-tokens 0": "0 tokens are too few. Give 1 or more.",
    "check HERE --url nonsense": "nonsense is not an address such as http://127.0.0.1:8000",
    "check HERE --url http://here:99999": "http://here:99999 is not an address such as http://127.0.0.1:8000",
    "check HERE --url http://127.0.0.1:1": "127.0.0.1:1 does not answer (Connection refused)",
    "demo --method yran": "Did you mean 'yarn'?",
    "demo --factor 0.5": "factor must be a finite number, at least 1, found 0.5",
    "demo --model /no/where": "There is no checkpoint at /no/where",
    "demo --text ./no.txt": MISSING_PATH,
    "demo --output HERE/config.json": "HERE/config.json is a file and no directory",
}


@pytest.fixture(scope="module")
def answers(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The exit code, the output and the heavy packages of each program."""
    place = tmp_path_factory.mktemp("early")
    (place / "run.yaml").write_text(json.dumps(GOOD))
    (place / "text.txt").write_text("text")
    (place / "bare").mkdir()
    damaged = {"config.json": b"{}", "broken.gguf": b"GGUF" + b"x" * 999, "whole.gguf": b"GGUF\3".ljust(24, b"\0")}
    for name, content in (damaged | {"empty.txt": b"", "notes.md": b"some words"}).items():
        (place / "bare" / name).write_bytes(content)
    lines: dict[str, tuple[str, list[str], dict[str, str]]] = {}
    for words in COMPLETIONS:
        asked = {"_CTXEXT_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        lines[words] = "command", [], asked
    lines |= {words: ("command", shlex.split(words.replace("HERE", str(llama))), {}) for words in (*RIGHT, *MISTAKES)}
    lines |= {words: ("recipe", ["--config", "run.yaml", *shlex.split(words)], {}) for words in OF_THE_RECIPE}
    programs = json.dumps([str(ROOT / "recipes/finetune.py"), HEAVY, [*lines.values()]])
    done = ran(["-c", PROGRAM], place, programs, code=0)
    assert not (place / "out").exists()
    return dict(zip(lines, json.loads(done.stdout), strict=True))


@pytest.mark.slow
def test_help_and_completions_are_told_before_torch_is_imported(answers: dict[str, Any]) -> None:
    for line, said in (RIGHT | COMPLETIONS).items():
        code, output, heavy = answers[line]
        assert (code, heavy) == (0, []), line
        assert output.split() == [said] if line in COMPLETIONS else said in output, line


@pytest.mark.slow
def test_mistakes_are_told_before_torch_is_imported(answers: dict[str, Any], llama: Path) -> None:
    for line, said in (MISTAKES | OF_THE_RECIPE).items():
        code, output, heavy = answers[line]
        assert (code in (1, 2), heavy) == (True, []), line
        assert said.replace("HERE", str(llama)) in output, line
        assert "Traceback" not in output, line


OURS = {"YaRN": "yarn", "YARN": "yarn", "Dynamic NTK": "dynamic_ntk", "NTK-by-parts": "ntk_by_parts"}
OURS |= {"Self-Extend": "self_extend", "LongRoPE": "longrope", "DCA": "dual_chunk"}
OURS |= {"linear": "pi", "dynamic": "dynamic_ntk", "su": "longrope"}  # rope types of transformers


@pytest.mark.parametrize(("name", "ours"), OURS.items())
def test_published_names_lead_to_ours_in_one_sentence(name: str, ours: str) -> None:
    with pytest.raises(UnknownNameError, match=rf"^Unknown method '{name}'\. Did you mean '{ours}'\?$"):
        ctxext.method(name, factor=2)


def test_the_default_rotation_is_no_method() -> None:
    with pytest.raises(UnknownNameError, match=r"^Method 'default' is rotation as it is, which extends nothing"):
        ctxext.method("default", factor=2)
    with pytest.raises(UnknownNameError, match="extends nothing"):
        ctxext.method("none")


def test_every_name_of_another_project_is_a_method() -> None:
    assert {*NAMED_ELSEWHERE.values()} <= {*known_methods()}


def test_names_that_the_command_line_lists_are_those_of_the_registries() -> None:
    assert method_names() == sorted(known_methods()), "run python scripts/update_readme.py"
    assert method_names("dynamic") == ["dynamic_ntk", "dynamic_pi", "dynamic_yarn"]
    assert tuple(RULER_MADE) == RULER
    assert get_args(Dtype) == ("auto", *DTYPES)
    assert {*TASKS} == {"text", *PUZZLES}
    assert {*BASELINES} == {name for name, subject in subjects().items() if subject.kind in ("rotation", "recurrent")}
    assert {*DEVICES} >= {"cpu", "cuda"}


def test_methods_that_a_user_registered_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnknownNameError):
        refuse_unknown_method("mine a=1")
    monkeypatch.setitem(METHODS, "mine", METHODS["yarn"])
    refuse_unknown_method("mine a=1")


@pytest.mark.parametrize("words", ["--target 16K", "--target-length 16K", "--target=16K", "--length=16K"])
def test_the_target_is_given_by_any_of_its_words(words: str) -> None:
    commands: Any = get_command(app)
    for name, given in {"patch": ["SRC", "NEW", "-m", "yarn"], "plan": ["SRC"]}.items():
        assert 16384 in commands.commands[name].make_context(name, [*given, *words.split()]).params.values()


def test_what_looks_like_a_path_is_not_asked_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_load", lambda *_, **__: pytest.fail("a checkpoint is loaded"))
    for place in ("./nowhere", "/no/where", "no/such/folder", "~/nowhere", "nowhere.gguf", "tests/nowhere"):
        with pytest.raises(CheckpointError, match=r"There is no (checkpoint|directory)|No checkpoint at"):
            load_checkpoint(place)


def test_a_name_on_the_hub_may_hold_a_full_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def loading(source: str, *_: Any, **__: Any) -> Any:
        asked.append(source)
        raise OSError("offline")

    monkeypatch.setattr(checkpoint, "_load", loading)
    with pytest.raises(CheckpointError, match="offline"):
        load_checkpoint("meta-llama/Llama-3.1-8B")
    assert asked == ["meta-llama/Llama-3.1-8B"]


def test_the_hub_is_asked_only_where_it_answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        refuse_no_checkpoint("org/model")
    with pytest.raises(CheckpointError, match=r"There is no directory org/model here\. The hub cannot be asked"):
        refuse_no_checkpoint("org/model")
    (tmp_path / "models--org--model").mkdir()
    refuse_no_checkpoint("org/model")
    refuse_no_checkpoint("model")  # as sentence-transformers names its own, without the owner


def test_missing_sources_are_told_from_names_on_the_hub(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    require_sources(["-", str(tmp_path / "a.txt"), "owner/name", "owner/name:config"])
    for missing in (str(tmp_path / "b.txt"), "b.txt", "./b", "x/y/z", "papers/paper.pdf"):
        with pytest.raises(InvalidParameterError, match="No such file or directory"):
            require_sources([missing])


def test_a_folder_that_may_not_be_written_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(CheckpointError, match=f"you may not write to {tmp_path}"):
        refuse_read_only(tmp_path / "not" / "there")


def test_an_interrupted_recipe_names_resume(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(finetune, "finetune", interrupted)
    settings = finetune.Settings.model_validate(GOOD | {"output": str(tmp_path)})
    for kept, says in ((False, "Interrupted. Nothing is kept"), (True, "Interrupted. checkpoint-5 is kept in")):
        if kept:
            (tmp_path / "checkpoint-5").mkdir()
            (tmp_path / "checkpoint-5" / COMPLETE).touch()
        with pytest.raises(SystemExit) as ended:
            finetune.main(settings, resume=False)
        assert ended.value.code == 130
        said = capsys.readouterr().err
        assert says in said
        assert ("--resume" in said) is kept


@pytest.mark.parametrize("kind", [str, Path])
def test_a_path_may_be_a_string(kind: type[str] | type[Path], tmp_path: Path) -> None:
    """As typer before 0.29 hands it to a command's class."""
    with pytest.raises(CheckpointError, match="There is no checkpoint at"):
        refuse_mistakes({"source": kind(tmp_path / "no")})
    for name in ("destination", "save"):
        with pytest.raises(CheckpointError, match="already exists"):
            refuse_mistakes({name: kind(tmp_path)})
