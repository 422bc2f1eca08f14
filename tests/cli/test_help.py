"""The greeting: what every command says of itself: a sentence, an example that parses, every default."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from ctxext.cli.app import app
from tests._programs import command, ran


def commands(outer: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command below one, the groups among them, by the words that call it."""
    yield path, outer
    for name, inner in getattr(outer, "commands", {}).items():
        yield from commands(inner, (*path, name))


COMMANDS = dict(commands(get_command(app)))


def name(path: object) -> str:
    return " ".join(path) if isinstance(path, tuple) else ""


def states_default(option: Any) -> bool:
    """Whether a help line says what holds where the option is not given; a plain flag is off."""
    off = getattr(option, "is_flag", False) and option.default is False and not option.secondary_opts
    shown = isinstance(option.show_default, str) or (option.show_default and option.default is not None)
    return bool(option.required or off or shown or "default" in (option.help or "").lower())


def test_every_verb_is_here() -> None:
    verbs = {"inspect", "patch", "export", "plan", "methods", "demo", "plot", "show", "eval", "lab"}
    assert {path[0] for path in COMMANDS if path} >= verbs
    assert len([path for path in COMMANDS if path[:1] == ("eval",)]) >= 6


@pytest.mark.parametrize("path", COMMANDS, ids=name)
def test_help_says_what_it_does_and_gives_an_example(path: tuple[str, ...]) -> None:
    said = command(*path, "--help").stdout
    before, _, after = said.partition("Example: ")
    sentence = " ".join(before.partition("Usage:")[2].split("\n", 1)[1].split())
    assert re.match(r"[A-Z][^.]+[.?]", sentence)
    example = shlex.split(after.partition("\n")[0])
    assert tuple(example[: len(path) + 1]) == ("ctxext", *path)
    words, inner = example[1:], COMMANDS[()]
    while hasattr(inner, "commands"):
        inner = inner.commands[words.pop(0)]
    inner.make_context("example", words)


@pytest.mark.parametrize("path", [path for path, one in COMMANDS.items() if not hasattr(one, "commands")], ids=name)
def test_help_states_every_default(path: tuple[str, ...]) -> None:
    options = [one for one in COMMANDS[path].params if one.name != "help"]
    assert options
    assert [one.name for one in options if not states_default(one)] == []
    said = " ".join(re.sub(r"[│\s]+", " ", command(*path, "--help").stdout).split())
    for option in options:
        if isinstance(option.show_default, str):
            assert f"[default: ({option.show_default})]" in said


@pytest.mark.slow
def test_a_bare_call_greets(tmp_path: Path) -> None:
    """``ctxext`` alone and ``python -m ctxext`` print the same help, with the first commands to type."""
    runner = CliRunner().invoke(app, [], env={"COLUMNS": "200"})
    module = ran(["-m", "ctxext"], tmp_path)
    assert "ctxext patch Llama-3-8B Llama-3-8B-32k --method yarn --factor 4" in runner.output
    for verb in ("inspect", "patch", "export", "plan", "methods", "demo", "plot", "show", "eval"):
        assert re.search(rf"^│ {verb} +\w", runner.output, flags=re.MULTILINE)
        assert re.search(rf"^│ {verb} +\w", module.stdout, flags=re.MULTILINE)
    assert module.returncode == runner.exit_code
