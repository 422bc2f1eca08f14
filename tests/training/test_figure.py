"""The running mean under a loss curve; the picture itself is looked at, not tested."""

from __future__ import annotations

from pathlib import Path

import pytest

from ctxext.measuring.statistics import PairedDifference
from ctxext.training.figure import save_training_figure, smoothed


def test_the_running_mean_weighs_the_past_by_its_age() -> None:
    losses = [3.0, 1.0, 2.0] * 10  # decay: 1 - 1 / (0.1 * 30)
    decay = 2 / 3
    for place in (0, 1, 7, 29):
        shares = [decay ** (place - i) for i in range(place + 1)]
        mean = sum(share * loss for share, loss in zip(shares, losses, strict=False)) / sum(shares)
        assert smoothed(losses)[place] == pytest.approx(mean)
    assert smoothed([2.0, 5.0]) == [2.0, 5.0], "too few to smooth"
    heavy = smoothed([0.0] * 29 + [1.0], [1.0] * 29 + [4.0])[-1]
    assert heavy == pytest.approx(4 / (4 + sum(decay**age for age in range(1, 30))))


@pytest.mark.slow
def test_it_is_drawn_whole(tmp_path: Path) -> None:
    entries = [{"step": step, "loss": 3 - 0.01 * step, "learning_rate": 1e-4} for step in range(1, 60)]
    gain = [((64, 96), PairedDifference(0.1, 0.01, 100, 8)), ((96, 128), PairedDifference(-0.1, 0.01, 100, 8))]
    for name, gains in (("a.png", {}), ("b.png", {"before": gain, "after": gain})):
        save_training_figure(tmp_path / name, entries, title="tiny", gains=gains)
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert len(list(tmp_path.iterdir())) == 2
