"""Markdown shows a name as it is."""

from __future__ import annotations

import pytest
from markdown_it import MarkdownIt

from ctxext.evaluation.report.markdown import code, escaped, table
from tests._names import NAMES, text_of


@pytest.mark.parametrize("name", [*NAMES, "two\nlines", "- x", "!["])
def test_markdown_shows_a_name_as_it_is(name: str) -> None:
    shown = " ".join(name.splitlines())
    parser, marked = MarkdownIt("commonmark").enable("table"), escaped(name)
    for page in (f"# Of {marked}, all", f"**{marked}**: x", f"- x {marked}", table([name], [[name]])):
        kinds = {child.type for token in parser.parse(page) for child in token.children or ()}
        assert kinds <= {"text", "text_special", "strong_open", "strong_close"}
        assert shown in text_of(page)
    assert shown in text_of(code(name))
    assert text_of(table(["a", "b"], [[code(name, in_table=True), "1"]])).count(shown) == 1
