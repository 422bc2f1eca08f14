"""What the tests of the methods share."""

from __future__ import annotations

import pytest

from ctxext.spec import RopeSpec

SPECS = [RopeSpec(*spec) for spec in ((8, 1e4, 64), (20, 5e5, 1000), (64, 1e6, 131072), (128, 1e4, 4096))]


@pytest.fixture(params=SPECS, ids=lambda spec: f"{spec.rotary_dim}-{spec.base:g}-{spec.trained_length}")
def rope(request: pytest.FixtureRequest) -> RopeSpec:
    return request.param
