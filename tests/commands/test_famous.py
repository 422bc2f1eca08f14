"""Every verb, walked over the config.json of famous checkpoints as they are published."""

from __future__ import annotations

import pytest
from _famous import FAMOUS, famous_model

# Read only with the code that the checkpoint brings along.
OWN_CODE = {"moonshotai/Kimi-K2-Instruct", "zai-org/glm-4-9b"}
# Written for transformers 4.40; transformers 5 takes the rope type "su" for "longrope" and misses its trained length.
OUTDATED = {"microsoft/Phi-3-mini-128k-instruct of April 2024"}
NATIVE = sorted(FAMOUS.keys() - OWN_CODE - OUTDATED)


def test_there_are_enough_of_them() -> None:
    assert len(NATIVE) >= 50
    assert FAMOUS.keys() > OWN_CODE | OUTDATED


@pytest.mark.parametrize("name", NATIVE)
def test_a_model_of_each_builds(name: str) -> None:
    assert sum(weight.numel() for weight in famous_model(name, device="meta").parameters()) < 7e6
