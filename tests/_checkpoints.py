"""Tiny checkpoints on disk, with a tokenizer's settings beside them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

import ctxext
from ctxext.methods import known_methods
from tests._models import tiny
from tests._tokenizer import make_tokenizer

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


def save_with_tokenizer(model: Any, directory: str | Path, tokenizer: Any = None) -> Path:
    """Save a model with a tokenizer beside it, which reads bytes unless another is given."""
    model.save_pretrained(directory)
    (tokenizer or make_tokenizer(bos=True)).save_pretrained(directory)
    return Path(directory)


def contents(directory: Path) -> dict[str, bytes]:
    """Every file below a directory, hidden ones included."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def save_reader(directory: str | Path, longest: int = 2048) -> None:
    """Write a Llama with random weights that reads bytes, for what needs a checkpoint and a tokenizer."""
    shape = SHAPE | {"vocab_size": 257, "max_position_embeddings": longest}
    save_with_tokenizer(LlamaForCausalLM(LlamaConfig(**shape)), directory)


def try_only(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Let ``inspect`` try these methods only: each takes time, and which of them apply is another test's matter."""
    known = {name: known_methods()[name] for name in names}
    monkeypatch.setattr("ctxext.checkpoints.inspect.known_methods", lambda: known)


def rain(name: str, lines: int = 60) -> str:
    """A text in which no line stands twice."""
    return "".join(f"{name} {i}: the rain falls and {i * i % 97} rivers run.\n" for i in range(lines))


def rainy(folder: Path, names: Sequence[str], lines: int = 60) -> list[Path]:
    """Write a text of each name, and return the files."""
    places = [folder / f"{name}.txt" for name in names]
    for name, place in zip(names, places, strict=True):
        place.write_text(rain(name, lines), encoding="utf-8")
    return places


def rewrite(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Edit what a JSON file holds in place."""
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")


def saved(method: str = "yarn", model_type: str = "llama", base: float = 1e4, **arguments: Any) -> dict[str, Any]:
    """As it would be read back from a file."""
    rope = {} if model_type == "bloom" else {"rope_parameters": {"rope_type": "default", "rope_theta": base}}
    extended = ctxext.patch(tiny(model_type, **rope), method, **({"factor": 4} | arguments))
    found: dict[str, Any] = json.loads(json.dumps(extended.config.ctxext))
    return found
