"""Texts that say something twice: random tokens again, and needles between random tokens or in a given text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ctxext.attention.heads import heads
from ctxext.errors import InvalidParameterError
from ctxext.files import digest
from tests._models import byte_model, tiny
from tests._tokenizer import make_tokenizer
from tests.attention._induction import by_definition, repeated


def texts_read(model: Any, *given: Any, **more: Any) -> list[Tensor]:
    """The texts that a model reads while its heads are scored."""
    texts: list[Tensor] = []
    hook = model.get_input_embeddings().register_forward_pre_hook(lambda _, ids: texts.append(ids[0][0]))
    heads(model, *given, **more)
    hook.remove()
    return texts


def test_special_tokens_are_not_drawn() -> None:
    model = tiny(vocab_size=60, bos_token_id=3, eos_token_id=[4, 5], pad_token_id=6)
    text, needles = texts_read(model, seeds=(0,))
    same = tiny(vocab_size=60, bos_token_id=3, eos_token_id=4, unk_token_id=5, pad_token_id=6)
    assert torch.equal(text, repeated(same))
    for tokens in (text, needles):
        assert tokens[0] == 3
        assert not {3, 4, 5, 6} & set(tokens[1:].tolist())


def test_a_random_needle_is_said_again_at_the_end() -> None:
    model = tiny(initializer_range=0.3)
    _, text = texts_read(model, seeds=(0,))
    assert len(text) == 64
    *body, last = text.tolist()
    named = text[-8:-4]
    (place,) = (i for i in range(1, 56) if torch.equal(text[i : i + 8], text[-8:]))
    pairs = [(59 + i, place + 3 + i) for i in range(4)]
    assert heads(model, seeds=(0,)).probes["needle"] == pytest.approx(by_definition(model, text, pairs), abs=1e-6)
    assert len({*body, last}) == 64 - 8
    assert len(named) == 4


@pytest.mark.slow
def test_needles_are_hidden_in_the_given_text() -> None:
    tokenizer, model = make_tokenizer(bos=True), byte_model()
    words = "It was a bright cold day in April, and the clocks were striking thirteen. " * 40
    _, text = texts_read(model, tokenizer, text=words, seeds=(7,))
    read = tokenizer.decode(text[1:])
    assert len(text) == 512
    key = re.findall(r"\n\nThe pass key of Lisbon is (\d{5})\.\n\n", read)
    assert len(key) == 2
    assert len(set(key)) == 1
    assert read.endswith(f"The pass key of Lisbon is {key[0]}.\n\n")
    assert re.sub(rf"\n\nThe pass key of Lisbon is {key[0]}\.\n\n", "", read) in words
    scores = heads(model, tokenizer, text=words, seeds=(7,))
    again = [i for i in range(len(text)) if tokenizer.decode(text[i : i + 6]) == f" {key[0]}"]
    pairs = [(again[1] - 1 + i, again[0] - 1 + i) for i in range(6)]
    assert scores.probes["needle"] == pytest.approx(by_definition(model, text, pairs), abs=1e-6)
    assert scores.settings["text"] == digest(words)
    assert scores.settings["tokens"] == {"induction": 511, "needle": 512}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"text": "a text"}, "needs the model's tokenizer"),
        ({"text": "", "tokenizer": make_tokenizer(bos=True)}, "Give a longer text, or none"),
        ({"text": Path("novel.txt"), "tokenizer": make_tokenizer(bos=True)}, r"^text must be a str, such as pathlib"),
        ({"text": "a text", "tokenizer": "smol"}, r"Load it: AutoTokenizer\.from_pretrained\('smol'\)"),
        ({"seeds": ()}, r"seeds must be whole numbers, such as \(0, 1\), found \(\)"),
        ({"seeds": (0, 2**64)}, r"found \(0, 18446744073709551616\)\. torch holds 64 bits"),
        ({"seeds": 3}, "seeds must be whole numbers"),
        ({"seeds": "ab"}, "seeds must be whole numbers"),
    ],
)
@pytest.mark.usefixtures("_any_types")
def test_what_no_probe_can_be_made_of_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParameterError, match=message):
        heads(byte_model(), **given)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1},
        {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None},
        {"max_position_embeddings": 33},
        {"vocab_size": 24},
        pytest.param({"vocab_size": 4096, "max_position_embeddings": 4096}, marks=pytest.mark.slow),
    ],
)
def test_small_and_odd_models_are_read(changes: dict[str, Any]) -> None:
    model = tiny(**changes)
    texts = texts_read(model, seeds=(0,))
    assert max(map(len, texts)) <= min(2048, model.config.max_position_embeddings)
    assert all(0 <= score <= 1 + 1e-5 for values in heads(model, seeds=(0,)).probes.values() for score in values)
