"""Tiny checkpoints on disk, and the command line as a user calls it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)
from typer.testing import CliRunner, Result

from ctxext.cli.app import app

TRAINED = 256
SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": TRAINED,
}


def save(model: Any, directory: Path) -> Path:
    model.save_pretrained(directory)
    settings = {"model_max_length": TRAINED, "tokenizer_class": "PreTrainedTokenizerFast", "accent": "é"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return directory


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Logits that are compared bit for bit come from one thread each; for models this small it is also faster."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    torch.manual_seed(0)
    gemma = SHAPE | {
        "head_dim": 16,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    return {
        "llama": save(LlamaForCausalLM(LlamaConfig(**SHAPE)), root / "llama"),
        "mistral": save(MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=128)), root / "mistral"),
        "gemma3": save(Gemma3ForCausalLM(Gemma3TextConfig(**gemma)), root / "gemma3"),
    }


@pytest.fixture(scope="session")
def llama(checkpoints: dict[str, Path]) -> Path:
    return checkpoints["llama"]


@pytest.fixture
def cli() -> Callable[..., Result]:
    """Run a command; a traceback is a failure of the test, whatever the exit code."""

    def run(*arguments: object) -> Result:
        result = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run


def contents(directory: Path) -> dict[str, bytes]:
    """Every file below a directory, hidden ones included."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}
