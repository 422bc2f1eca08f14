"""Walk points from fresh seeds for some minutes, shrink what fails, and keep it for the tests of the day.

    python -m tests.referee --minutes 30

``points.json`` holds what was found: a point with an issue is a known failure, and the run fails once it is right; all
other points must be right. Exit status 1 for a point that fails and is not known.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

FOUND = Path(__file__).with_name("points.json")


def walked(seed: int) -> tuple[int, str | None]:
    """Return a seed and why its point fails."""
    from tests.referee.point import drawn
    from tests.referee.walk import verdict

    return seed, verdict(drawn(seed))


def kept() -> list[dict[str, Any]]:
    """Return the points that were found, each with the sentence of its failure, and its issue while it is open."""
    found: list[dict[str, Any]] = json.loads(FOUND.read_text(encoding="utf-8"))
    return found


def _quiet() -> None:
    os.environ |= {"OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "critical", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    warnings.simplefilter("ignore")


def main() -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=time.time_ns() // 10**9, help="first seed; by itself the clock")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--first", action="store_true", help="stop at the first failure, and keep nothing")
    how = parser.parse_args()
    _quiet()
    from tests.referee.point import Point, drawn, shrunk
    from tests.referee.walk import verdict

    known = {json.dumps(entry["point"], sort_keys=True) for entry in kept() if entry.get("issue")}
    stop, failed, counts = time.monotonic() + 60 * how.minutes, list[tuple[Point, str]](), Counter[str]()
    seeds = iter(range(how.seed, how.seed + 10**9))
    with multiprocessing.get_context("spawn").Pool(how.jobs, initializer=_quiet) as pool:
        while time.monotonic() < stop and not (how.first and failed):
            for seed, reason in pool.imap_unordered(walked, [next(seeds) for _ in range(40)]):
                point = drawn(seed)
                counts[point.kind] += 1
                if reason is not None:
                    failed.append((point, reason))
                    print(f"seed {seed}: {reason}\n  {point}", flush=True)
    print(f"{counts.total()} points from seed {how.seed} in {how.minutes:g} minutes: {dict(counts)}")
    fresh = 0
    for point, reason in failed if not how.first else ():
        small = shrunk(point, lambda smaller: verdict(smaller) is not None)
        if json.dumps(small.to_dict(), sort_keys=True) in known:
            print(f"known: {reason}")
            continue
        fresh += 1
        entry = {"point": small.to_dict(), "found": verdict(small)}
        FOUND.write_text("[\n" + ",\n".join(map(json.dumps, [*kept(), entry])) + "\n]\n", encoding="utf-8")
        print(f"shrunk: {entry['found']}\n  {small}")
    for entry in kept() if not how.first else ():
        if entry.get("issue") and verdict(Point.from_dict(entry["point"])) is None:
            fresh += 1
            print(f"right now, take the issue from points.json: {entry['found']}")
    print(
        f"{len(failed)} failed, {fresh} of them not known" if failed or fresh else "all right, or refused with reason"
    )
    return 1 if fresh or (how.first and failed) else 0


if __name__ == "__main__":
    sys.exit(main())
