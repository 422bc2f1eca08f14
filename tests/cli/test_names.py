"""Names of documents and checkpoints that are markup to rich, matplotlib or Markdown are text in every report."""

from __future__ import annotations

import html
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt

from ctxext.choosing import choose, halving
from ctxext.evaluation.report.figures import Figure
from ctxext.evaluation.report.markdown import code, escaped, table
from ctxext.evaluation.report.page import NONE, Code, Heading, Headline, Page, TextTable
from ctxext.methods.yarn import YaRN
from ctxext.progress import StageBar, terminal
from ctxext.texts.documents import Document
from tests._checkpoints import save_with_tokenizer
from tests._models import byte_model
from tests._programs import ROOT, command
from tests.evaluation.test_masked import saved

NAMES = [
    "a[/b]c",
    r"$\frac{1$",
    "[bold]x[/bold] :smile: [link=y]",
    "a|b `code` ``",
    "<img src=x onerror=alert(1)> &amp;",
    "*a* _b_ __init__ self_extend ~~c~~ \\* [d](e) $x$",
    "# e #",
]
CHECKPOINT = r"$\frac{1$ [x] <b>|`"


def jsonl(folder: Path, texts: list[str]) -> Path:
    path = folder / "texts.jsonl"
    rows = [{"name": NAMES[place % len(NAMES)], "text": text} for place, text in enumerate(texts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint and texts whose names are markup."""
    folder = tmp_path_factory.mktemp("names")
    save_with_tokenizer(byte_model(), folder / CHECKPOINT)
    lines = [f"The rain falls. Then {place * place % 97} rivers run.\n" for place in range(60)]
    jsonl(folder, [f"{name}: {line}" + "".join(lines) for name, line in zip(NAMES, lines, strict=False)])
    return folder


def outputs(folder: Path, stem: str) -> list[Any]:
    paths = [folder / f"{stem}{ending}" for ending in (".json", ".md", ".png")]
    return [word for path in paths for word in ("-o", path)]


@pytest.mark.slow
def test_masked_tokens_end_in_their_files(tmp_path: Path) -> None:
    model = saved(tmp_path / CHECKPOINT)
    texts = jsonl(tmp_path, ["The quick brown fox jumps over the lazy dog. " * 12])
    done = command("eval", "masked", model, "-t", texts, "-m", "pi", "-f", "4", *outputs(tmp_path, "loss"), code=0)
    assert NAMES[0] in done.output


@pytest.mark.nightly
def test_a_comparison_ends_in_its_page(place: Path, tmp_path: Path) -> None:
    asked = ["eval", "compare", place / CHECKPOINT, "-t", place / "texts.jsonl", "-n", "7", "--dtype", "fp32"]
    command(*asked, "-m", "yarn", "--no-passkey", "-o", tmp_path / "report", code=0)
    said = text_of((tmp_path / "report" / "report.md").read_text(encoding="utf-8"))
    assert CHECKPOINT in said
    assert all(" ".join(name.split()) in said for name in NAMES)
    html = (tmp_path / "report" / "report.html").read_text(encoding="utf-8")
    assert "<img src=x" not in html


@pytest.mark.nightly
def test_a_choice_ends_in_its_page(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "candidates", lambda *_: (YaRN(factor=2), YaRN(factor=2, attention_factor=1)))
    monkeypatch.setattr(halving, "ENOUGH", 1)
    asked = ["choose", place / CHECKPOINT, "-t", place / "texts.jsonl", "--target", 1024, "--dtype", "fp32"]
    command(*asked, "--no-passkey", "--budget", "30 passes", *outputs(tmp_path, "my (own) choice"), code=0)
    page = (tmp_path / "my (own) choice.md").read_text(encoding="utf-8")
    tokens = MarkdownIt("commonmark").parse(page)
    pictures = [child for token in tokens for child in token.children or () if child.type == "image"]
    assert [one.attrs["src"] for one in pictures] == ["my%20%28own%29%20choice.png"]
    assert CHECKPOINT in text_of(page)


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


@pytest.mark.parametrize("name", [*NAMES, "two\nlines", "- x", "!["])
def test_markdown_shows_a_name_as_it_is(name: str) -> None:
    shown = " ".join(name.splitlines())
    for page in (
        f"# Of {escaped(name)}, all",
        f"**{escaped(name)}**: x",
        f"- x {escaped(name)}",
        table([name], [[name]]),
    ):
        kinds = {
            child.type
            for token in MarkdownIt("commonmark").enable("table").parse(page)
            for child in token.children or ()
        }
        assert kinds <= {"text", "text_special", "strong_open", "strong_close"}
        assert shown in text_of(page)
    assert shown in text_of(code(name))
    assert text_of(table(["a", "b"], [[code(name, in_table=True), "1"]])).count(shown) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_bar_and_a_figure_show_a_name_as_it_is(name: str, tmp_path: Path) -> None:
    console = terminal(record=True, width=100, file=io.StringIO())
    with StageBar(console, 1.0) as bar:
        bar(name, 1.0)
    assert name in console.export_text()

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        axes.plot([1, 2], [0.001, 1e5], label=name)
        axes.set_yscale("log")
        axes.set_xticks([1, 2], [name, name])
        axes.legend(title=name)

    drawn: list[Any] = []
    figure = Figure(name="x", title=name, size=(5.0, 3.0), draw=lambda canvas: (draw(canvas), drawn.append(canvas)))
    figure.save(tmp_path / "x.png")
    labels = [label.get_text() for label in drawn[0].axes[0].get_yticklabels()]
    assert "100,000" in labels
    assert not any("math" in label for label in labels)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_bar_keeps_its_times_beside_a_long_name(width: int) -> None:
    written = io.StringIO()
    name = "YaRN (attention_factor=1.020273, divisor=1.5), text32k, part 1, 512 tokens"
    with StageBar(terminal(file=written, width=width, force_terminal=True, color_system=None), 2.0) as bar:
        bar(name, 1.0)
        bar._bar.refresh()
    line = max(re.sub(r"\x1b\[[\d?;]*[a-zA-Z]", "", written.getvalue()).split("\r"), key=len).rstrip()
    assert len(line) <= width
    assert re.search(r"YaRN .*\W+ 0:00:00 -:--:-- left$", line)
    assert ("…" in line) is (width < 120)


@pytest.mark.parametrize("seconds", [7, 45, 400])
@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_time_left_is_told_however_long_a_step_lasts(
    seconds: int, is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    console = terminal(file=io.StringIO(), width=100, force_terminal=is_terminal, color_system=None)
    monkeypatch.setattr(console, "get_time", lambda: now)
    monkeypatch.setattr("time.perf_counter", lambda: now)
    with StageBar(console, 8.0) as bar:
        for done in range(1, 8):
            now += seconds
            bar("reading", 1.0)
            assert done == 1 or bar._bar.tasks[0].time_remaining == pytest.approx((8 - done) * seconds, abs=1)
    written: Any = console.file
    lines = [line for line in written.getvalue().splitlines() if " %" in line]
    assert len(lines) == (0 if is_terminal else {7: 0, 45: 3, 400: 7}[seconds])
    assert all("s left" in line for line in lines[1:])


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


def test_a_name_is_one_line_that_can_be_printed() -> None:
    name = Document("a\nb\x1b[31m\udcff\x00é 文", "text").name
    assert (name.isprintable(), name[0], name[-3:]) == (True, "a", "é 文")


def test_every_console_and_every_figure_come_from_one_place() -> None:
    """The one that shows names as they are."""
    makers = {
        r"(?<![\w.])Console\(": "ctxext/progress.py",
        r"\bfigure\.Figure\(": "ctxext/evaluation/report/figures.py",
    }
    files = [*(ROOT / "ctxext").rglob("*.py"), *(ROOT / "recipes").glob("*.py")]
    for pattern, where in makers.items():
        found = [path.relative_to(ROOT).as_posix() for path in files if re.search(pattern, path.read_text("utf-8"))]
        assert found == [where]
