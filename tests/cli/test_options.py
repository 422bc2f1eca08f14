"""What commands share: the JSON that they print and write, and the links between the files of a result."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ctxext.cli.options import OutputOptions, print_json
from ctxext.evaluation.report.figures import Panel, paneled
from ctxext.evaluation.report.page import Page
from ctxext.progress import terminal


def strict(text: str) -> Any:
    """JSON in which every number is one."""
    return json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


def test_a_number_that_is_none_is_null_wherever_json_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    told = {"a": math.nan, "b": [math.inf, {"c": (-math.inf, 1.5)}], "d": "NaN", "e": Path("x")}
    print_json(told)
    assert strict(capsys.readouterr().out) == {"a": None, "b": [None, {"c": [None, 1.5]}], "d": "NaN", "e": "x"}
    for folder in ("a", "b/c"):
        (tmp_path / folder).mkdir(parents=True)
    files = [tmp_path / "a/r.json", tmp_path / "a/r.md", tmp_path / "b/c/fig.png", tmp_path / "b/r.md"]
    result: Any = SimpleNamespace(to_dict=lambda: {"x": [math.nan]})
    figure = paneled("fig", "title", [Panel(lambda axes: axes.plot([0, 1]), "words", (3, 2))])
    OutputOptions(output=files).write(result, Page("title", [figure]), terminal(file=io.StringIO()))
    assert strict(files[0].read_text()) == {"x": [None]}
    assert "](../b/c/fig.png)" in files[1].read_text()  # the picture is found from where the page lies
    assert "](c/fig.png)" in files[3].read_text()
