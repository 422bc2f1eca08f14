"""There is one answer to which method to take, and every place gives it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

import ctxext
from ctxext.methods import known_methods
from ctxext.recommended import RECOMMENDED, to_take

ROOT = Path(__file__).parents[1]


def test_every_recommended_method_exists_and_needs_no_training_to_run() -> None:
    methods = [known_methods()[name] for row in RECOMMENDED for name in row.methods]
    assert len(methods) >= len(RECOMMENDED)
    assert not any(method.needs_training for method in methods)


@pytest.mark.parametrize(
    ("applicable", "first"),
    [
        (("yarn", "abf", "self_extend"), ["self_extend", "yarn"]),
        (("yarn", "abf"), ["yarn", "abf"]),
        (("alibi", "pi"), ["alibi"]),
        (("pi", "tile", "hierarchical"), ["hierarchical"]),
        ((), []),
    ],
)
def test_what_applies_is_recommended_in_order(applicable: tuple[str, ...], first: list[str]) -> None:
    assert [taken.methods[0] for taken in to_take(applicable)] == first


def test_the_readme_gives_the_same_answer() -> None:
    section = (ROOT / "README.md").read_text("utf-8").partition("## Which method")[2].partition("\n\nTimes")[0]
    rows = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| ")][1:]
    said = [
        (wish.strip().partition(",")[0].partition(" (")[0], tuple(re.findall("`(.+?)`", names))) for wish, names in rows
    ]
    assert said == [(row.wish.partition(",")[0], row.methods) for row in RECOMMENDED]


def test_methods_and_help_give_the_same_answer(cli: Callable[..., Result]) -> None:
    printed = cli("methods").stdout
    assert [printed.index(str(row)) for row in RECOMMENDED] == sorted(printed.index(str(row)) for row in RECOMMENDED)
    assert printed.index(str(RECOMMENDED[-1])) < printed.index("rotary")
    explained = ctxext.patch.__doc__ or ""
    assert all(name in explained for name, method in known_methods().items() if not method.needs_training)
    assert explained.index("self_extend``, by") < explained.index("``yarn``")
