"""``ctxext eval passkey`` writes what the evaluation finds."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

import ctxext
from ctxext.evaluation import passkey
from ctxext.evaluation.passkey import PasskeyReport
from tests._programs import command
from tests._tokenizer import BYTES_AFTER_BOS

ASKED = ("--dtype", "fp32", "-m", "yarn", "-m", "dynamic_ntk", "--depth", "0", "--depth", "0.9")


@pytest.mark.nightly
def test_passkeys_are_those_of_the_evaluation(checkpoint: str, model: LlamaForCausalLM, tmp_path: Path) -> None:
    outputs = [tmp_path / f"keys.{kind}" for kind in ("json", "md", "png")]
    shown = command("eval", "passkey", checkpoint, *ASKED, *(part for path in outputs for part in ("-o", path)), code=0)
    saved = json.loads(outputs[0].read_text(encoding="utf-8"))
    report = PasskeyReport.from_dict(saved)
    assert json.loads(json.dumps(report.to_dict())) == saved
    names = ["unpatched", "truncated", "yarn x2", "dynamic_ntk x2"]
    assert [reading.reading for reading in report.readings] == names
    grid = [(length, depth) for length in (512, 1024) for depth in (0.0, 0.9)]
    for reading, method in zip(report.readings, (None, None, "yarn", "dynamic_ntk"), strict=True):
        assert [(trial.length, trial.depth) for trial in reading.trials] == grid
        if method is not None:
            ctxext.patch(model, method, factor=2)
        for trial in reading.trials:
            prompt = passkey.build(BYTES_AFTER_BOS, length=trial.length - 8, depth=trial.depth)
            if reading.reading == "truncated" and trial.length > 512:
                last = torch.cat([prompt.prompt[:1], prompt.prompt[-(512 - 8 - 1) :]])
                prompt = replace(prompt, prompt=last, key_position=prompt.key_position - 512)
            expected = passkey.measure(model, prompt)
            assert trial.loss == pytest.approx(expected.loss, rel=1e-5)
            assert (trial.distance, trial.key, trial.correct) == (expected.distance, expected.key, expected.correct)
        if method is not None:
            fingerprint = ctxext.describe(model).fingerprint
            assert report.provenance.extensions[reading.reading].fingerprint == fingerprint
            ctxext.unpatch(model)
    page = outputs[1].read_text(encoding="utf-8")
    for reading in report.readings:
        parts = [reading.only(length=length) for length in (512, 1024)]
        counts = [f"{sum(trial.correct for trial in part.trials)}/2 ({part.loss:.2f})" for part in parts]
        assert f"| {reading.label} | {' | '.join(counts)} |" in page
    assert "](keys.png)" in page
    assert saved["provenance"]["checkpoint_sha256"] in page
    assert outputs[2].read_bytes().startswith(b"\x89PNG")
    assert "14 jobs" in shown.output
    assert re.search(r"Beyond the trained 512 tokens, found: unpatched 0 of 2 \(0% to 66%\)", shown.output)
