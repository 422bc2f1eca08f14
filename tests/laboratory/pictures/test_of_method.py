"""The kind of picture follows from a method's form."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

from ctxext.laboratory.pictures.of_method import picture_of
from ctxext.laboratory.pictures.request import PictureRequest
from ctxext.methods import METHODS, Method, known_methods
from ctxext.registry import discover
from ctxext.spec import LLAMA


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("yarn", "rotation"),
        ("nope", "rotation"),
        ("self_extend", "positions"),
        ("alibi", "bias"),
        ("fire", "bias"),
        ("hierarchical", "table"),
        ("learned", "table"),
        ("stretch_buckets", "buckets"),
        ("cope", "sentence"),
        ("fox", "sentence"),
    ],
)
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


PARABOLA = '''
from dataclasses import dataclass
from typing import ClassVar

import torch

from ctxext.laboratory.scores import ByDistance
from ctxext.methods.encoding import Encoding, EncodingForm, EncodingMethod


@dataclass(frozen=True, kw_only=True)
class Parabola(EncodingMethod):
    """Lower each score by the square of the distance."""

    name: ClassVar[str] = "parabola"
    summary: ClassVar[str] = "score minus the square of the distance"
    source: ClassVar[str] = "none"
    form: ClassVar[EncodingForm] = "scores"
    by_text: bool = False

    def build(self, spec):
        return Squares(spec.num_heads, self.by_text)


class Squares(Encoding):
    def __init__(self, heads, by_text):
        super().__init__()
        self.heads, self.by_text = heads, by_text

    def score(self, pairs):
        size = pairs.q.abs().mean() if self.by_text else pairs.q.new_ones(())

        def of(distances):
            return -size.to(pairs.dtype) * distances.to(pairs.dtype).square().expand(self.heads, *distances.shape)

        return ByDistance(pairs, of, (), 2)
'''


def test_a_method_of_a_new_file_has_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the kind that it shows itself to be; no other line knows of it."""
    package = sys.modules["ctxext.methods"]
    (tmp_path / "parabola.py").write_text(PARABOLA, encoding="utf-8")
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    try:
        kind = discover(package, Method)["parabola"]  # type: ignore[type-abstract]
        found = picture_of(kind(factor=4.0), PictureRequest()).numbers
        assert (found["kind"], found["bias"][0][2]) == ("bias", -(found["distances"][2] ** 2))
        monkeypatch.setitem(METHODS, "parabola", kind)
        assert picture_of(kind.of({"by_text": True}), PictureRequest()).numbers["kind"] == "sentence"
    finally:
        sys.modules.pop("ctxext.methods.parabola", None)
