"""Print the tests of a source file, by a table of what covers what, or make that table.

    make test-of FILE=ctxext/core/edits.py   # runs the fewest test files that cover its lines, most lines first
    make test-map                            # tests/map.csv, from a run of make test under coverage (some 15 minutes)

A line counts where a test function runs it in its own process, not where a file is imported. A test file that adds less
than a fiftieth of the lines that all tests cover is left out.
"""

from __future__ import annotations

import csv
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "tests" / "map.csv"
NAME = re.compile(r"(tests(?:\.\w+)*?\.test_\w+)\.")  # of the module in tests.core.test_edits.test_it


def fewest(lines: Mapping[str, set[int]]) -> Iterator[tuple[str, int]]:
    """Yield the test files that together cover what all of them cover, and how many lines each adds."""
    left = set[int]().union(*lines.values())
    least = len(left) / 50
    while left:
        test = max(sorted(lines), key=lambda name: len(lines[name] & left))
        if (added := len(lines[test] & left)) < least:
            return
        yield test, added
        left -= lines[test]


def covered(data: Path) -> Mapping[str, Mapping[str, set[int]]]:
    """Return the lines of each source file by test file, both as paths here, from the data of coverage."""
    from coverage import CoverageData

    found: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    (read := CoverageData(data)).read()
    for file in (name for name in read.measured_files() if name.endswith(".py")):
        for line, contexts in read.contexts_by_lineno(file).items():
            for name in filter(None, map(NAME.match, contexts)):
                found[Path(file).relative_to(ROOT).as_posix()][f"{name[1].replace('.', '/')}.py"].add(line)
    return found


def covering(source: str) -> list[str]:
    """Return the test files of a source file in the table, most lines first."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        return [row["test"] for row in csv.DictReader(file) if row["source"] == source]


if __name__ == "__main__":
    if sys.argv[1:] == ["--make"]:
        lines = covered(ROOT / ".coverage")
        with TABLE.open("w", encoding="utf-8", newline="") as out:
            rows = csv.writer(out, lineterminator="\n")
            rows.writerow(["source", "test", "lines"])
            rows.writerows((source, *row) for source in sorted(lines) for row in fewest(lines[source]))
    elif tests := covering(" ".join(sys.argv[1:])):
        print(*tests)
    else:
        sys.exit(f"tests/map.csv has no {' '.join(sys.argv[1:])!r}. Give a file such as ctxext/core/edits.py.")
