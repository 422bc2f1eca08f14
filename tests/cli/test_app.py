"""The command line: what it prints, its exit codes, and that a mistake is one clean message."""

from __future__ import annotations

import functools
import json
import random
import shlex
import string
from pathlib import Path
from typing import Any

import pytest
from transformers import GemmaConfig, GPTJConfig, LlamaConfig, LlamaForCausalLM, PretrainedConfig

import ctxext
from ctxext.checkpoints.inspect import inspect_checkpoint
from ctxext.laboratory.encodings import ENCODINGS
from ctxext.laboratory.pictures.frequencies import bands, shown_by_default, speed
from ctxext.methods import METHODS, known_methods
from ctxext.methods.ntk import NTK
from ctxext.spec import LLAMA
from tests._checkpoints import SHAPE, TRAINED, try_only
from tests._famous import famous_checkpoint
from tests._gguf import write_gguf
from tests._programs import command
from tests._tokenizer import make_tokenizer


def config_only(directory: Path, config: PretrainedConfig) -> Path:
    config.save_pretrained(directory)
    return directory


# --- inspect ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def inspected(llama: Path) -> tuple[str, Any]:
    """What is printed of a Llama, and what is printed for programs: every method is tried for each."""
    found = functools.cache(inspect_checkpoint)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ctxext.checkpoints.inspect.inspect_checkpoint", found)
        return command("inspect", llama).stdout, json.loads(command("inspect", llama, "--json").stdout)


