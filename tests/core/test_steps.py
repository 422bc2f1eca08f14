"""Steps run in the order of their moments."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

import ctxext
from ctxext.core import steps
from ctxext.errors import IncompatibleError
from ctxext.methods import METHODS
from tests._models import tiny


def test_steps_run_in_the_order_of_their_moments_whatever_was_imported_first() -> None:
    for name in ("retrieval_heads", "dynamic_ntk"):
        steps.fill_steps_of(METHODS[name](factor=2))
    order = [(step.moment.name, step.do.__module__.removeprefix("ctxext.")) for step in steps.steps()]
    assert order == [
        ("CHECK", "caches.continuous"),
        ("OWN_CONFIG", "models.own_config"),
        ("PARTS", "models.sides"),
        ("METHOD", "models.sides"),
        ("METHOD", "models.temperature"),
        ("WEIGHTS", "attention.heads"),
        ("MODULES", "caches.continuous"),
        ("MODULES", "caches.generation"),
        ("MODULES", "caches.guards"),
        ("MODULES", "checkpoints.limits"),
        ("MODULES", "models.drafts"),
        ("MODULES", "models.drafts"),
        ("REPLICAS", "core.override"),
        ("REPLICAS", "core.override"),
        ("CONFIG", "checkpoints.limits"),
        ("CONFIG", "checkpoints.limits"),
        ("SAVING", "checkpoints.adapters"),
        ("CACHES", "caches.guards"),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "arguments"),
    [
        ("ministral3", {"method": "yarn"}),
        ("ministral3", {"method": "retrieval_heads"}),
        ("ministral3", {"method": "retrieval_heads", "temperature": "yarn"}),  # refused
        ("t5gemma", {"method": "yarn"}),
        ("t5gemma", {"method": "dynamic_ntk"}),  # refused
    ],
)
def test_steps_that_complete_a_method_commute(
    model_type: str, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both read and replace ``Work.method``, and only the names of their files order them."""
    every, outcomes = steps.steps(), set()
    completing = [step for step in every if step.moment is steps.Moment.METHOD]
    scaling = {"scaling": "extend"} if model_type == "ministral3" else {}
    for order in itertools.permutations(completing):
        rest = [step for step in every if step not in completing]
        monkeypatch.setattr(steps, "steps", lambda order=order, rest=rest: [*rest, *order])
        model = tiny(model_type)
        try:
            ctxext.patch(model, factor=4.0, **scaling, **arguments)
            outcomes.add(json.dumps(model.config.to_dict()["ctxext"], sort_keys=True))
        except IncompatibleError as error:
            outcomes.add(str(error))
    assert len(completing) == 2
    assert len(outcomes) == 1
