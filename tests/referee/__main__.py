"""Walk points from fresh seeds for some minutes, shrink what fails, and keep it for the tests of the day.

    python -m tests.referee --minutes 30

``points.json`` holds what was found: a point with an issue is a known failure, and the run fails once it is right; all
other points must be right. Exit status 1 for a point that fails and is not known.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from tests.referee.point import Point, drawn, shrunk
from tests.referee.walk import quiet, verdict, walked

FOUND = Path(__file__).with_name("points.json")


def kept() -> list[dict[str, Any]]:
    """Return the points that were found, each with the sentence of its failure, and its issue while it is open."""
    return [each | {"point": Point(**each["point"])} for each in json.loads(FOUND.read_text(encoding="utf-8"))]


def main(
    minutes: float = 30,
    seed: Annotated[int | None, typer.Option(help="First seed; by itself the clock.")] = None,
    jobs: int = os.cpu_count() or 1,
    first: Annotated[bool, typer.Option("--first", help="Stop at the first failure, and keep nothing.")] = False,
) -> None:
    """Walk points from fresh seeds, and keep those that fail."""
    seed = time.time_ns() // 10**9 if seed is None else seed
    quiet()
    known = [entry["point"] for entry in kept() if entry.get("issue")]
    stop, failed, counts = time.monotonic() + 60 * minutes, list[tuple[Point, str]](), Counter[str]()
    seeds = iter(range(seed, seed + 10**9))
    with multiprocessing.get_context("spawn").Pool(jobs, initializer=quiet) as pool:
        while time.monotonic() < stop and not (first and failed):
            for number, reason in pool.imap_unordered(walked, [next(seeds) for _ in range(40)]):
                point = drawn(number)
                counts[point.kind] += 1
                if reason is not None:
                    failed.append((point, reason))
                    print(f"seed {number}: {reason}\n  {point}", flush=True)
    print(f"{counts.total()} points from seed {seed} in {minutes:g} minutes: {dict(counts)}")
    fresh = 0
    for point, reason in failed if not first else ():
        small = shrunk(point, lambda smaller: verdict(smaller) is not None)
        if small in known:
            print(f"known: {reason}")
            continue
        fresh += 1
        line = json.dumps({"point": vars(small), "found": verdict(small)})
        FOUND.write_text(FOUND.read_text("utf-8").replace("\n]", f",\n{line}\n]"), encoding="utf-8")
        print(f"shrunk: {line}")
    for entry in kept() if not first else ():
        if entry.get("issue") and verdict(entry["point"]) is None:
            fresh += 1
            print(f"right now, take the issue from points.json: {entry['found']}")
    print(
        f"{len(failed)} failed, {fresh} of them not known" if failed or fresh else "all right, or refused with reason"
    )
    raise typer.Exit(1 if fresh or (first and failed) else 0)


if __name__ == "__main__":
    typer.run(main)
