"""The numbers of pictures, against definitions of their own."""

from __future__ import annotations

import math
from dataclasses import replace
from io import BytesIO
from typing import Any

import matplotlib.figure
import pytest
import torch

from ctxext.evaluation.report.figures import paneled
from ctxext.laboratory.pictures.frequencies import spectrum_picture
from ctxext.laboratory.pictures.of_method import picture_of
from ctxext.laboratory.pictures.picture import as_numbers
from ctxext.laboratory.pictures.request import PictureRequest
from ctxext.methods import Method, known_methods
from ctxext.methods.pi import PI
from ctxext.methods.yarn import YaRN
from ctxext.spec import LLAMA


def test_what_is_not_a_number_becomes_none() -> None:
    assert as_numbers({"a": (torch.tensor([1.0, math.nan]), "b")}) == {"a": [[1.0, None], "b"]}


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


def test_panels_of_one_method_are_told_apart() -> None:
    methods: list[Method] = [YaRN(factor=2.0), YaRN(factor=4.0), YaRN(factor=4.0, ramp="turns"), PI(factor=4.0)]
    drawn = [matplotlib.figure.Figure().subplots() for _ in methods]
    for panel, axes in zip(spectrum_picture(methods, LLAMA).panels, drawn, strict=True):
        panel.draw(axes)
    assert [axes.get_title("left") for axes in drawn] == ["yarn x2", "yarn x4", "yarn x4 ramp=turns", "pi"]