@pytest.fixture
def _few_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``inspect`` try some of its methods, where a test does not ask for all of them."""
    try_only(monkeypatch, "fox", "ntk", "pi", "string", "yarn")


@pytest.mark.slow
@pytest.mark.usefixtures("_few_methods")
def test_the_commands_that_inspect_prints_run(tmp_path: Path) -> None:
    """A gemma is served by another base where its class reads no scaling, and as it was said to be trained."""
    gemma = config_only(tmp_path / "gemma", GemmaConfig(**SHAPE, head_dim=16, architectures=["GemmaForCausalLM"]))
    printed = command("inspect", gemma, "--trained-length", "64", "--trust-remote-code").stdout.splitlines()
    commands = [line.partition(": ")[2] for line in printed if line.startswith("To serve an extension with")]
    given = f"ctxext export {gemma} --to {{}} --method {{}} --factor 2 --trained-length 64 --trust-remote-code"
    methods = {"llama.cpp": "yarn", "mlx-lm": "ntk", "sglang": "ntk", "vllm": "yarn"}
    assert commands == [given.format(*pair) for pair in methods.items()]
    for line in commands:
        assert command(*shlex.split(line)[1:]).exit_code == 0, line


@pytest.mark.slow
@pytest.mark.usefixtures("_few_methods")
def test_inspect_serves_a_scaled_gguf_itself(tmp_path: Path) -> None:
    keys = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}
    file = write_gguf(LlamaForCausalLM(LlamaConfig(**SHAPE)), tmp_path / "a.gguf", **keys)
    found = json.loads(command("inspect", file, "--json").stdout)["exports"]
    assert found.keys() == {"llama.cpp"}, "the others serve the checkpoint that it was converted from"
    assert found["llama.cpp"]["start"] == ["llama-server", "-m", str(file)]
    assert f"llama-server -m {file} --rope-scaling yarn" in command("inspect", file).stdout


@pytest.mark.nightly
@pytest.mark.usefixtures("_few_methods")
def test_inspect_says_what_a_longer_window_has_to_offer_a_text(llama: Path, tmp_path: Path) -> None:
    bare = config_only(tmp_path / "bare", LlamaConfig.from_pretrained(llama))
    twice, short = tmp_path / "twice.txt", tmp_path / "short.txt"
    said = "".join(random.Random(0).choices(string.ascii_letters, k=300))
    twice.write_text(said * 2)
    short.write_text("few words")
    result = command("inspect", bare, "--text", twice)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "has no tokenizer that can be read" in result.stderr
    make_tokenizer(bos=True).save_pretrained(bare)
    first, second, third, *rest = command("inspect", bare, "--text", twice, "-t", short).stdout.splitlines()
    beyond = 600 - TRAINED
    assert first == f"twice: likely to gain ({100 * 300 / beyond:.1f} % repeat from afar)"
    gains = "twice the window gains between -0.06 and +1.13 nats per token on 95 % of texts like this (10 measured)"
    assert second.strip() == gains
    assert third.startswith("Within the window, where a longer one has nothing to offer and static scaling costs")
    assert third.endswith("1 of 2 texts.")
    assert f"  ctxext eval compare {bare} --text {twice} --text {short} --factor 2" in rest
    again = command("inspect", bare, "--text", twice, "--trained-length", TRAINED).stdout
    assert f"  ctxext eval compare {bare} --text {twice} --trained-length {TRAINED} --factor 2\n" in again
    (found,) = json.loads(command("inspect", bare, "-t", twice, "--json").stdout)["texts"]
    assert found | {"name": "twice", "tokens": 600, "beyond": beyond, "share": pytest.approx(300 / beyond)} == found
    low, high = found["gain"]
    assert low < 0 < high
    linear = LlamaConfig(**SHAPE, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0})
    unsaid = config_only(tmp_path / "unsaid", linear)
    make_tokenizer(bos=True).save_pretrained(unsaid)
    assert "Give --trained-length." in " ".join(command("inspect", unsaid, "-t", twice).stderr.split())


def test_inspect_names_what_is_refused(tmp_path: Path) -> None:
    small = GPTJConfig(n_layer=1, n_embd=32, n_head=2, rotary_dim=8)
    found = json.loads(command("inspect", config_only(tmp_path / "gptj", small), "--json").stdout)
    assert found["positions"] == []
    assert found["no_positions"]
    assert all(verdict["refused"] for verdict in found["verdicts"])


def test_an_adapter_that_carries_no_extension(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    result = command("inspect", tmp_path, code=1)
    assert "carries no extension" in result.stderr
    assert "name the base checkpoint" in command("inspect", tmp_path, "--trained-length", "64", code=2).stderr


@pytest.mark.slow
@pytest.mark.usefixtures("_few_methods")
@pytest.mark.parametrize(
    ("name", "trained"),
    [("Qwen/Qwen2-VL-7B-Instruct", 32_768), ("llava-hf/llava-1.5-7b-hf", 4096), ("unsloth/ModernBERT-base", 8192)],
)
def test_models_that_are_more_than_a_decoder_or_less(tmp_path: Path, name: str, trained: int) -> None:
    """ctxext.patch extends them rightly, so inspect must not say that it cannot."""
    place = famous_checkpoint(name, tmp_path / "model")
    found = json.loads(command("inspect", place, "--json").stdout)
    assert (found["trained_length"], found["extended"]) == (trained, None)
    verdicts = {verdict["method"]: verdict["target_length"] for verdict in found["verdicts"]}
    assert verdicts["yarn"] == 4 * trained
    said = " ".join(command("plan", place, "--length", 256).stderr.split())
    assert "not a plain causal language model" in said
    assert "decoders only" not in said


# --- patch -----------------------------------------------------------------------------------------------------------


def test_patch_says_what_it_did(llama: Path, tmp_path: Path) -> None:
    asked = ("-m", "yarn", "-f", 4, "-p", "beta_fast=16", "-p", "truncate=false")
    result = command("patch", llama, tmp_path / "long", *asked, code=0)
    said = ("Wrote", "beta_fast=16.0", "truncate=False", "256 -> 1024", "weight files: 1 c", "model_max_length")
    assert [words for words in said if words not in result.stdout] == []
    rope = json.loads((tmp_path / "long/config.json").read_text())["rope_parameters"]
    assert (rope["rope_type"], rope["beta_fast"], rope["truncate"]) == ("yarn", 16.0, False)


def test_patch_json_and_copy(llama: Path, tmp_path: Path) -> None:
    arguments = ("--method", "pi", "--target", 2 * TRAINED, "--copy", "--json")
    found = json.loads(command("patch", llama, tmp_path / "long", *arguments).stdout)
    assert found["linked"] == 0
    assert found["cloned"] + found["copied"] == 1
    assert found["description"]["method"]["factor"] == 2.0


def test_patch_takes_long_parameters_from_a_file(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "factors.json").write_text(json.dumps([1.5] * 8))
    both = [f"{name}=@{tmp_path}/factors.json" for name in ("short_factor", "long_factor")]
    command("patch", llama, tmp_path / "long", "-m", "longrope", "-f", 4, "-p", both[0], "-p", both[1], code=0)
    assert json.loads((tmp_path / "long/config.json").read_text())["rope_parameters"]["long_factor"] == [1.5] * 8


# --- methods, export, plot -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_methods_come_from_the_methods() -> None:
    rows = {row["method"]: row for row in json.loads(command("methods", "--json").stdout)}
    to_train = {row["method"]: row for row in json.loads(command("lab", "methods", "--json").stdout)}
    assert to_train.keys() == ENCODINGS.keys() | {"nope"}
    assert rows.keys() == METHODS.keys() - {"nope"}
    each = {**rows, **to_train}
    assert all(all(row.values()) for row in each.values()), "every method says what it does and when to pick it"
    forms = {"yarn": "yarn", "ntk": "default, other base", "ntk_by_parts": "llama3", "dynamic_yarn": "none"}
    assert {name: rows[name]["stock form on a Llama"] for name in forms} == forms
    dynamic = {name for name, kind in known_methods().items() if kind.example(LLAMA).dynamic}
    assert {name for name, row in each.items() if row["dynamic"] == "yes"} == dynamic
    for words, names in ((("methods",), rows), (("lab", "methods"), to_train)):
        lines = command(*words, "--markdown").stdout.splitlines()
        assert len(lines) == 2 + len(names)
        assert len({line.count(" | ") for line in lines[2:]}) == 1
        said = command(*words).stdout
        assert all(name in said for name in names)


@pytest.mark.slow
def test_methods_stand_in_groups() -> None:
    groups = {row["method"]: row["group"] for row in json.loads(command("methods", "--json").stdout)}
    headings = [group.split(", ")[0] for group in groups.values()]
    assert list(dict.fromkeys(headings)) == ["rotary", "remapping", "ALiBi", "tables", "buckets"]
    assert headings == sorted(headings, key=headings.index), "each group once"
    assert groups["pi"] == "rotary, ALiBi, tables"
    assert (groups["yarn"], groups["self_extend"], groups["alibi"]) == ("rotary", "remapping", "ALiBi")
    assert (groups["tile"], groups["stretch_buckets"]) == ("tables", "buckets")
    printed = [line.strip() for line in command("methods").stdout.splitlines()]
    assert [line for line in printed if line in headings] == list(dict.fromkeys(headings))


@pytest.mark.slow
def test_export_prints_a_command_to_paste(llama: Path, tmp_path: Path) -> None:
    command("patch", llama, tmp_path / "a b", "-m", "yarn", "-f", 4)
    first = command("export", tmp_path / "a b", "--to", "vllm").stdout.splitlines()[0]
    assert shlex.split(first) == ["vllm", "serve", str(tmp_path / "a b"), "--max-model-len", "1024"]
    first = command("export", llama, "--to", "vllm", "-m", "ntk", "-f", 4).stdout.splitlines()[0]
    words = shlex.split(first)
    assert json.loads(words[words.index("--hf-overrides") + 1])["rope_parameters"]["rope_type"] == "default"
    found: dict[str, Any] = json.loads(command("export", tmp_path / "a b", "--to", "llama.cpp", "--json").stdout)
    assert found["exact"]
    assert found["flags"][:4] == ["--rope-scaling", "yarn", "--rope-scale", "4"], "converters leave it out"
    assert found["flags"][-2:] == ["-c", str(4 * TRAINED)]


@pytest.mark.slow
def test_export_writes_a_gguf_file(llama: Path, tmp_path: Path) -> None:
    """For a checkpoint, and for a GGUF file alone; what it prints serves the file."""
    source, out, other = (tmp_path / name for name in ("in.gguf", "out 1.gguf", "other.gguf"))
    write_gguf(LlamaForCausalLM.from_pretrained(llama), source)
    method = ("-m", "llama3", "-f", 4)
    lines = command("export", llama, "--to", "llama.cpp", *method).stdout.splitlines()
    assert shlex.split(lines[0]) == ["llama-server", "-m", "OUT.gguf", "-c", str(4 * TRAINED)]
    assert "--gguf IN.gguf OUT.gguf" in lines[2]
    lines = command("export", llama, "--to", "llama.cpp", *method, "--gguf", source, out).stdout.splitlines()
    assert shlex.split(lines[0]) == ["llama-server", "-m", str(out), "-c", str(4 * TRAINED)]
    assert lines[1] == f"  wrote {out}"
    assert "the same positions as in transformers" in lines[2]
    done = command("export", source, "--to", "llama.cpp", *method, "--gguf", source, other, "--json")
    assert json.loads(done.stdout)["file"] == str(other)
    assert other.read_bytes() == out.read_bytes()
    again = command("export", llama, "--to", "llama.cpp", *method, "--gguf", source, out)
    assert (again.exit_code, again.stdout) == (1, "")
    assert "already exists and is never overwritten" in again.stderr
    assert command("export", llama, "--to", "llama.cpp", *method, "--gguf", source).exit_code == 2
    assert "not for vllm" in command("export", llama, "--to", "vllm", *method, "--gguf", source, tmp_path / "x").stderr


def test_bands_of_the_spectrum() -> None:
    found = {method.name: bands(speed(method, LLAMA)[0], 4.0) for method in shown_by_default(4.0)}
    assert {"pi", "ntk", "yarn", "llama3"} <= found.keys()
    assert set(found["pi"]) == {"interpolated"}
    assert list(dict.fromkeys(found["yarn"])) == ["kept", "ramped", "interpolated"]
    assert list(dict.fromkeys(found["ntk"])) == ["kept", "ramped", "interpolated"]
    assert found["ntk"].count("ramped") > found["yarn"].count("ramped") > found["llama3"].count("ramped")
    assert found["dynamic_ntk"][-1] == "slowed further"
    clipped = bands(speed(NTK(factor=4, clip="auto"), LLAMA)[0], 4.0)
    assert (clipped[0], clipped[-1]) == ("kept", "stopped")


# --- the program itself ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_inspect_says_what_must_be_trained_and_sends_nobody_in_a_circle(inspected: tuple[str, Any]) -> None:
    text, found = inspected
    assert "ctxext inspect" not in text
    trained = {one["method"] for one in found["verdicts"] if one["needs_training"]}
    assert {"fox", "fire", "path", "nope", "t5_bias"} <= trained
    assert not trained & {"yarn", "self_extend", "pi"}
    ready, useless = text.split("useless until the model is trained with them")
    useless = " ".join(useless.partition("refused")[0].split())
    assert {"fox", "fire", "path", "nope", "t5_bias"} <= {*useless.removeprefix(": ").split(", ")}
    assert "yarn" not in useless
    places = [ready.index(words) for words in ("self_extend, to extend without training", "yarn, to extend", "methods")]
    assert places == sorted(places)


def test_an_export_prints_what_the_command_line_prints(llama: Path) -> None:
    printed = command("export", str(llama), "--to", "vllm", "-m", "yarn", "-f", "2").stdout
    said = str(ctxext.export(llama, to="vllm", method="yarn", factor=2))
    assert said.splitlines()[0].startswith(f"vllm serve {llama} --")
    assert said.splitlines()[0] == printed.splitlines()[0]
    assert [line.strip() for line in said.splitlines()[1:]] == [line.strip() for line in printed.splitlines()[1:]]


def test_the_package_says_how_to_use_it() -> None:
    calls = ("from_pretrained(", "ctxext.patch(model, method=", "factor=")
    assert [words for words in calls if words not in (ctxext.__doc__ or "")] == []
