"""``scripts/studies/zero_shot.py`` on a tiny checkpoint: what it prints and keeps; only what is missing is done."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import LlamaForCausalLM

from ctxext.measuring.readings import TIMES
from tests._checkpoints import rainy, save_with_tokenizer
from tests._programs import ROOT, ran


@pytest.mark.nightly
def test_a_study_grows(model: LlamaForCausalLM, tmp_path: Path) -> None:
    save_with_tokenizer(model, tmp_path / "checkpoint")
    rainy(tmp_path, ["one", "two"])
    program = str(ROOT / "scripts/studies/zero_shot.py")
    arguments = [program, "checkpoint", "-t", "one.txt", "-t", "two.txt", "-o", "study"]
    first = ran([*arguments, "-m", "self_extend", "--trials", "0"], tmp_path, code=0)
    assert "1 methods, 2 texts.\n12 jobs" in first.stdout
    more = ran([*arguments, "-m", "self_extend", "-m", "yarn", "--trials", "0"], tmp_path)
    assert "14 jobs, 12 of them finished before" in more.stdout, more.stderr
    table = (tmp_path / "study/table.md").read_text(encoding="utf-8")
    rows = {line.split("|")[1].strip(): line for line in table.splitlines() if line.startswith("| ")}
    assert "0 (rounding" in rows[f"Self-Extend {TIMES}2"], "nothing changes inside the window"
    assert "0 (rounding" not in rows[f"YaRN {TIMES}2"]
    assert "key tokens, against the longest" in rows["method"]
    assert (tmp_path / "study/figure.png").stat().st_size > 10_000
