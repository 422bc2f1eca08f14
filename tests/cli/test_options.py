"""Options of programs other than the commands of ctxext, which are checked before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import torch
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


def test_a_full_device_is_told_in_a_sentence() -> None:
    """The texts that are asked about are not measured: no measurement says so there."""

    def full() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has more to say.")

    def broken() -> None:
        raise RuntimeError("a defect")

    for command, said in ((full, "Error: CUDA out of memory. Tried to allocate 2.00 GiB. Ask"), (broken, "")):
        program = typer.Typer()
        program.command(cls=StrictCommand)(command)
        found = CliRunner().invoke(program, [])
        assert found.exit_code == 1
        assert said in " ".join(found.output.split())
        assert isinstance(found.exception, SystemExit if said else RuntimeError)
