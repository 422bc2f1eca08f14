"""Extensions that configs carry: what makes two of them differ, and which cannot be taken off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ctxext
from ctxext.checkpoints.carried import differences
from ctxext.errors import CheckpointError
from tests._checkpoints import rewrite, saved
from tests._models import tiny


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


def test_plain_and_extended_and_another_kind_of_bias() -> None:
    assert differences(None, None) == ""
    assert differences(saved(), None) == "method 'yarn' there, not extended here"
    assert differences(None, saved()) == "not extended there, method 'yarn' here"
    assert differences(saved("alibi", "bloom"), saved("alibi", "bloom", bias="stock")).startswith("bias ")


@pytest.mark.parametrize(("method", "original"), [("pi", {"max_position_embeddings": 2.5}), ("alibi", {})], ids=str)
def test_a_damaged_original_is_refused(method: str, original: dict[str, Any], tmp_path: Path) -> None:
    ctxext.save(ctxext.patch(tiny(), method, factor=2), tmp_path)
    rewrite(tmp_path / "config.json", lambda config: config["ctxext"].update(original=original))
    with pytest.raises(CheckpointError, match=r"damaged.* original|cannot build the plain model of ctxext.original"):
        ctxext.load(tmp_path)
    with pytest.raises(CheckpointError, match=r"damaged.* original|cannot build"):
        ctxext.load(tmp_path, "yarn", factor=2, trained_length=64)
