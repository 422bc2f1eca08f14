"""Mistakes at the command line: one message in the words of the command line, no traceback, nothing half-written."""

from __future__ import annotations

import errno
import json
import shlex
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM, GPT2Config
from typer.main import get_command
from typer.testing import Result

import ctxext
from ctxext.checkpoints import write
from ctxext.cli.app import app
from ctxext.errors import InvalidParameterError
from ctxext.mistakes import why_unreachable
from tests._checkpoints import TRAINED
from tests._models import tiny
from tests._programs import command


def refused(result: Result) -> str:
    assert result.exit_code in (1, 2), result.output
    return " ".join(result.stderr.split())


# Command lines, in which LLAMA is a checkpoint, and what is said of them.
REFUSED = {
    "patch LLAMA x -m yarn -f nan": "found nan",
    f"patch LLAMA x -m yarn -f 2 --target {9 * TRAINED}": f"factor=2.0 and target_length={9 * TRAINED} contradict each",
    "patch LLAMA x -m yarn --target 128": "nothing to extend",
    "patch LLAMA x -m yarn --target 0": "must be a positive",
    "patch LLAMA x -m yarn -f 4 --trained-length 0": "trained_length must be a positive whole number",
    "patch LLAMA x -m yarn -f 4 -p beta_fast=fast": "beta_fast must be",
    "patch LLAMA x -m yarn -p factor=4": "give it as --factor",
    "patch LLAMA x -m yarn -f 4 --sliding-window lift": "full-attention layers",
    "inspect .": "has no config.json",
    "inspect LLAMA --trained-length 0": "trained_length must be a positive whole number",
    "inspect LLAMA --trained-length 1": "trained_length must be a positive whole number of tokens, at least 2, found 1",
    "patch LLAMA x -m yarn -f 4 --results LLAMA/model.safetensors": "model.safetensors' is not UTF-8 text",
    "export LLAMA --to vllm": "nothing to export",
    "export LLAMA --to vllm -f 4": "Error: --factor: only with --method",
    "export LLAMA --to vllm -m yarn --target 0": "target_length must be a positive whole number",
    "export LLAMA --to llama.cpp -m dynamic_ntk -f 4": "no dynamic scaling",
    "export LLAMA --to vllm -m dynamic_yarn -f 4": "cannot run 'dynamic_yarn'",
    "plot frequencies": "--rotary-dim",
    "plot frequencies LLAMA -o a.svg": "a.svg cannot be written here: give a file that ends in .png.",
    "plot frequencies LLAMA -o missing/a.png": "no directory missing",
    "plot frequencies LLAMA -m alibi": "no frequencies",
    "plot frequencies LLAMA --base 1e4": "leave them out",
    "plot frequencies LLAMA --trained-length 0": "trained_length must be a positive whole number",
    "show yarn --text 'some words'": "give one with --model",
    "show tile --model LLAMA": "This llama has rotations",
    "show stretch_buckets --model LLAMA": "names no buckets",
    "plan LLAMA": "Give --memory (80GiB), for the longest context, or --length",
    "plan LLAMA --memory 80": "needs a unit, such as 80GiB",
    "plan LLAMA --memory 1KiB": "GiB of it for the weights",
    "plan LLAMA --length 0": "length must be a positive whole number of tokens, found 0",
    "plan LLAMA --length 64 --mlp-tile 0": "mlp_tile must be a positive whole number of tokens, found 0",
    "plan LLAMA --length 64 --no-checkpointing --offload": "offload requires checkpointing=True",
}


