"""Positions that a method counts in a sentence."""

from __future__ import annotations

from ctxext.laboratory.encodings.cope import CoPE
from ctxext.laboratory.pictures.of_method import picture_of
from ctxext.laboratory.pictures.request import SMALL, PictureRequest
from ctxext.laboratory.pictures.sentence import depends_on_text
from ctxext.methods import EncodingMethod, known_methods


def test_which_encodings_depend_on_the_text() -> None:
    encodings = {name: kind() for name, kind in known_methods().items() if issubclass(kind, EncodingMethod)}
    found = {name for name, method in encodings.items() if depends_on_text(method, SMALL)}
    assert {"cope", "shaw", "fox", "path", "hierarchical_summary"} <= found
    assert not found & {"fire", "kerple", "sandwich", "t5_bias", "sinusoidal", "learned"}


def test_counts_of_a_sentence() -> None:
    """CoPE's are what the gates between query and key add up to: never fewer farther back, at most one a token."""
    values = picture_of(CoPE(), PictureRequest(text="a b a b c")).numbers["values"]
    for head in values:
        for query, row in enumerate(head):
            assert row[query + 1 :] == [None] * (4 - query)
            for key in range(query):
                assert 0 <= row[key] - row[key + 1] <= 1
