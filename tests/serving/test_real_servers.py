"""``ctxext check`` asks real servers: each with the extension, and without it or with another."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import ctxext
from ctxext.serving.load import load_served
from tests._checkpoints import save_with_tokenizer
from tests._gguf import write_gguf
from tests._models import byte_model, trained_for
from tests._programs import ROOT, command, free_port
from tests._tokenizer import make_letters
from tests.serving._running import answering

TRAINED, FACTOR = 64, 4
LENGTH = TRAINED * FACTOR
LETTERS = make_letters()
TRANSFORMERS = ("-m", "transformers.cli.transformers", "serve", "--device", "cpu")
VLLM = ("-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager")
RAISED = ("--hf-overrides", f'{{"max_position_embeddings": {LENGTH}}}')  # the window alone: its rope flags left out
MLX_LM = ("-m", "mlx_lm", "server", "--host", "127.0.0.1")
WAIT = 300  # seconds for a server to start
pytestmark = pytest.mark.nightly


def llama() -> LlamaForCausalLM:
    """A model with heads that every engine here takes, and a base that is not the usual one."""
    config = byte_model().config
    config.hidden_size, config.head_dim, config.initializer_range = 128, 32, 0.15
    config.rope_parameters["rope_theta"] = 500_000.0
    torch.manual_seed(1)  # one whose answers hold no "<s>", which servers leave out of their text
    return trained_for(LlamaForCausalLM(config).eval(), TRAINED)


def mixtral() -> MixtralForCausalLM:
    """A model of a type whose class in mlx-lm reads the base and no scaling."""
    config = MixtralConfig(
        **{name: getattr(llama().config, name) for name in ("vocab_size", "num_hidden_layers", "rope_parameters")},
        **{"bos_token_id": 256, "eos_token_id": None, "pad_token_id": 0, "initializer_range": 0.25},
        **{"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2},
        num_local_experts=2,
    )
    torch.manual_seed(0)
    return trained_for(MixtralForCausalLM(config).eval(), TRAINED)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain Llama, the same saved with YaRN, both as GGUF files would be, a Mixtral with YaRN, and a text."""
    place = tmp_path_factory.mktemp("files")
    save_with_tokenizer(llama(), place / "plain", LETTERS)
    for name, model in {"yarn": llama(), "mixtral": mixtral()}.items():
        ctxext.save(ctxext.patch(model, "yarn", factor=FACTOR), place / name, tokenizer=LETTERS)
    write_gguf(llama(), place / "plain.gguf")
    write_gguf(llama(), place / "raised.gguf", context_length=LENGTH)
    ids = torch.randint(1, 256, (LENGTH + 44,), generator=torch.Generator().manual_seed(5))
    (place / "text.txt").write_text(LETTERS.decode(ids), "utf-8")
    return place


@contextlib.contextmanager
def serving(*words: object, python: str = sys.executable, **variables: str) -> Iterator[str]:
    """Start a server by ``python WORDS --port PORT``, yield its address once it lists models, and end it."""
    url = f"http://127.0.0.1:{free_port()}"
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | variables
    arguments = [python, *map(str, words), "--port", url.rpartition(":")[2]]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(arguments, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + WAIT
            while not _lists_models(url):
                log.seek(0)
                assert process.poll() is None, log.read()
                assert time.monotonic() < deadline, log.read()
                time.sleep(0.2)
            yield url
            process.terminate()
            process.wait(60)
        finally:
            process.kill()
            process.wait()


def _lists_models(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/v1/models", timeout=WAIT) as answer:
        return bool(answer.status == 200)
    return False


def checked(files: Path, url: str, computes: str, *more: object, name: str = "yarn") -> str:
    """Return what ``ctxext check`` says of a server that ought to compute the files ``name``."""
    result = command("check", files / name, "--url", url, "--text", files / "text.txt", "--dtype", "fp32", *more)
    assert result.stdout.splitlines()[0].endswith(f": {computes}"), result.output
    assert result.exit_code == (computes != "as extended")
    return result.stdout


def test_ours_of_another_method(files: Path) -> None:
    plain = load_served(str(files / "plain"), "pi", factor=FACTOR, dtype="fp32")
    with answering(plain) as server:
        said = checked(files, f"http://127.0.0.1:{server.port}", "every frequency divided by the factor")
    assert "compared by log-probabilities" in said
    assert "answers 245 tokens, states 256; extended 256, trained 64" in said  # 256 less 12 of a text, and one more


@pytest.mark.parametrize("name", ["plain", "yarn"])
def test_transformers(files: Path, name: str) -> None:
    with serving(*TRANSFORMERS, files / name) as url:
        said = checked(files, url, "as extended" if name == "yarn" else "not extended")
    assert "compared by text" in said


@pytest.mark.parametrize(
    ("file", "flags", "window"),
    [
        ("plain.gguf", ("--rope-scaling", "yarn", "--rope-scale", "4", "--yarn-orig-ctx", "64"), 245),
        ("raised.gguf", (), 245),
        ("plain.gguf", (), 64),  # llama.cpp cuts -c to the length in the file
    ],
    ids=["extended", "ignored", "short"],
)
def test_llama_cpp(files: Path, file: str, flags: tuple[str, ...], window: int) -> None:
    pytest.importorskip("xllamacpp", reason="make llama-cpp brings a llama.cpp for CPUs")
    from scripts.llama_cpp_table import server

    running: Any = server(files / file, ("-c", str(LENGTH), *flags))
    said = checked(files, running.listening_address, "as extended" if flags else "not extended")
    assert "compared by log-probabilities" in said
    assert f"answers {window} tokens" in said


@pytest.mark.parametrize(("name", "flags"), [("yarn", ()), ("plain", RAISED)], ids=["extended", "ignored"])
def test_vllm(files: Path, name: str, flags: tuple[str, ...]) -> None:
    if (python := os.environ.get("CTXEXT_VLLM")) is None:
        pytest.skip("CTXEXT_VLLM does not name a Python that has vLLM: run make vllm")
    with serving(*VLLM, "--model", files / name, *flags, python=python, VLLM_CPU_KVCACHE_SPACE="1") as url:
        said = checked(files, url, "not extended" if flags else "as extended")
    assert "compared by log-probabilities" in said
    assert "states 256" in said


@pytest.mark.parametrize(("name", "computes"), [("yarn", "as extended"), ("mixtral", "not extended")])
def test_mlx_lm(files: Path, name: str, computes: str, tmp_path: Path) -> None:
    """Its Mixtral has files that say YaRN, and ignores them by itself."""
    if find_spec("mlx_lm") is None:
        pytest.skip("make mlx-lm brings an mlx-lm for CPUs")
    with serving(*MLX_LM, "--model", files / name, HF_HUB_CACHE=str(tmp_path)) as url:
        said = checked(files, url, computes, name=name)
    assert "compared by text" in said