@pytest.mark.parametrize("line", REFUSED)
def test_a_mistake_is_one_sentence_and_writes_nothing(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = command(*shlex.split(line.replace("LLAMA", str(llama))))
    assert (result.exit_code, result.stdout) == (1, "")
    assert "Error: " in result.stderr
    assert REFUSED[line] in " ".join(result.stderr.split())
    assert list(tmp_path.iterdir()) == []


# --- what is said --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["patch", "export", "eval perplexity"])
def test_an_option_given_twice_is_refused(llama: Path, tmp_path: Path, verb: str) -> None:
    """Click keeps the last of them; a user who compares two methods would get one."""
    rest = {"patch": [llama, tmp_path / "x"], "export": [llama, "--to", "vllm"], "eval perplexity": [llama]}[verb]
    twice = refused(command(*verb.split(), *rest, "-m", "pi", "-m", "yarn", "-f", 2))
    assert "given more than once" in twice
    assert "-m" in twice
    assert "given more than once" in refused(command(*verb.split(), *rest, "-m", "pi", "-f", 2, "--factor", 4))
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("tokens", ["256", "0.25K", "1/4K", "-1", "", "K", "16Q", "1,5K", "16,38", "1__024"])
def test_tokens_are_a_number_with_k_or_m(llama: Path, tmp_path: Path, tokens: str) -> None:
    result = command("patch", llama, tmp_path / "x", "-m", "yarn", "--target", tokens)
    if tokens == "256":
        assert result.exit_code == 0
    else:
        assert "number of tokens. Give one such as 16384, 16K or 1M." in refused(result)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", ["16384", "16,384", "16K", "16k"])
def test_a_number_of_tokens_may_be_written_as_it_is_printed(llama: Path, tmp_path: Path, tokens: str) -> None:
    assert command("patch", llama, tmp_path / "x", "-m", "yarn", "--target", tokens).exit_code == 0
    assert json.loads((tmp_path / "x/config.json").read_text())["max_position_embeddings"] == 16384


@pytest.mark.parametrize("proxy", ["http://127.0.0.1:{}", "127.0.0.1:{}", "localhost:{}"])
def test_a_proxy_is_asked_whether_its_address_has_a_scheme_or_not(proxy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setenv("http_proxy", proxy.format(port))
        assert why_unreachable("http://models.example:8000") is None
    assert f":{port} does not answer" in str(why_unreachable("http://models.example:8000"))


def numbers() -> list[list[str]]:
    """Return a command line for each option of each command that takes a number, to be followed by the number."""
    lines, groups = [], [([], get_command(app))]
    for path, inner in groups:
        groups += [([*path, name], below) for name, below in getattr(inner, "commands", {}).items()]
        for option in inner.params:
            kind = getattr(option, "type_descriptor", None)  # which the oldest typer does not have, nor all its numbers
            if kind.annotation in (int, float) if kind else option.type.name.split()[0] in ("integer", "float"):
                others = [other for other in inner.params if other.required and other is not option]
                words = [word for other in others for word in (other.opts[0], "1") if word == "1" or word[0] == "-"]
                lines.append([*path, *words, option.opts[0]])
    return lines


@pytest.mark.parametrize("number", ["1" * 400, "1" * 4299, "9" * 14])
def test_no_number_is_too_large_for_its_sentence(number: str) -> None:
    assert len(numbers()) > (60 if hasattr(get_command(app).params[0], "type_descriptor") else 45)
    for line in numbers():
        result = command(*line, number, code=2)
        assert "Invalid value" in result.stderr
    for line in ("plan x --memory {}GiB", "choose x -t x --target 16K --budget {}h"):
        assert "is written like" in refused(command(*line.format(number).split()))


def test_options_that_repeat_may_be_repeated(llama: Path, tmp_path: Path) -> None:
    two = ("-p", "beta_fast=64", "-p", "beta_slow=2")
    assert command("patch", llama, tmp_path / "x", "-m", "yarn", "-f", 4, *two).exit_code == 0
    assert json.loads((tmp_path / "x/config.json").read_text())["ctxext"]["method"]["beta_slow"] == 2


@pytest.mark.slow
def test_messages_say_how_to_spell_it_at_the_command_line(
    checkpoints: dict[str, Path], llama: Path, tmp_path: Path
) -> None:
    yarn = ("--method", "yarn", "--factor", 4)
    said = refused(command("patch", checkpoints["mistral"], tmp_path / "x", *yarn))
    assert "--sliding-window lift" in said
    assert "(sliding_window=128)" in said  # the config's field, not the option


@pytest.mark.parametrize("factor", [np.float32(4), np.float64(4), np.int64(4)])
def test_numbers_of_numpy_are_numbers(factor: Any) -> None:
    method = ctxext.method("yarn", factor=factor)
    assert (type(method.factor), method) == (float, ctxext.method("yarn", factor=4))
    assert json.dumps(method.to_dict())


# --- what could not be ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["longrope", "table"])
def test_tables_that_are_missing(llama: Path, tmp_path: Path, method: str) -> None:
    with pytest.raises(InvalidParameterError, match=f"Method '{method}' needs "):
        ctxext.method(method, factor=4)
    said = refused(command("patch", llama, tmp_path / "x", "-m", method, "-f", 4))
    assert "one number per rotated pair" in said
    assert "=@FILE.json" in said
    assert "needs " in refused(command("plot", "frequencies", llama, "-m", method, "-o", tmp_path / "x.png"))


@pytest.mark.parametrize("device", ["toaster", "cuda:99", "xpu"])
def test_a_device_that_is_not_there(llama: Path, device: str) -> None:
    said = refused(command("eval", "perplexity", llama, "--device", device, "--text", __file__))
    assert f"Device '{device}' cannot be used here" in said


def test_a_disk_that_is_full(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    def fail(self: Figure, path: Any, **_: Any) -> None:
        Path(path).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(Figure, "savefig", fail)
    said = refused(command("plot", "frequencies", llama, "-m", "yarn", "-o", tmp_path / "x.png"))
    assert "x.png cannot be written: No space left on device" in said
    assert list(tmp_path.iterdir()) == []


def test_the_last_resort(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENAMETOOLONG, "File name too long", "xxx")

    monkeypatch.setattr(write, "patch_checkpoint", fail)
    said = refused(command("patch", llama, tmp_path / "x", "-m", "yarn", "-f", 4))
    assert said == "Error: xxx: File name too long."


# --- what a checkpoint is -------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_learned_positions_are_named(tmp_path: Path) -> None:
    small = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64}
    GPT2Config(**small).save_pretrained(tmp_path)
    printed = command("inspect", tmp_path).stdout
    assert "learned positions, one vector each for 1,024 tokens" in printed
    assert "ctxext export" not in printed  # nothing extends it
    found = json.loads(command("plan", tmp_path, "--memory", "8GiB", "--json").stdout)
    assert (found["serving"]["length"], found["reach"]) == (1024, 1024)
    assert "positions for 1,024 tokens and cannot read 2,000" in refused(command("plan", tmp_path, "--length", 2000))


def test_bloom_is_not_recommended_what_it_refuses(tmp_path: Path) -> None:
    config = BloomConfig(n_layer=2, hidden_size=32, n_head=2, vocab_size=64)
    config.save_pretrained(tmp_path)
    printed = command("inspect", tmp_path).stdout
    assert "has ALiBi" in printed
    assert "--method yarn" not in printed
    assert "None" not in str(ctxext.describe(BloomForCausalLM(config)))


def test_a_gguf_file_is_not_sent_in_a_circle(tmp_path: Path) -> None:
    gguf = tmp_path / "x.gguf"
    gguf.write_bytes(b"GGUF\3\0\0\0".ljust(24, b"\0"))
    patching = refused(command("patch", gguf, tmp_path / "y", "-m", "yarn", "-f", 4))
    assert "ctxext export" not in patching
    assert "x.gguf" in patching


# --- plans ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "window"), [("gemma3_text", 16), ("mistral", 16)])
def test_plan_counts_what_the_caches_of_windows_keep(model_type: str, window: int) -> None:
    """The planned cache is what transformers' own cache shows; what lies behind its views passes with a token."""
    from ctxext.planning.plan import plan_serving

    model, length = tiny(model_type, sliding_window=window), 256
    with torch.no_grad():
        cache = model(torch.full((1, length), 5), use_cache=True).past_key_values
    tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    shown = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    held = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    assert shown < held
    planned = plan_serving(model.config, dtype=torch.float32).at(length)
    assert shown <= planned.cache <= shown + 64  # a scalar or two beside them
    assert planned.cache + planned.passing == pytest.approx(held, abs=64)
