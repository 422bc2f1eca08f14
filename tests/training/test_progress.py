"""The bar of a training run."""

from __future__ import annotations

import os
import pty
import re
import sys
import threading
from pathlib import Path

import pytest

from ctxext.training.progress import TrainingProgress
from tests.training._trainer import trainer_of


def test_the_bar_of_a_terminal_shows_the_loss_of_each_step_beside_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = pty.openpty()
    written: list[bytes] = []

    def read() -> None:
        while not written or b"the end" not in b"".join(written):
            written.append(os.read(ours, 4096))

    reader = threading.Thread(target=read)
    reader.start()
    progress = TrainingProgress(lambda step: 100)
    trainer = trainer_of(tmp_path, steps=3, callbacks=[progress])
    with os.fdopen(theirs, "w") as terminal, monkeypatch.context() as patched:
        patched.setenv("COLUMNS", "200")
        patched.setattr(sys, "stderr", terminal)
        trainer.train()
        progress.close()
        terminal.write("the end")
        terminal.flush()
        reader.join()
    os.close(ours)
    shown = set(re.findall(r"step (\d)/3  loss (\S+)", b"".join(written).decode()))
    losses = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert shown == {(str(entry["step"]), f"{entry['loss']:.4f}") for entry in losses}
    assert len(shown) == 3
