"""What real runtimes were measured to compute, against what ``export`` says today.

Each measures its own anew every night: ``test_llama_cpp``, ``test_mlx_lm`` and ``test_vllm``.
"""

from __future__ import annotations

import json
from types import ModuleType
from typing import Any

import pytest

from ctxext.checkpoints.export import export_config
from ctxext.checkpoints.load import extended_config
from ctxext.errors import IncompatibleError
from ctxext.runtimes.base import CLOSE
from scripts import llama_cpp_proof, mlx_lm_proof, vllm_proof
from scripts.proof import all_methods, methods_for, tiny_of
from tests.walk.tiny import TRAINED_LENGTH

PROGRAMS: dict[str, tuple[ModuleType, int]] = {  # with the fewest proofs that each is to have
    "llama.cpp": (llama_cpp_proof, 80),
    "mlx-lm": (mlx_lm_proof, 20),
    "vllm": (vllm_proof, 60),
}
PROOFS: dict[str, list[dict[str, Any]]] = {
    name: json.loads(program.RESULTS.read_text())["proofs"] for name, (program, _) in PROGRAMS.items()
}
EVERY_RUN = {"llama.cpp": "llama", "mlx-lm": "phi3", "vllm": "bloom"}  # all other shapes at night
UNTRIED = ("vllm", "phi3")  # the stored run did not ask for remapped methods there
CASES = [(name, shape) for name, (program, _) in PROGRAMS.items() for shape in program.SHAPES]


@pytest.mark.parametrize("name", PROGRAMS)
def test_whatever_is_called_exact_was_measured_to_be(name: str) -> None:
    program, least = PROGRAMS[name]
    exact = [proof for proof in PROOFS[name] if proof["exact"]]
    assert {proof["shape"] for proof in exact} == set(program.SHAPES)
    assert len(exact) > least
    for proof in exact:
        assert proof["error"] <= CLOSE * proof["matters"], proof
        assert proof["matters"] > 0.1, f"{proof} would not show an error"


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        pytest.param(*case, marks=pytest.mark.slow if case == ("vllm", "bloom") else pytest.mark.nightly)
        for case in CASES
        if case != UNTRIED
    ],
)
def test_every_method_of_a_shape_was_tried(name: str, shape: str) -> None:
    assert {proof["method"] for proof in PROOFS[name] if proof["shape"] == shape} == set(methods_for(shape))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        pytest.param(*case, marks=pytest.mark.slow if case in EVERY_RUN.items() else pytest.mark.nightly)
        for case in CASES
    ],
)
def test_export_says_today_what_was_measured(name: str, shape: str) -> None:
    """Of the extended checkpoint; a verdict that changes needs the measurement anew (make llama-cpp, mlx-lm, vllm)."""
    methods, config = all_methods(tiny_of(shape)), tiny_of(shape).config
    told = [one for one in PROOFS[name] if one["shape"] == shape and one.get("way", "extended") == "extended"]
    assert told
    for proof in told:
        extended = extended_config(config, methods[proof["method"]], trained_length=TRAINED_LENGTH)
        try:
            made = export_config(extended, to=name)
        except IncompatibleError:
            assert proof["exact"] is None, proof
        else:
            assert (None if name == "llama.cpp" and made.in_file else made.exact) == proof["exact"], proof
