"""There is one answer to which method to take, and every place gives it."""

from __future__ import annotations

import csv
import itertools
import re
from collections.abc import Callable
from statistics import fmean

import pytest

import ctxext
from ctxext.methods import known_methods
from ctxext.recommended import RECOMMENDED, to_take
from tests._programs import ROOT, command


def test_every_recommended_method_exists_and_needs_no_training_to_run() -> None:
    methods = [known_methods()[name] for row in RECOMMENDED for name in row.methods]
    assert len(methods) >= len(RECOMMENDED)
    assert not any(method.needs_training for method in methods), "RECOMMENDED has a method that needs training"


@pytest.mark.parametrize(
    ("applicable", "first"),
    [
        (("yarn", "abf", "self_extend"), ["self_extend", "yarn"]),
        (("yarn", "abf"), ["yarn", "abf"]),
        (("alibi", "pi"), ["alibi"]),
        (("pi", "tile", "hierarchical"), ["pi", "hierarchical"]),
        ((), []),
    ],
)
def test_what_applies_is_recommended_in_order(applicable: tuple[str, ...], first: list[str]) -> None:
    assert [taken.methods[0] for taken in to_take(applicable)] == first


RESULTS = ROOT / "docs" / "evidence"


def cells(page: str, head: str) -> list[list[str]]:
    """The rows of the table whose head begins so, on a page of results; marks of emphasis left out."""
    lines = (RESULTS / page).read_text("utf-8").replace("*", "").splitlines()
    first = next(place for place, line in enumerate(lines) if line.startswith(head))
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[first + 2 :])
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def number(cell: str) -> float:
    return float(re.findall(r"[-+]?[0-9][0-9.]*", cell)[0])


def names(text: str) -> tuple[str, ...]:
    """Names of methods among the words in backticks."""
    return tuple(name for name in re.findall("`(\\w+)", text) if name in known_methods())


