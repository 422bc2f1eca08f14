"""Requests for a picture that cannot be met."""

from __future__ import annotations

import pytest

from ctxext.errors import InvalidParameterError
from ctxext.laboratory.encodings.cope import CoPE
from ctxext.laboratory.pictures.of_method import picture_of
from ctxext.laboratory.pictures.request import PictureRequest
from ctxext.methods import Method
from ctxext.methods.yarn import YaRN


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
