"""Names of documents and checkpoints that are markup to rich, matplotlib or Markdown are text in every report."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt

from ctxext.choosing import choose, halving
from ctxext.methods.yarn import YaRN
from ctxext.texts.documents import Document
from tests._checkpoints import save_with_tokenizer
from tests._models import byte_model
from tests._names import NAMES, text_of
from tests._programs import ROOT, command
from tests.evaluation._masked import saved

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


def test_a_name_is_one_line_that_can_be_printed() -> None:
    name = Document("a\nb\x1b[31m\udcff\x00é 文", "text").name
    assert (name.isprintable(), name[0], name[-3:]) == (True, "a", "é 文")


def test_every_console_and_every_figure_come_from_one_place() -> None:
    """The one that shows names as they are."""
    makers = {r"(?<![\w.])Console\(": "progress.py", r"\bfigure\.Figure\(": "evaluation/report/figures.py"}
    files = [*(ROOT / "ctxext").rglob("*.py"), *(ROOT / "recipes").glob("*.py")]
    for pattern, where in makers.items():
        found = [path.relative_to(ROOT).as_posix() for path in files if re.search(pattern, path.read_text("utf-8"))]
        assert found == [f"ctxext/{where}"]
