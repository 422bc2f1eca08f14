"""A tiny checkpoint with its tokenizer, and documents whose every token can be found again."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import datasets
import pytest
from transformers import PreTrainedTokenizerFast

from ctxext.training.documents import TokenisedDocuments
from ctxext.training.settings import Settings, read_settings
from tests._models import tiny
from tests._tokenizer import make_tokenizer
from tests.training._recipe import CONFIG, SMALL, words_of

LENGTHS = (400, 90, 200, 20)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``datasets`` keeps stays in the test's own directory."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer(bos=True)


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """Random letters: a few of them in a row occur once."""
    letters = random.Random(0)
    return ["".join(letters.choices("abcdefghijklmnopqrstuvwxyz", k=length)) for length in LENGTHS]


@pytest.fixture(scope="session")
def corpus(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "letters.jsonl"
    rows = [json.dumps({"title": f"document {i}", "text": text}) for i, text in enumerate(texts)]
    path.write_text("\n".join(rows), encoding="utf-8")
    return path


@pytest.fixture
def documents(corpus: Path, tokenizer: PreTrainedTokenizerFast) -> TokenisedDocuments:
    return TokenisedDocuments.read([str(corpus)], tokenizer)


@pytest.fixture(scope="session")
def checkpoint(tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama trained for 64 tokens; read it only."""
    directory = tmp_path_factory.mktemp("checkpoint")
    tiny(vocab_size=257, tie_word_embeddings=True).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture
def settings(checkpoint: Path, corpus: Path, tmp_path: Path) -> Any:
    """Settings of a config, made small."""

    def make(*overrides: str, config: Path = CONFIG) -> Settings:
        own = {"checkpoint": checkpoint, "data.train": corpus, "output": tmp_path / "run"}
        small = SMALL | own | {"training.steps": 4, "training.warmup": 1}
        return read_settings(config, words_of(small, *overrides))

    return make
