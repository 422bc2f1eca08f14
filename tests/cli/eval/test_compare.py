"""``ctxext eval compare`` as a user meets it: files, a kill, several processes, Ctrl-C, and the page at the end."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from ctxext import errors
from ctxext.errors import install_line
from ctxext.evaluation import passkey
from tests._checkpoints import rainy, save_with_tokenizer
from tests._models import byte_model
from tests._programs import command, killed_at, launched

TRUNCATIONS = [f"truncated {window}" for window in (128, 256, 384, 512)]


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A checkpoint and two texts on disk, and the command that compares two methods on them."""
    folder = tmp_path_factory.mktemp("inputs")
    one, two = map(str, rainy(folder, ["one", "two"]))
    return [
        *("eval", "compare", str(save_with_tokenizer(byte_model(), folder / "checkpoint")), "--dtype", "fp32"),
        *("--depth", "0", "--text", one, "--text", two, "-m", "yarn", "-m", "dynamic_ntk"),
    ]


def read(output: Path) -> tuple[str, dict[str, Any]]:
    """The report without what may differ, byte for byte, and what may."""
    text = (output / "report.json").read_text(encoding="utf-8")
    found = json.loads(text)
    made = found["made"]
    return text[: text.index('"made"')], made


def lines(output: Path) -> list[str]:
    return [line for path in sorted(output.glob("cells*")) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.nightly
def test_killed_interrupted_and_shared_runs_end_in_the_same_report(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tmp_path / "whole"
    command(*arguments, "-o", whole, code=0)
    expected, made = read(whole)
    count = len(lines(whole))
    assert (made["processes"], set(made)) == (1, {"date", "command", "seconds", "processes"})
    # Killed in the middle of a line, then interrupted, then finished.
    killed = tmp_path / "killed"
    killed_at(6, [*arguments, "-o", str(killed)], tmp_path)
    assert len(lines(killed)) == 6
    assert not lines(killed)[-1].endswith("}")
    real = passkey.measure

    def interrupted(*given: Any, **more: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(passkey, "measure", interrupted)
    stopped = command(*arguments, "-o", killed, code=130)
    kept = len(lines(killed))
    assert 5 <= kept < count
    assert re.search(rf"{kept} of {count} jobs are finished and kept .* run the same command again", stopped.output)
    monkeypatch.setattr(passkey, "measure", real)
    resumed = command(*arguments, "-o", killed)
    assert f"{count} jobs, {kept} of them finished before" in resumed.output
    assert read(killed)[0] == expected
    assert len(lines(killed)) == count
    # Two processes, each with cells of its own.
    shared = tmp_path / "shared"
    said = launched([*arguments, "-o", str(shared)], tmp_path)
    assert said.count("Written:") == 1, "one process talks"
    shares = [path.read_text(encoding="utf-8").count("\n") for path in sorted(shared.glob("cells*.jsonl"))]
    assert sum(shares) == count
    assert len(shares) == 2
    assert min(shares) >= count // 4
    assert read(shared)[0] == expected
    assert read(shared)[1]["processes"] == 2


class Page(HTMLParser):
    """What a page refers to, what it says, and whether it can be read aloud."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in {"meta", "link", "br", "img"}:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.mark.nightly
def test_the_page_needs_nothing_else_and_says_what_was_measured(arguments: list[str], tmp_path: Path) -> None:
    output = tmp_path / "report"
    shown = command(*arguments, "-m", "table inv_freq=[1,2]", "-o", output)
    text = (output / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == []
    for tag, attributes in page.tags:
        assert tag not in {"script", "iframe", "object"}
        for name in ("src", "href", "xlink:href"):
            assert (attributes.get(name) or "#").startswith(("#", "data:")), (tag, attributes)
    assert not re.search(r"@import|url\((?!#)", text)
    figures = [attributes for tag, attributes in page.tags if tag == "img"]
    assert len(figures) == 5
    assert all(re.search(r"YaRN .*\d", attributes["alt"] or "") for attributes in figures)
    *tables, provenance = re.findall(r"<table.*?</table>", text, re.DOTALL)
    assert all("caption" in part for part in tables)
    assert "Checkpoint" in provenance
    words = "".join(page.words)
    result = json.loads((output / "report.json").read_text(encoding="utf-8"))
    gap = result["verdicts"][0]["versus_truncation"]
    for told in (
        f"{gap['mean']:+.3f} ± {gap['standard_error']:.3f}",
        f"sha256 {result['provenance']['checkpoint_sha256']}",
        f"sha256 {result['provenance']['corpus_sha256']}",
        result["rows"][6]["reading"]["fingerprint"],
        f"torch {torch.__version__}",
        "fp32 (as asked for)",
        "Not measured: given frequencies",
        "blocks of tokens",
    ):
        assert told in words
    window = result["verdicts"][0]["window"]
    assert {"YaRN", "unpatched"} <= set(re.findall(r"\w+", shown.output))
    for told in ("best truncation", f"seeing only the last {window} tokens"):
        assert told in shown.output
    assert f"the best truncation, seeing only the last {window} tokens" in words
    assert f"(last {window})" in words
    assert "vs best truncation" in words
    told = [row["reading"]["notes"] for row in result["rows"] if row["reading"]["name"].endswith("x2")]
    of_all = [note for note in told[0] if note in told[1]]
    assert of_all
    assert all(words.count(note.rstrip(".")) == 1 for note in of_all)
    names = ["unpatched", *TRUNCATIONS, "truncated", "yarn x2", "dynamic_ntk x2"]
    assert [row["reading"]["name"] for row in result["rows"]] == names
    windows = [row["scores"][1]["window"] for row in result["rows"]]
    assert windows == [None, 128, 256, 384, 512, window, None, None]
    names = {path.stem for path in (output / "figures").iterdir()}
    assert names == {"truncation-1024", "loss-x2", "difference-x2", "perplexity-at-length", "passkeys"}
    markdown = (output / "report.md").read_text(encoding="utf-8")
    assert {Path(path).stem for path in re.findall(r"\]\((.*?)\)", markdown)} == names


@pytest.mark.slow
def test_a_package_that_is_missing_is_named_before_anything_is_computed(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errors.importlib.util, "find_spec", lambda name: None)
    result = command(*arguments, "-o", tmp_path / "out")
    assert (result.exit_code, (tmp_path / "out").exists()) == (1, False)
    assert install_line("eval") in result.output
