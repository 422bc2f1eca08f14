"""Registries find classes by name."""

from __future__ import annotations

import importlib

import pytest

from ctxext.methods import Method
from ctxext.registry import discover, listed_methods, runtime_names
from ctxext.runtimes import RUNTIMES
from scripts.update_readme import described_methods


def test_two_classes_of_one_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    package = importlib.import_module("ctxext.methods")
    abf = importlib.import_module("ctxext.methods.abf")
    monkeypatch.setattr(abf.ABF, "name", "pi")
    with pytest.raises(RuntimeError, match="are both named 'pi'"):
        discover(package, Method)


def test_the_list_of_methods_and_runtimes_is_what_the_classes_say() -> None:
    assert listed_methods() == described_methods(), "run python scripts/update_readme.py"
    assert runtime_names() == sorted(RUNTIMES), "run python scripts/update_readme.py"
