"""What the benchmarks share (``scripts/bench.py``): the round that warms up is not counted, and no row is lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from scripts import bench


def test_timers_take_turns_and_the_first_round_does_not_count() -> None:
    turns: list[str] = []
    times = {"a": iter((100.0, 1.0, 5.0, 2.0)), "b": iter((100.0, 4.0, 4.0, 7.0))}

    def timer(name: str) -> float:
        turns.append(name)
        return next(times[name])

    assert bench.medians([lambda: timer("a"), lambda: timer("b")], rounds=3) == [2.0, 4.0]
    assert turns == ["a", "b"] * 4


def test_a_table_is_printed_and_kept_row_by_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, notes = tmp_path / "table.md", ["one"]

    def rows(say: bench.Say) -> Iterator[bench.Row]:
        say("the first")
        yield ["1", "2"]
        assert file.read_text().endswith("|---|---|\n| 1 | 2 |\n\n- one\n")
        notes.append("two")
        yield ["3", "[4]"]

    bench.report("Title", ("a", "b"), rows, file, notes)
    whole = "Title\n\n| a | b |\n|---|---|\n| 1 | 2 |\n| 3 | [4] |\n\n- one\n- two\n"
    assert file.read_text() == whole
    assert capsys.readouterr().out == whole


def test_options_that_hold_several_values() -> None:
    assert bench.listed("bf16, fp32,", ("bf16", "fp32")) == ["bf16", "fp32"]
    assert bench.listed("stock; ctxext, kept", separator=";") == ["stock", "ctxext, kept"]
    with pytest.raises(typer.BadParameter, match="'fp31' is none of bf16, fp32"):
        bench.listed("fp31", ("bf16", "fp32"))
