"""Pages show names and numbers as they are."""

from __future__ import annotations

import html
import io
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ctxext.cli.options import OutputOptions, print_json
from ctxext.evaluation.report.figures import Panel, paneled
from ctxext.evaluation.report.page import NONE, Code, Heading, Headline, Page, TextTable
from ctxext.progress import terminal
from tests._names import NAMES, text_of


def test_a_table_does_not_part_a_number_from_its_error() -> None:
    rows = [["YaRN (attention_factor=1.020273, divisor=1.5)", "-0.044 ± 0.006", "0.051 ± 0.016", NONE, "worse here"]]
    console = terminal(record=True, width=60)
    console.print(TextTable(header=["", "inside the window", "beyond", "end", "came to"], rows=rows).for_terminal())
    shown = console.export_text()
    assert "-0.044 ± 0.006  0.051 ± 0.016" in shown
    assert max(map(len, shown.splitlines())) <= 60
    assert "worse here" in " ".join(shown.split())


@pytest.mark.parametrize("name", NAMES)
def test_a_page_shows_a_name_as_it_is(name: str) -> None:
    table = TextTable(header=["", name], rows=[[name, Code(name)]], title=name, caption=name)
    page = Page(name, [table, name, Headline(name)], [Heading(name)])
    console = terminal(record=True, width=200)
    page.show(console)
    assert console.export_text().count(name) == 7
    assert text_of(page.markdown()).count(name) == 9
    shown = re.sub(r"<style>.*?</style>|<[^>]*>", "", page.html(), flags=re.DOTALL)
    assert html.unescape(shown).count(name) == 10


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
