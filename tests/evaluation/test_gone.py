"""Names of earlier releases that are gone say what to use instead."""

from __future__ import annotations

import importlib

import pytest


@pytest.mark.parametrize(
    ("place", "name", "instead"),
    [
        ("perplexity", "run", "prepare"),
        ("longppl", "run", "prepare"),
        ("passkey", "run", "prepare"),
        ("key_tokens", "find_key_tokens", "prepare_search"),
        ("loss", "sliding", "truncation_windows"),
        ("loss", "yarn", "yarn_windows"),
        ("loss", "longlora", "longlora_starts"),
    ],
)
def test_a_name_that_is_gone_names_the_new_one(place: str, name: str, instead: str) -> None:
    module = importlib.import_module(f"ctxext.evaluation.{place}")
    with pytest.raises(AttributeError, match=rf"has no attribute '{name}': it is gone, use {instead}\b"):
        getattr(module, name)
    assert hasattr(module, instead)
    with pytest.raises(AttributeError, match=r"has no attribute 'another'\.$"):
        module.another  # noqa: B018
