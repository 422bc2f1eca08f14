"""Results of the laboratory: means, errors, and what they decide."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from ctxext.laboratory.figures import figures
from ctxext.laboratory.result import LabResult, blocks_of, paired
from ctxext.measuring.statistics import students_quantile
from tests.laboratory._results import BLOCKS, SEEDS, WINDOWS, nested, noise, of_parity, of_text, result_of


def test_the_error_adds_seeds_and_windows() -> None:
    values = noise(4, 9, seed=3, size=1.0) + torch.arange(4).double()[:, None]
    found = paired(values)
    by_window, by_seed = values.numpy().mean(0), values.numpy().mean(1)
    parts = [by_window.var(ddof=1) / 9, by_seed.var(ddof=1) / 4]
    assert found.mean == pytest.approx(values.mean().item())
    assert found.standard_error == pytest.approx(math.sqrt(sum(parts)))
    assert found.margin == pytest.approx(students_quantile(0.05, 3) * found.standard_error)
    assert found.over == "windows and seeds"


def test_the_mean_over_a_doubling_weighs_bytes_alike() -> None:
    result = result_of(of_text("a", 2.0))
    edges = blocks_of(64)
    widths = [stop - start for start, stop in itertools.pairwise(edges)]
    by_position = torch.cat([torch.full((width,), float(place)) for place, width in enumerate(widths)])
    reading = of_text("a", 0.0, size=0.0)
    values = torch.arange(BLOCKS).double().expand(SEEDS, WINDOWS, BLOCKS)
    object.__setattr__(reading, "scores", nested(values))
    for multiple in (0.5, 1, 2, 4, 8):
        stop = int(64 * multiple)
        expected = by_position[stop // 2 : stop].mean().item()
        assert result.at(reading, multiple).mean().item() == pytest.approx(expected)


def test_the_blocks_double_and_reach_eight_times_as_far() -> None:
    for length in (8, 16, 64, 100, 128, 256):
        edges = blocks_of(length)
        assert (edges[0], edges[-1]) == (0, 8 * length)
        assert list(edges) == sorted(set(edges))
        assert {length // 2, length, 2 * length, 4 * length} <= set(edges)
    assert blocks_of(128)[:9] == (0, 16, 24, 32, 48, 64, 96, 128, 160)
    assert len(blocks_of(128)) == 20


def test_written_and_read_again() -> None:
    result = result_of(of_text("a", 2.0), of_parity("a", 0.9, 0.6))
    assert LabResult.from_dict(result.to_dict()) == result


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("alibi", "fire"), "Dashed: ALiBi, in panels about others. Scales"),
        (("rope", "alibi", "fire"), "Dashed: RoPE and ALiBi, in panels"),
        (("fire",), "64 bytes. Bands: one standard error over 3 seeds. Scales differ."),
    ],
)
def test_the_caption_of_a_figure_names_only_what_is_drawn(names: tuple[str, ...], said: str) -> None:
    (figure,) = figures(result_of(*(of_text(name, 2.0) for name in names)))
    assert said in figure.caption
