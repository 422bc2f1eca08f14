"""Break the package in 40 ways drawn from ``mutants.tsv``, and count how many the referee sees.

    python -m tests.referee.mutants            # by the day's cover
    python -m tests.referee.mutants --minutes 30  # by a night

Each line of the file has a path below ``ctxext/``, code in it, and what takes the place of that. Each mutant is
tried on a copy of the package; Ctrl-C loses the one in progress.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import typer

ROOT = Path(__file__).parents[2]
DAY = """
import sys
from tests.referee.__main__ import kept
from tests.referee.point import covering
from tests.referee.walk import verdict
points = [entry["point"] for entry in kept() if "issue" not in entry] + covering()
sys.exit(next((reason for point in points if (reason := verdict(point))), 0))
"""


def drawn(number: int = 40, seed: int = 69) -> list[tuple[str, str, str]]:
    """Return mutants, each as its file, the code in it, and the other code."""
    lines = Path(__file__).with_name("mutants.tsv").read_text(encoding="utf-8").splitlines()
    rows = [tuple(line.split("\t")) for line in lines]
    for path, code, _ in rows:
        assert (ROOT / "ctxext" / path).read_text(encoding="utf-8").count(code) >= 1, (path, code)
    return random.Random(seed).sample(rows, number)  # type: ignore[arg-type]


def seen(mutant: tuple[str, str, str], minutes: float) -> str | None:
    """Return what the referee says of a mutant; None if all is right to it."""
    path, code, other = mutant
    with tempfile.TemporaryDirectory() as folder:
        for part in ("ctxext", "tests", "scripts"):
            shutil.copytree(ROOT / part, Path(folder, part), ignore=shutil.ignore_patterns("__pycache__"))
        file = Path(folder, "ctxext", path)
        file.write_text(file.read_text(encoding="utf-8").replace(code, other, 1), encoding="utf-8")
        night = ["-m", "tests.referee", "--first", "--seed", "69", "--minutes", str(minutes)]
        how = {"cwd": folder, "env": os.environ | {"PYTHONPATH": folder, "OMP_NUM_THREADS": "1"}}
        command = [sys.executable, "-W", "ignore", *(night if minutes else ["-c", DAY])]
        done = subprocess.run(command, capture_output=True, text=True, check=False, **how)  # type: ignore[call-overload]
    said = (done.stdout if minutes else done.stderr).strip().splitlines()
    return None if done.returncode == 0 else next((line for line in said if "seed" in line), said[-1])[:110]


def main(minutes: float = 0, part: str = "1/1") -> None:
    """Try mutants by the day's cover, or by so many minutes of a night each; of a part of them, as 1/2."""
    number, parts = map(int, part.split("/"))
    killed, mutants = 0, drawn()[number - 1 :: parts]
    for mutant in mutants:
        said = seen(mutant, minutes)
        killed += said is not None
        print("survives" if said is None else "killed", *mutant, said, sep=" | ", flush=True)
    print(f"{killed} of {len(mutants)} killed")


if __name__ == "__main__":
    typer.run(main)