def without_training() -> list[str]:
    """By the mean gain over all measured texts; of what every head reads."""
    with (RESULTS / "need.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    columns = {"self_extend": "Self-Extend", "dual_chunk": "Dual Chunk", "yarn": "YaRN"}
    gains = {name: fmean(float(row[column]) for row in rows if row[column]) for name, column in columns.items()}
    keys = {names(row[0])[0]: number(row[4]) for row in cells("retrieval-heads.md", "| at twice") if names(row[0])}
    return sorted(gains, key=lambda name: (-keys[name], -gains[name]))


def with_little_memory() -> list[str]:
    rows = cells("retrieval-heads.md", "| at four times")
    kept = {names(row[0])[0]: number(row[4]) for row in rows if names(row[0])}
    return sorted(kept, key=lambda name: -kept[name])


def after_ten_steps() -> list[str]:
    lost = {row[0].partition(" against")[0]: number(row[1]) for row in cells("training.md", "| | 10 steps")}
    return sorted(("self_extend", "yarn"), key=lambda name: lost[{"self_extend": "Self-Extend", "yarn": "YaRN"}[name]])


def after_thirty_steps() -> list[str]:
    """The page has no table of these runs; it ends with an answer."""
    answer = re.search(r"With few steps take (\w+)\.", (RESULTS / "training.md").read_text("utf-8"))
    assert answer
    return [answer[1].lower()]


def of_tables() -> list[str]:
    found = {names(row[0])[0]: number(row[3]) for row in cells("passages.md", "| documents found") if names(row[0])}
    return sorted(found, key=lambda name: -found[name])


# How the page of results that a row stands on orders the methods.
EVIDENCE: dict[str, Callable[[], list[str]]] = {
    "extend without training": without_training,
    "extend without training with long texts and little memory": with_little_memory,
    "fine-tune for some ten steps": after_ten_steps,
    "fine-tune for some hundred steps": after_thirty_steps,
    "extend an embedding model or another table of positions": of_tables,
}
# Rows whose first method is the only one of its kind, or stands on its paper alone.
UNMEASURED = {
    "extend without training for llama.cpp, SGLang, mlx-lm and others",
    "fine-tune on plenty of long text",
    "extend BLOOM, MPT, an ALiBi Falcon",
    "train the new rows of a table of positions",
}


def test_the_first_method_of_each_row_is_the_one_that_its_results_put_first() -> None:
    wishes = {row.wish for row in RECOMMENDED}
    assert wishes == EVIDENCE.keys() | UNMEASURED, "add a new row of RECOMMENDED to EVIDENCE or UNMEASURED"
    for row in RECOMMENDED:
        if row.wish in EVIDENCE:
            order = EVIDENCE[row.wish]()
            assert row.methods[0] == order[0], f"{row.wish}: docs/evidence has the order {order}; RECOMMENDED differs"
            named = [name for name in row.methods if name in order]
            assert named == [name for name in order if name in named], (row.wish, order)


def test_every_place_gives_the_same_answer() -> None:
    wanted = [(row.wish.partition(",")[0], row.methods) for row in RECOMMENDED]
    page = (ROOT / "docs" / "guides" / "methods.md").read_text("utf-8")
    for text, heading, least in (
        (page, "What each costs", len(wanted)),
        ((ROOT / "README.md").read_text("utf-8"), "Which method", 4),
    ):
        section = text.partition(f"## {heading}\n")[2].partition("\n## ")[0]
        rows = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| ")][1:]
        said = [(wish.strip().partition(",")[0].partition(" (")[0], names(methods)) for wish, methods in rows]
        assert said == [answer for answer in wanted if answer in said], f"'{heading}' and RECOMMENDED differ"
        assert len(said) >= least

    first = {row.wish: row.methods[0] for row in RECOMMENDED}
    tables, trained = first[RECOMMENDED[-2].wish], first[RECOMMENDED[-1].wish]
    before, _, after = page.partition("## What each costs")
    page = before + after.partition("\n## ")[2]
    placed = {
        "extend without training": first["extend without training"],
        "the same, where texts are long": first["extend without training with long texts and little memory"],
        "the same, for another runtime": "yarn",
        "fine-tune for some ten steps": first["fine-tune for some ten steps"],
        "fine-tune briefly": first["fine-tune for some hundred steps"],
        "fine-tune on plenty": first["fine-tune on plenty of long text"],
        "extend a table": tables,
        "use BLOOM": first["extend BLOOM, MPT, an ALiBi Falcon"],
        "extend an embedding model without training": tables,
        "train the new rows only": trained,
    }
    for wish, method in placed.items():
        (answer,) = re.findall(rf"^\| {wish}[^|]*\|(.*)\|$", page, re.MULTILINE)
        assert names(answer)[0] == method, f"the row '{wish}' of docs/guides/methods.md and RECOMMENDED differ"

    how_to = (ROOT / "docs" / "guides" / "howto" / "embeddings.md").read_text("utf-8")
    commands = re.findall(r"--method (\w+)|ctxext\.patch\(model, \"(\w+)\"|patch .*-m (\w+)", how_to)
    taken = {name for found in commands for name in found if name}
    assert taken == {tables}, "the commands of howto/embeddings.md use another method than RECOMMENDED"
    extended = how_to.partition("## BERT")[2].partition("SentenceTransformer(")[2].partition("```")[0]
    assert "model.max_seq_length = 2048" in extended
    rows = {row[0].strip("*"): number(row[3].strip("*")) for row in cells("passages.md", "| documents found")}
    windows, averaged = (
        rows[f"windows of {way}"]
        for way in ("128, the nearest one counts (a vector each)", "512, their embeddings averaged")
    )
    extended_table = max(number for name, number in rows.items() if names(name))
    assert (
        f"find {windows:g}, averaged windows {averaged:g}, and `{tables}` \N{MULTIPLICATION SIGN}4 {extended_table:g}"
        in " ".join(how_to.split())
    )
    recipes = re.findall(r"recipes/configs/[\w.-]+?-(\w+)\.yaml", (ROOT / "README.md").read_text("utf-8"))
    assert recipes == [first["fine-tune for some ten steps"]], "README names the recipe of another method"


def test_methods_and_help_give_the_same_answer() -> None:
    printed = command("methods").stdout
    assert [printed.index(str(row)) for row in RECOMMENDED] == sorted(printed.index(str(row)) for row in RECOMMENDED)
    assert printed.index(str(RECOMMENDED[-1])) < printed.index("rotary")
    explained = ctxext.patch.__doc__ or ""
    assert "``ctxext.methods()`` lists them" in explained  # a list written by hand would miss the next method
    assert explained.index("self_extend``, by") < explained.index("``yarn``")


def test_the_costs_of_self_extend_in_the_readme_are_those_that_were_measured() -> None:
    with (RESULTS / "models-gpu.csv").open(encoding="utf-8") as file:
        ratios = {row["what"]: float(row["ratio"]) for row in csv.DictReader(file) if row["variant"] == "self_extend"}
    (costs,) = re.findall(
        r"`self_extend`\*\*, x2 to x4 \| \[(\S+)\]\(\S+\) \| (\S+) \|", (ROOT / "README.md").read_text()
    )
    assert costs == (f"{ratios['prefill']:.1f}", f"{ratios['decode']:.1f}")
