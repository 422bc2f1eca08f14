"""Numbers of the picture of a rotation, pair by pair."""

from __future__ import annotations

import math

import numpy as np
import pytest
from matplotlib.figure import Figure

from ctxext.laboratory.pictures.rotation import rotation_picture
from ctxext.methods import METHODS
from ctxext.methods.pi import PI
from ctxext.methods.yarn import YaRN
from ctxext.spec import RopeSpec

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
    assert found["pairs_at_new_angles"] == 0
    assert found["pairs_at_new_angles_without"] == sum(64 / (2 * math.pi * 100 ** (p / 4)) < 1 for p in range(4))


def test_temperature_raises_the_score() -> None:
    """YaRN multiplies q and k by 0.1 ln s + 1, so the score of equal vectors at distance 0 is its square."""
    score = rotation_picture(YaRN(factor=4.0), ROPE).values["score"]
    assert float(score[0]) == pytest.approx((0.1 * math.log(4) + 1) ** 2)


def test_what_does_not_turn_is_not_drawn_at_some_number_of_turns() -> None:
    rope = RopeSpec(rotary_dim=32, base=1e4, trained_length=256)
    figure = Figure()
    turns = figure.subplots()
    rotation_picture(METHODS["nope"](factor=4.0), rope).panels[1].draw(turns)
    still = next(line for line in turns.get_lines() if "nope" in str(line.get_label()))
    assert still.get_label() == "nope: no pair turns"
    assert np.isnan(np.asarray(still.get_ydata(), dtype=float)).all()
