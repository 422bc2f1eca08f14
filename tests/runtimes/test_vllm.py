"""vLLM's own numbers for what ``export`` says, against the methods' mathematics; vLLM itself is not needed.

``tests/runtimes/vllm.json`` holds what the rotary classes and the length check of vLLM's source made of configs and
flags, in float64 (``scripts/vllm_numbers.py``). Its engine was not run.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from ctxext.checkpoints.export import export_config
from ctxext.checkpoints.load import extended_config
from ctxext.errors import CtxextError
from ctxext.methods import METHODS
from ctxext.runtimes.base import read_table
from ctxext.runtimes.vllm import TABLE
from scripts.vllm_numbers import CONFIGS, GOLDEN, TRAINED, configs, methods, spec_of

GOLD = json.loads(GOLDEN.read_text())
CASES: list[dict[str, Any]] = GOLD["cases"]
PLAIN = configs()


def label(case: dict[str, Any]) -> str:
    said = [str(value) for value in case["method"].values() if value is not None and not isinstance(value, list)]
    return "-".join([case["model_type"], *said, "extended" if case["on_disk"] else "original"])


@pytest.mark.parametrize("case", CASES, ids=label)
def test_vllm_computes_what_the_method_says(case: dict[str, Any]) -> None:
    plain = PLAIN[case["model_type"]]
    method = METHODS[case["method"]["method"]].from_dict(case["method"])
    extended = extended_config(plain, method, trained_length=TRAINED)
    made = export_config(extended, to="vllm", served=None if case["on_disk"] else plain)
    flags = made.by_flag
    assert flags == case["flags"], "other flags than vLLM was asked about: run scripts/vllm_numbers.py anew"
    target = method.target_length(TRAINED)
    assert case["length"] == target
    assert case["rows"] >= target, "its table ends before the text does"
    wanted = method.frequencies(spec_of(plain), target)
    # What does not turn is divided by 1e30, which no text would notice. Angles are read back from cos and sin.
    assert np.allclose(case["inv_freq"], wanted.inv_freq.numpy(), rtol=1e-9, atol=1e-29)
    assert case["scale"] == pytest.approx(wanted.attention_scale, rel=1e-12)


def test_every_method_was_asked_about() -> None:
    """Wherever ``export`` does not refuse."""
    asked = {(case["model_type"], json.dumps(case["method"])) for case in CASES}
    assert {model_type for model_type, _ in asked} == set(CONFIGS)
    for model_type, plain in PLAIN.items():
        for method in methods(spec_of(plain)):
            try:
                export_config(extended_config(plain, method, trained_length=TRAINED), to="vllm")
            except CtxextError:
                continue
            assert (model_type, json.dumps(method.to_dict())) in asked, "run scripts/vllm_numbers.py anew"


def test_numbers_and_classes_are_of_one_version() -> None:
    assert GOLD["provenance"]["source"] == f"vllm-{read_table(TABLE)['versions']['vllm']}"
    assert GOLD["provenance"]["dtype"] == "float64"
