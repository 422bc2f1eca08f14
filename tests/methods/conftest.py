"""What the tests of the methods share."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from ctxext.spec import RopeSpec

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
