"""The numbers of pictures, against definitions of their own."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from ctxext.errors import InvalidParameterError
from ctxext.evaluation.report.figures import paneled
from ctxext.laboratory.encodings.cope import CoPE
from ctxext.laboratory.encodings.kerple import KERPLE
from ctxext.laboratory.encodings.sinusoidal import Sinusoidal
from ctxext.laboratory.pictures.attention import by_distance, edges_of
from ctxext.laboratory.pictures.bias import bias_of_encoding, bias_of_slopes
from ctxext.laboratory.pictures.of_method import picture_of
from ctxext.laboratory.pictures.picture import as_numbers
from ctxext.laboratory.pictures.positions import farthest, positions_picture, relative_positions
from ctxext.laboratory.pictures.request import SMALL, PictureRequest
from ctxext.laboratory.pictures.rotation import rotation_picture
from ctxext.laboratory.pictures.rows import rows_picture
from ctxext.laboratory.pictures.sentence import depends_on_text
from ctxext.methods import METHODS, EncodingMethod, Method, known_methods
from ctxext.methods.alibi import ALiBi
from ctxext.methods.pi import PI
from ctxext.methods.remap import RemapMethod
from ctxext.methods.tile import Tiling
from ctxext.methods.yarn import YaRN
from ctxext.registry import discover
from ctxext.spec import LLAMA, RopeSpec

ROPE = RopeSpec(rotary_dim=8, base=100.0, trained_length=64)


def test_turns_and_scores_of_a_rotation() -> None:
    """Pair by pair, with a loop; PI turns in 4 times the text as far as plain rotation does in the trained one."""
    found = rotation_picture(PI(factor=4.0), ROPE).values
    assert found["target_length"] == 256
    for pair in range(4):
        wavelength = 2 * math.pi * 100.0 ** (2 * pair / 8)
        assert float(found["trained_turns"][pair]) == pytest.approx(64 / wavelength)
        assert float(found["plain_turns"][pair]) == pytest.approx(256 / wavelength)
        assert float(found["turns"][pair]) == pytest.approx(64 / wavelength)
    assert found["distances"][0] == 0
    assert found["distances"][-1] == 255
    for index, distance in enumerate(found["distances"].tolist()):
        expected = sum(math.cos(distance / 4 * 100.0 ** (-2 * pair / 8)) for pair in range(4)) / 4
        assert float(found["score"][index]) == pytest.approx(expected, abs=1e-12)
    assert (found["pairs_at_new_angles"], found["pairs_at_new_angles_without"]) == (
        0,
        sum(64 / (2 * math.pi * 100 ** (p / 4)) < 1 for p in range(4)),
    )


def test_temperature_raises_the_score() -> None:
    """YaRN multiplies q and k by 0.1 ln s + 1, so the score of equal vectors at distance 0 is its square."""
    assert float(rotation_picture(YaRN(factor=4.0), ROPE).values["score"][0]) == pytest.approx(
        (0.1 * math.log(4) + 1) ** 2
    )


def test_slopes_of_alibi() -> None:
    """The paper's: for 8 heads 1/2, 1/4 ... 1/256; the bias is their product with the distance."""
    found = bias_of_slopes(ALiBi(factor=2.0), PictureRequest(trained_length=64)).values
    assert found["slopes"].tolist() == [2.0**-head for head in range(1, 9)]
    at = found["distances"].tolist().index(127)
    assert found["bias"][:, at].tolist() == [-127 * 2.0**-head for head in range(1, 9)]


