"""Run the night, or one part of it: all tests, the referee, every model type, the wheel, other versions, the site.

    make nightly                             # everything, one stage after another
    make nightly PART=3/8                    # what the third of eight machines runs
    python scripts/nightly.py night/*/*.md   # runs nothing: one page of those that several machines wrote

A failed stage stops none, and the exit status is 1. A run replaces the rows of its own part in ``tests/night.md``.
"""

from __future__ import annotations

import re
import resource
import subprocess
import sys
import time
from collections import namedtuple
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "tests" / "night.md"
SHARED = ("tests", "referee")  # every part runs its share of these
DEALT = ("walk", "wheel", "floor", "newest", "docs")  # one part runs each of these whole
Row = namedtuple("Row", "part stage result seconds processor_seconds date commit processor")  # all are text


def dealt(number: int, parts: int) -> list[str]:
    """Return the stages of one part: the shared ones, and its own of those that one part runs whole."""
    return [*SHARED, *(stage for turn, stage in enumerate(DEALT) if turn % parts == number - 1)]


def command(stage: str, number: int, parts: int) -> list[str]:
    """Return the command line of a stage."""
    times = ["--part", f"{number}/{parts}", "--times", f"runs/night-{number}-of-{parts}.json"]
    seed = ["--seed", str(number * 1_000_000)] if parts > 1 else []
    modules = {
        # With the check of types and shapes, as pytest by itself.
        "tests": ["pytest", "tests", "-n", "2", "--dist", "loadscope", *times],
        "referee": ["tests.referee", "--minutes", f"{30 / parts:g}", *seed],
        "walk": ["tests.walk.run", "--jobs", "2"],
    }
    targets = {"wheel": ["wheel-test"], "docs": ["docs", "docs-test"]}
    return [sys.executable, "-m", *modules[stage]] if stage in modules else ["make", *targets.get(stage, [stage])]


def green(rows: list[Row]) -> str:
    """Return the sentence on the newest commit at which every stage of every part passed, empty if there is none."""
    dates = {}
    for commit, parts in {(row.commit, int(row.part.split("/")[1])) for row in rows}:
        night = [row for row in rows if row.commit == commit and row.part.endswith(f"/{parts}")]
        wanted = {(f"{number}/{parts}", stage) for number in range(1, parts + 1) for stage in dealt(number, parts)}
        if {(row.part, row.stage) for row in night if row.result == "passed"} >= wanted and "+" not in commit:
            dates[max(row.date for row in night)] = commit
    return f"All parts were last green on {max(dates)} UTC, at commit {dates[max(dates)]}." if dates else ""


def page(rows: list[Row], *earlier: str) -> str:
    """Return the page of these rows and of the newest of each part on earlier pages, which also tell the last green."""
    text = "\n".join(earlier)
    rows = rows + [Row(*line.strip("| ").split(" | ")) for line in text.splitlines() if re.match(r"\| \d", line)]
    newest = {part: max(row.date for row in rows if row.part == part) for part in {row.part for row in rows}}
    rows = list(dict.fromkeys(row for row in rows if row.date == newest[row.part]))
    rows.sort(key=lambda row: ([*map(int, row.part.split("/"))][::-1], [*SHARED, *DEALT].index(row.stage)))
    told = max([*re.findall(r"^All parts were last green on .*", text, re.M), green(rows)])
    titles = [name.replace("_", " ") for name in Row._fields]
    cells = "\n".join(f"| {' | '.join(row)} |" for row in [titles, ["---"] * len(titles), *rows])
    how = "`make nightly` writes this page ([how](../CONTRIBUTING.md#the-night)). A + marks a commit with changes."
    return f"# The last night\n\n{told or 'All parts were never green at one commit yet.'}\n\n{how}\n\n{cells}\n"


def run(stage: str, number: int, parts: int, origin: tuple[str, str, str]) -> Row:
    """Run one stage to its end, and measure it; ``origin`` holds the date, the commit and the processor."""
    words, began, before = command(stage, number, parts), time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"\n{stage}: {' '.join(words)}", flush=True)
    result = "failed" if subprocess.run(words, cwd=ROOT, check=False).returncode else "passed"
    wall, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Row(f"{number}/{parts}", stage, result, f"{wall:.0f}", f"{used:.0f}", *origin)


def origin() -> tuple[str, str, str]:
    """Return the date, the commit and the processor of a run."""
    commit, changes = (
        subprocess.run(["git", *words.split()], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
        for words in ("rev-parse --short=8 HEAD", "status --porcelain -- . :!tests/night.md")
    )
    names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.M)
    return f"{datetime.now(UTC):%Y-%m-%d %H:%M}", commit + "+" * bool(changes), (names or ["unknown"])[0]


def main(pages: Annotated[list[Path] | None, typer.Argument()] = None, part: str = "1/1") -> None:
    """Run a part of the night, or merge pages, and write the page."""
    number, parts = map(int, part.split("/"))
    if not 1 <= number <= parts:
        raise typer.BadParameter(f"A part is a number from 1 and a number of parts, as 3/8. Found: {part}")
    (ROOT / "runs").mkdir(exist_ok=True)
    where = origin()
    earlier = [path.read_text(encoding="utf-8") for path in [*(pages or []), *([PAGE] if PAGE.exists() else [])]]
    rows: list[Row] = []
    PAGE.write_text(page(rows, *earlier), encoding="utf-8")
    for stage in [] if pages else dealt(number, parts):
        rows.append(run(stage, number, parts, where))
        PAGE.write_text(page(rows, *earlier), encoding="utf-8")  # a night may be cut short
    print(f"\n{PAGE.read_text(encoding='utf-8')}")
    raise typer.Exit(any(row.result == "failed" for row in rows))


if __name__ == "__main__":
    typer.run(main)
