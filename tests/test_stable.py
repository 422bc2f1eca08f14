"""Names that users write down stay: those of each release in ``tests/golden/released``, for ever."""

from __future__ import annotations

import inspect
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import ctxext
from ctxext import errors
from ctxext.runtimes.base import Export
from ctxext.spec import Description

RELEASED = {path.stem: json.loads(path.read_text()) for path in (Path(__file__).parent / "golden/released").iterdir()}
CLASSES: dict[str, Any] = {"Description": Description, "Export": Export}


def lost(before: dict[str, list[str]], now: dict[str, list[str]]) -> list[str]:
    """Names that a release had and that are gone, each after what it belongs to."""
    return [f"{owner}: {name}" for owner, names in before.items() for name in names if name not in now.get(owner, ())]


@pytest.mark.parametrize("release", RELEASED)
def test_names_of_a_release_stay(release: str) -> None:
    stable = RELEASED[release]
    verbs = {name: [*inspect.signature(getattr(ctxext, name)).parameters] for name in stable["verbs"]}
    methods = {name: [field.name for field in fields(kind)] for name, kind in ctxext.methods().items()}
    classes = {name: [field.name for field in fields(kind)] for name, kind in CLASSES.items()}
    assert lost(stable["verbs"], verbs) == []
    assert lost(stable["methods"], methods) == []
    assert lost(stable["classes"], classes) == []
    for name in stable["verbs"]:  # what is given by place stays in its place
        kinds = inspect.signature(getattr(ctxext, name)).parameters.values()
        places = [kind.name for kind in kinds if kind.kind == kind.POSITIONAL_OR_KEYWORD]
        assert places == stable["verbs"][name][: len(places)]


def test_a_lost_name_is_seen() -> None:
    assert lost({"patch": ["model", "factor"], "gone": ["x"]}, {"patch": ["model"]}) == ["patch: factor", "gone: x"]


def test_errors_are_caught_as_before() -> None:
    names = "UnknownName InvalidParameter Incompatible PatchState Verification Checkpoint BackendUnavailable Results"
    for name in names.split():
        assert issubclass(getattr(errors, f"{name}Error"), errors.CtxextError)
