"""The saved form of an extension: what counts in it, and which forms are refused."""

from __future__ import annotations

import copy
import functools
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from ctxext.checkpoints.carried import choices
from ctxext.checkpoints.source import read_any_config
from ctxext.core.saved import NOT_IDENTITY, checked_extension, extended_texts, identity
from ctxext.errors import CheckpointError
from ctxext.methods import known_methods
from ctxext.spec import Extension
from tests._checkpoints import saved


def test_every_field_is_either_part_of_the_identity_or_named_as_none() -> None:
    """A field to come counts unless it is named; what counts must be a choice that loading gives to patch again."""
    form = saved()
    assert set(NOT_IDENTITY) - {"chosen"} <= form.keys()  # that one is there where `ctxext choose` found the method
    assert identity(form | {"chosen": {"seed": 0}}) == identity(form)
    counted = form.keys() - set(NOT_IDENTITY) - {"method"}
    assert counted == set(choices(form)) - {"attention"} | {"fingerprint"}
    assert counted <= {field.name for field in fields(Extension)}
    assert identity(form | {"to_come": 1}) != identity(form)
    for name, method in known_methods().items():
        assert not counted & {field.name for field in fields(method)}, f"a parameter of {name} would hide one"


def test_an_incomplete_form_is_refused() -> None:
    whole = saved()
    assert checked_extension(whole, "it") == whole
    for name in ("fingerprint", "original", "trained_length", "scaling", "notes", "sliding_window", "attention"):
        with pytest.raises(CheckpointError, match=f"in it is incomplete, without {name}"):
            checked_extension({key: value for key, value in whole.items() if key != name}, "it")


SAVED = json.loads((Path(__file__).parents[1] / "models" / "saved_sides.json").read_text())
SIDES = SAVED["models"]["two methods"]["config"]


@pytest.mark.parametrize("value", [None, True, "", "x", "ctxext", {}, {"x": {}}, [7]], ids=str)
@pytest.mark.parametrize("path", ["sides", "trained_length", "sides decoder place", "sides encoder"])
def test_a_damaged_form_of_two_sides_is_refused(path: str, value: Any, tmp_path: Path) -> None:
    config = copy.deepcopy(SIDES)
    *above, last = path.split()
    part = functools.reduce(dict.__getitem__, above, config["ctxext"])
    part[last] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"damaged|incomplete|format"):
        extended_texts(read_any_config(tmp_path))
