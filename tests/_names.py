"""Names that a page, a picture and a terminal must show as they are."""

from __future__ import annotations

from markdown_it import MarkdownIt

NAMES = [
    "a[/b]c",
    r"$\frac{1$",
    "[bold]x[/bold] :smile: [link=y]",
    "a|b `code` ``",
    "<img src=x onerror=alert(1)> &amp;",
    "*a* _b_ __init__ self_extend ~~c~~ \\* [d](e) $x$",
    "# e #",
]


def text_of(page: str) -> str:
    """What a reader of a Markdown page sees; HTML and formulas in it fail the test."""
    seen = []
    for token in MarkdownIt("commonmark").enable("table").parse(page):
        assert token.type != "html_block", token.content
        for child in token.children or ():
            assert child.type != "html_inline", child.content
            seen.append(child.content if child.type in ("text", "text_special", "code_inline") else "")
        if token.type == "fence":
            seen.append(token.content)
        seen.append("" if token.type == "inline" else "\n")
    return "".join(seen)
