"""Requests for a picture that cannot be met."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ctxext.errors import CtxextError, InvalidParameterError
from ctxext.laboratory.encodings.cope import CoPE
from ctxext.laboratory.pictures.of_method import picture_of
from ctxext.laboratory.pictures.request import PictureRequest
from ctxext.methods import Method
from ctxext.methods.pi import PI
from ctxext.methods.yarn import YaRN
from tests._checkpoints import save_with_tokenizer
from tests._models import tiny


@pytest.mark.parametrize(
    ("method", "subject", "said"),
    [
        (YaRN(factor=4.0), PictureRequest(text="a b"), "give one with --model"),
        (None, PictureRequest(text="a b", checkpoint="x"), "Name a method"),
        (None, PictureRequest(length=5), "is of the --text"),
        (CoPE(), PictureRequest(text="a " * 60), "60 tokens, and a picture has room for the names of 48"),
        (CoPE(), PictureRequest(text="  "), "no word"),
        (CoPE(), PictureRequest(text="a b", layer=3), "no layer 3: this model has 1"),
    ],
)
def test_mistakes(method: Method | None, subject: PictureRequest, said: str) -> None:
    with pytest.raises(InvalidParameterError, match=said):
        picture_of(method, subject)


WORDS = "the cat saw the dog and the dog ran on in rain until the night came"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "changes", "method", "text", "said"),
    [
        (
            "llama",
            {"vocab_size": 99},
            YaRN(factor=4.0),
            WORDS,
            "has token 256 of its tokenizer, and this llama knows 99",
        ),
        ("llama", {"vocab_size": 99}, CoPE(), "a b", "has token 256 of its tokenizer, and this llama knows 99 tokens"),
        ("gpt2", {"n_positions": 40}, PI(factor=4.0), WORDS, "has positions for 40 tokens, and the text has 68. Give"),
        ("gpt2", {"n_positions": 20}, PI(factor=2.0), WORDS, "This gpt2 has positions for 40 tokens and cannot read"),
        ("bloom", {}, YaRN(factor=4.0), None, "^/.* has no rotation: this bloom has ALiBi. `ctxext inspect /"),
        ("gpt2", {}, YaRN(factor=4.0), None, "learned positions, one vector each"),
    ],
)
def test_what_a_checkpoint_cannot_read_is_said(
    model_type: str, changes: dict[str, Any], method: Method, text: str | None, said: str, tmp_path: Path
) -> None:
    """Before torch looks for rows that are not there."""
    place = save_with_tokenizer(tiny(model_type, **({"vocab_size": 300} | changes)), tmp_path)
    with pytest.raises(CtxextError, match=said):
        picture_of(method, PictureRequest(checkpoint=str(place), text=text))
