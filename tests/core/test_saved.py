"""The saved form of an extension: what makes two of them one, and which are refused."""

from __future__ import annotations

import copy
import functools
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import ctxext
from ctxext.checkpoints.source import read_any_config
from ctxext.core.saved import NOT_IDENTITY, checked_extension, choices, differences, extended_texts, identity
from ctxext.errors import CheckpointError
from ctxext.methods import known_methods
from ctxext.spec import Extension
from tests._checkpoints import rewrite
from tests._models import tiny


def saved(method: str = "yarn", model_type: str = "llama", base: float = 1e4, **arguments: Any) -> dict[str, Any]:
    """As it would be read back from a file."""
    rope = {} if model_type == "bloom" else {"rope_parameters": {"rope_type": "default", "rope_theta": base}}
    extended = ctxext.patch(tiny(model_type, **rope), method, **({"factor": 4} | arguments))
    found: dict[str, Any] = json.loads(json.dumps(extended.config.ctxext))
    return found


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"factor": 2}, "factor 4.0 there, 2.0 here"),
        ({"beta_fast": 16}, "beta_fast 32.0 there, 16.0 here"),
        ({"trained_length": 32}, "trained_length 64 there, 32 here"),
        ({"method": "pi"}, "method 'yarn' there, 'pi' here"),
        ({"base": 5e5}, "fingerprint '"),
    ],
    ids=["factor", "parameter", "trained length", "method", "base model"],
)
def test_what_differs_is_named_with_both_values(other: dict[str, Any], said: str) -> None:
    assert said in differences(saved(), saved(**other))
    assert "; " not in differences(saved(), saved(**other)), "what follows from it is said too"
    assert differences(saved(**other), saved(**other)) == ""


@pytest.mark.slow
def test_what_changes_no_logits_is_no_difference() -> None:
    assert differences(saved(), saved(sliding_window="keep")) == "", "leaving it out is to keep"
    assert differences(saved(), saved() | {"versions": {"ctxext": "0.0.1"}, "notes": ["another"]}) == ""
    bloom, other = (saved("alibi", "bloom", attention=name) for name in ("sdpa", "reference"))
    assert bloom["attention"] != other["attention"]
    assert differences(bloom, other) == ""


def test_the_kind_of_bias_counts() -> None:
    said = differences(saved("alibi", "bloom"), saved("alibi", "bloom", bias="stock"))
    assert said.startswith("bias ")


def test_plain_and_extended() -> None:
    assert differences(None, None) == ""
    assert differences(saved(), None) == "method 'yarn' there, not extended here"
    assert differences(None, saved()) == "not extended there, method 'yarn' here"


def test_an_incomplete_form_is_refused() -> None:
    whole = saved()
    assert checked_extension(whole, "it") == whole
    for name in ("fingerprint", "original", "trained_length", "scaling", "notes", "sliding_window", "attention"):
        with pytest.raises(CheckpointError, match=f"in it is incomplete, without {name}"):
            checked_extension({key: value for key, value in whole.items() if key != name}, "it")


SIDES = json.loads((Path(__file__).parents[1] / "models" / "saved_sides.json").read_text())["models"]["two methods"][
    "config"
]


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


@pytest.mark.parametrize(("method", "original"), [("pi", {"max_position_embeddings": 2.5}), ("alibi", {})], ids=str)
def test_a_damaged_original_is_refused(method: str, original: dict[str, Any], tmp_path: Path) -> None:
    ctxext.save(ctxext.patch(tiny(), method, factor=2), tmp_path)
    rewrite(tmp_path / "config.json", lambda config: config["ctxext"].update(original=original))
    with pytest.raises(CheckpointError, match=r"damaged.* original|cannot build the plain model of ctxext.original"):
        ctxext.load(tmp_path)
    with pytest.raises(CheckpointError, match=r"damaged.* original|cannot build"):
        ctxext.load(tmp_path, "yarn", factor=2, trained_length=64)
