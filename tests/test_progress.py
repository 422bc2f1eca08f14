"""Bars and tables show a name as it is."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest

from ctxext.evaluation.report.figures import Figure
from ctxext.progress import StageBar, terminal
from tests._names import NAMES


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_bar_and_a_figure_show_a_name_as_it_is(name: str, tmp_path: Path) -> None:
    console = terminal(record=True, width=100, file=io.StringIO())
    with StageBar(console, 1.0) as bar:
        bar(name, 1.0)
    assert name in console.export_text()

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        axes.plot([1, 2], [0.001, 1e5], label=name)
        axes.set_yscale("log")
        axes.set_xticks([1, 2], [name, name])
        axes.legend(title=name)

    drawn: list[Any] = []
    figure = Figure(name="x", title=name, size=(5.0, 3.0), draw=lambda canvas: (draw(canvas), drawn.append(canvas)))
    figure.save(tmp_path / "x.png")
    labels = [label.get_text() for label in drawn[0].axes[0].get_yticklabels()]
    assert "100,000" in labels
    assert not any("math" in label for label in labels)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_bar_keeps_its_times_beside_a_long_name(width: int) -> None:
    written = io.StringIO()
    name = "YaRN (attention_factor=1.020273, divisor=1.5), text32k, part 1, 512 tokens"
    with StageBar(terminal(file=written, width=width, force_terminal=True, color_system=None), 2.0) as bar:
        bar(name, 1.0)
        bar._bar.refresh()
    line = max(re.sub(r"\x1b\[[\d?;]*[a-zA-Z]", "", written.getvalue()).split("\r"), key=len).rstrip()
    assert len(line) <= width
    assert re.search(r"YaRN .*\W+ 0:00:00 -:--:-- left$", line)
    assert ("…" in line) is (width < 120)


@pytest.mark.parametrize("seconds", [7, 45, 400])
@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_time_left_is_told_however_long_a_step_lasts(
    seconds: int, is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    console = terminal(file=io.StringIO(), width=100, force_terminal=is_terminal, color_system=None)
    monkeypatch.setattr(console, "get_time", lambda: now)
    monkeypatch.setattr("time.perf_counter", lambda: now)
    with StageBar(console, 8.0) as bar:
        for done in range(1, 8):
            now += seconds
            bar("reading", 1.0)
            assert done == 1 or bar._bar.tasks[0].time_remaining == pytest.approx((8 - done) * seconds, abs=1)
    written: Any = console.file
    lines = [line for line in written.getvalue().splitlines() if " %" in line]
    assert len(lines) == (0 if is_terminal else {7: 0, 45: 3, 400: 7}[seconds])
    assert all("s left" in line for line in lines[1:])