def test_bias_of_an_encoding() -> None:
    torch.manual_seed(0)
    p, a = (weight.detach().double().clamp(min=0.01) for weight in KERPLE(factor=2.0).build(SMALL).parameters())
    found = bias_of_encoding(KERPLE(factor=2.0), PictureRequest()).values
    for index, distance in enumerate(found["distances"].tolist()):
        torch.testing.assert_close(found["bias"][:, index], -p * (1 + a * distance).log(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found["slopes"], p * (1 + a * 512).log() / 512, rtol=1e-6, atol=1e-9)


def test_rows_of_sinusoids() -> None:
    """The cosine of two sinusoids is the mean of cos(distance x frequency), so the same along every diagonal."""
    rows = Sinusoidal().build(SMALL).added(torch.arange(96)[None])
    assert rows is not None
    found = rows_picture(Sinusoidal(), rows[0], rows[0, :48]).values
    assert (found["trained_length"], found["target_length"]) == (48, 96)
    for one, other in ((0, 0), (3, 10), (80, 7)):
        expected = sum(math.cos((one - other) * 10000.0 ** (-2 * k / 64)) for k in range(32)) / 32
        assert float(found["similarity"][one, other]) == pytest.approx(expected, abs=1e-6)


def test_the_plane_is_that_of_the_trained_rows() -> None:
    """Rows on a circle among zeros lie on that circle, and tiled ones lie on them."""
    angles = 2 * math.pi * torch.arange(16, dtype=torch.float64) / 16
    trained = torch.zeros(16, 5, dtype=torch.float64)
    trained[:, 1], trained[:, 3] = angles.cos(), angles.sin()
    indices, weights = Tiling(factor=2.0).rows(16, 32)
    found = rows_picture(Tiling(factor=2.0), (weights[..., None] * trained[indices]).sum(1), trained).values
    assert found["share"] == pytest.approx(1.0)
    torch.testing.assert_close(found["plane"].norm(dim=1), torch.ones(32, dtype=torch.float64))
    torch.testing.assert_close(found["plane"][16:], found["trained_plane"])
    assert set(found["dimensions"].tolist()) >= {1, 3}


def test_attention_by_distance() -> None:
    weights = torch.tensor([[0.5, 0.0, 0.25, 0.25, 0.0], [0.1, 0.2, 0.3, 0.0, 0.4]])  # queries at 3 and 4 of 5
    edges = edges_of(5)
    assert edges == (0, 1, 2, 3, 4, 5)
    shares = by_distance(weights, edges)
    torch.testing.assert_close(shares, torch.tensor([0.65, 0.25, 0.3, 0.2, 0.0, 0.6]) / 2)
    assert edges_of(100) == (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 100)
    assert float(by_distance(torch.softmax(torch.randn(3, 2, 7, 40), -1), edges_of(40)).sum()) == pytest.approx(6.0)


def test_what_is_not_a_number_becomes_none() -> None:
    assert as_numbers({"a": (torch.tensor([1.0, math.nan]), "b")}) == {"a": [[1.0, None], "b"]}


def test_numbers_of_a_remapping() -> None:
    """ReRoPE: keys nearer than the window stand where they stand, and none so far that training has not seen it."""
    found = picture_of(METHODS["rerope"].of({"factor": 2.0, "window": 4.0}), PictureRequest(trained_length=8)).numbers
    plain, extended = (panel["positions"] for panel in found["panels"])
    assert [len(plain), plain[9][2], plain[2][9]] == [16, 7.0, None]
    assert [extended[query][query - 3] for query in range(3, 16)] == [3.0] * 13
    assert max(value for row in extended for value in row if value is not None) < 8 <= plain[15][0]


# Kinds follow from a method's form


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


def test_which_encodings_depend_on_the_text() -> None:
    encodings = {name: kind() for name, kind in known_methods().items() if issubclass(kind, EncodingMethod)}
    found = {name for name, method in encodings.items() if depends_on_text(method, SMALL)}
    assert {"cope", "shaw", "fox"} <= found
    assert not found & {"fire", "kerple", "sandwich", "t5_bias", "sinusoidal", "learned"}


def test_counts_of_a_sentence() -> None:
    """CoPE's are what the gates between query and key add up to: never fewer farther back, at most one a token."""
    values = picture_of(CoPE(), PictureRequest(text="a b a b c")).numbers["values"]
    for head in values:
        for query, row in enumerate(head):
            assert row[query + 1 :] == [None] * (4 - query)
            for key in range(query):
                assert 0 <= row[key] - row[key + 1] <= 1


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


def test_what_does_not_turn_is_not_drawn_at_some_number_of_turns() -> None:
    rope = RopeSpec(rotary_dim=32, base=1e4, trained_length=256)
    figure = Figure()
    turns = figure.subplots()
    rotation_picture(METHODS["nope"](factor=4.0), rope).panels[1].draw(turns)
    still = next(line for line in turns.get_lines() if "nope" in str(line.get_label()))
    assert still.get_label() == "nope: no pair turns"
    assert np.isnan(np.asarray(still.get_ydata(), dtype=float)).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(known_methods()))
def test_no_label_lies_outside_of_the_picture(name: str) -> None:
    """Matrices keep their shape, so that a title of two lines pushed the label below them out of the canvas."""
    drawn = picture_of(known_methods()[name].example(LLAMA), PictureRequest())
    whole = paneled(drawn.kind, drawn.sentence, drawn.panels, across=drawn.across)
    outside: list[str] = []

    def measured(figure: Any) -> None:
        whole.draw(figure)
        figure.draw_without_rendering()
        for axes in figure.axes:
            for label in (axes.xaxis.label, axes.yaxis.label, axes.title):
                box = label.get_window_extent()
                if label.get_text() and (min(box.x0, box.y0) < 0 or box.y1 > figure.bbox.y1):
                    outside.append(label.get_text())

    replace(whole, draw=measured).save(BytesIO())
    assert outside == []
