"""Options of programs other than the commands of ctxext, which are checked before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import typer
from typer.testing import CliRunner

from ctxext.cli.options import StrictCommand
from scripts.studies import choose_regret


def test_the_longest_of_several_targets_is_what_texts_have_to_reach(tmp_path: Path) -> None:
    (text := tmp_path / "short.txt").write_text("Once upon a time.")
    program = typer.Typer()
    program.command(cls=StrictCommand)(choose_regret.main)
    words = ["--text", str(text), "--judge", str(text), "--output", str(tmp_path / "regret")]
    found = CliRunner().invoke(program, [*words, "--target", "256", "--target", "512"])
    assert "The texts are too short: 512 tokens are needed" in " ".join(found.output.split())
    assert found.exit_code == 1
