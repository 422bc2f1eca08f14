"""The kind of picture follows from a method's form."""

from __future__ import annotations

import json
import math

import pytest

from ctxext.laboratory.pictures.of_method import picture_of
from ctxext.laboratory.pictures.request import PictureRequest
from ctxext.methods import METHODS, known_methods
from ctxext.spec import LLAMA

KINDS = {"rotation": ("yarn", "nope"), "positions": ("self_extend",), "bias": ("alibi", "fire")}
KINDS |= {"table": ("hierarchical", "learned"), "buckets": ("stretch_buckets",), "sentence": ("cope", "fox")}


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for kind, names in KINDS.items() for name in names])
def test_kind(name: str, kind: str) -> None:
    assert picture_of(known_methods()[name](factor=4.0), PictureRequest()).numbers["kind"] == kind


@pytest.mark.nightly
def test_every_method_has_a_picture() -> None:
    assert len(known_methods()) >= 30
    for kind in known_methods().values():
        found = picture_of(kind.example(LLAMA), PictureRequest(trained_length=LLAMA.trained_length))
        assert found.numbers["kind"] in {"rotation", "positions", "bias", "table", "buckets", "sentence"}
        assert found.sentence
        json.dumps(found.numbers, allow_nan=False)


def test_buckets_of_t5() -> None:
    """16 each way, 8 of one distance each, and 8 equally wide in the logarithm of the distance."""
    found = picture_of(METHODS["stretch_buckets"](factor=4.0), PictureRequest()).numbers
    by_distance = dict(zip(found["distances"], zip(found["trained"], found["buckets"], strict=True), strict=True))
    assert [by_distance[near] for near in range(8)] == [(near, near) for near in range(8)]
    assert by_distance[2047] == (15, 15)
    # Bucket 15 holds n with 8 + 8 ln(n / 8) / ln(max / 8) >= 15.
    for last, most in (("trained_last", 128), ("last", 512)):
        assert found[last] == math.ceil(8 * (most / 8) ** (7 / 8))
