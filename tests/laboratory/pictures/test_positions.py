"""Numbers of the picture of remapped positions."""

from __future__ import annotations

import pytest

from ctxext.laboratory.pictures.of_method import picture_of
from ctxext.laboratory.pictures.positions import farthest, positions_picture, relative_positions
from ctxext.laboratory.pictures.request import PictureRequest
from ctxext.methods import METHODS
from ctxext.methods.remap import RemapMethod
from ctxext.spec import RopeSpec


def test_numbers_of_a_remapping() -> None:
    """ReRoPE: keys nearer than the window stand where they stand, and none so far that training has not seen it."""
    found = picture_of(METHODS["rerope"].of({"factor": 2.0, "window": 4.0}), PictureRequest(trained_length=8)).numbers
    plain, extended = (panel["positions"] for panel in found["panels"])
    assert [len(plain), plain[9][2], plain[2][9]] == [16, 7.0, None]
    assert [extended[query][query - 3] for query in range(3, 16)] == [3.0] * 13
    assert max(value for row in extended for value in row if value is not None) < 8 <= plain[15][0]


@pytest.mark.parametrize("name", [name for name, cls in METHODS.items() if issubclass(cls, RemapMethod)])
@pytest.mark.parametrize("trained", [64, 100])
def test_the_farthest_position_that_is_told_is_that_of_all_pairs(name: str, trained: int) -> None:
    rope = RopeSpec(rotary_dim=8, base=1e4, trained_length=trained)
    method = METHODS[name].example(rope)
    assert isinstance(method, RemapMethod)
    length = method.target_length(trained)
    pieces = method.pieces(rope, length)
    every_pair, places = relative_positions(pieces, length, cells=length)
    assert places == list(range(length))
    assert farthest(pieces, length) == float(every_pair[~every_pair.isnan()].max())


def test_a_long_text_is_not_thinned_out_for_the_farthest_position() -> None:
    rope = RopeSpec(rotary_dim=128, base=1e4, trained_length=8192)
    said = positions_picture([METHODS["rerope"](factor=4.0)], rope).sentence
    assert "no key stands farther than 8,191 back" in said
