"""What the tests of the methods share."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ctxext.methods import RopeMethod
from ctxext.spec import RopeSpec

GOLDEN = Path(__file__).parents[1] / "golden"
# The authors compute in float32: their own distance from the formulas in float64 is up to 4.7e-7.
FLOAT32 = 1e-6
SPECS = [
    RopeSpec(rotary_dim=8, base=1e4, trained_length=64),
    RopeSpec(rotary_dim=20, base=5e5, trained_length=1000),
    RopeSpec(rotary_dim=64, base=1e6, trained_length=131072),
    RopeSpec(rotary_dim=128, base=1e4, trained_length=4096),
]


@pytest.fixture(params=SPECS, ids=lambda spec: f"{spec.rotary_dim}-{spec.base:g}-{spec.trained_length}")
def rope(request: pytest.FixtureRequest) -> RopeSpec:
    return request.param


@pytest.fixture(scope="session")
def thetas() -> Callable[[RopeSpec], list[float]]:
    """The plain frequencies, one number at a time."""
    return lambda rope: [math.exp(-2 * i * math.log(rope.base) / rope.rotary_dim) for i in range(rope.rotary_dim // 2)]


@pytest.fixture(scope="session")
def matches_golden() -> Callable[[str, type[RopeMethod]], None]:
    """Compare a method with every case of a golden file (see scripts/make_golden.py)."""

    def check(name: str, cls: type[RopeMethod]) -> None:
        cases: list[dict[str, Any]] = json.loads((GOLDEN / f"{name}.json").read_text())["cases"]
        assert cases
        for case in cases:
            found = cls.from_dict(case["parameters"]).frequencies(RopeSpec(**case["rope"]), case["length"])
            golden = torch.tensor(case["inv_freq"], dtype=torch.float64)
            torch.testing.assert_close(found.inv_freq, golden, rtol=FLOAT32, atol=0)
            assert found.attention_scale == pytest.approx(case["attention_scale"], rel=1e-12)

    return check
