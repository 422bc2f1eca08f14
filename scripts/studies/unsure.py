"""Does the mean probability of an answer tell right answers from wrong ones, and which limit does it best?

    python scripts/studies/unsure.py demo -n 48 -o unsure.csv

Look-ups: constants of Python's standard library, one of each file. The model reads some lines around the definition,
once with it and once without every line that has the name, and completes ``NAME =`` or answers a question in the chat
template. Half of the constants choose the limit, by the mean of two shares: of right answers above it, and of all
others below it; the other half judges it. Finished look-ups are kept: the same command goes on after an interruption.
"""

from __future__ import annotations

import csv
import random
import re
import statistics
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, NamedTuple

from typer import Argument, Option

sys.path.insert(0, str(Path(__file__).parents[2]))

from ctxext.cli.options import run_script
from ctxext.measuring.checkpoint import load_checkpoint
from ctxext.serving.ask import ReadText
from scripts.bench import claim, machine, markdown_table

DEFINITION = re.compile(
    r"^([A-Z][A-Z0-9_]{4,}) = ([0-9][0-9xXa-fA-F_.*]*|'[^'\\]{2,16}'|\"[^\"\\]{2,16}\")\s*(?:#.*)?$"
)
LINES = 60
"""Lines of a text: around 700 tokens, far inside every trained window."""
LIMITS = tuple(step / 20 for step in range(1, 20))


class Lookup(NamedTuple):
    """A constant, the value that it has, and the lines around its definition."""

    name: str
    value: str
    lines: tuple[str, ...]

    def text(self, form: str) -> str:
        """The lines, with the definition or without each line that has the name."""
        return "\n".join(line for line in self.lines if form == "said" or self.name not in line)

    def is_in(self, answer: str) -> bool:
        """Return whether an answer says the value, as a word."""
        return re.search(rf"(?<!\w){re.escape(self.value.strip(chr(34) + chr(39)))}(?!\w)", answer) is not None


class Answer(NamedTuple):
    """A row of the results; ``right`` is yes or no."""

    name: str
    asked: str
    form: str
    right: str
    probability: float
    answer: str

    @property
    def is_right(self) -> bool:
        """True if the text says the value, and the model found it."""
        return (self.form, self.right) == ("said", "yes")


def library(draw: random.Random) -> list[Path]:
    """Return the files of the standard library, without tests, in an order that is drawn."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("**/*.py"))
    files = [file for file in files if not {"site-packages", "test", "tests"} & set(file.parts)]
    return draw.sample(files, len(files))


def drawn() -> Iterator[Lookup]:
    """Draw constants of the standard library with a fixed seed, one of each file."""
    draw = random.Random(71)
    for file in library(draw):
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        places = [number for number, line in enumerate(lines) if DEFINITION.match(line)]
        if len(lines) >= LINES and places:
            place = draw.choice(places)
            first = min(max(0, place - draw.randrange(LINES)), len(lines) - LINES)
            match = DEFINITION.match(lines[place])
            assert match is not None
            yield Lookup(match[1], match[2], tuple(lines[first : first + LINES]))


def halves(answers: Sequence[Answer]) -> list[list[Answer]]:
    """Return the answers about every other constant, and those about the constants between."""
    names = list(dict.fromkeys(answer.name for answer in answers))
    return [[answer for answer in answers if answer.name in names[part::2]] for part in (0, 1)]


def chosen_limit(answers: Sequence[Answer]) -> float:
    """Return the limit that parts right answers from all others best."""
    right, others = ([a.probability for a in answers if a.is_right is so] for so in (True, False))
    return max(LIMITS, key=lambda limit: statistics.fmean(p >= limit for p in right) + told(others, limit))


def told(probabilities: Sequence[float], limit: float) -> float:
    """Return the share of answers that are called unsure."""
    return statistics.fmean(probability < limit for probability in probabilities)


OUTCOMES = {
    ("said", "yes"): "right",
    ("said", "no"): "wrong",
    ("not said", "no"): "made up",
    ("not said", "yes"): "guessed",
}


def table(answers: Sequence[Answer], limit: float) -> str:
    """Return what became of the answers, by how they were asked, and the share that is called unsure."""
    rows = []
    for asked in ("completed", "question"):
        for (form, right), outcome in OUTCOMES.items():
            found = [a.probability for a in answers if (a.asked, a.form, a.right) == (asked, form, right)]
            if len(found) > 1:
                low, middle, high = statistics.quantiles(found, n=4)
                spread = f"{middle:.2f} ({low:.2f} to {high:.2f})"
                rows.append([asked, form, outcome, str(len(found)), spread, f"{told(found, limit):.0%}"])
    columns = ["asked", "the text", "answer", "answers", "probability: median (middle half)", f"below {limit:g}"]
    return markdown_table("# Unsure answers", columns, rows, [machine("cpu")])


def read_rows(path: Path) -> list[Answer]:
    """Return the finished answers of a file."""
    with path.open(encoding="utf-8", newline="") as file:
        return [Answer(**row | {"probability": float(row["probability"])}) for row in csv.DictReader(file)]


def study(
    checkpoint: Annotated[str | None, Argument(help="A checkpoint; the bundled one without it.")] = None,
    number: Annotated[int, Option("-n", help="Constants.", min=4)] = 48,
    output: Annotated[Path, Option("-o", help="CSV file.")] = Path("unsure.csv"),
) -> None:
    """Ask for each constant, and print the table of the half that did not choose the limit."""
    loaded = load_checkpoint(checkpoint)
    claim(output, "unsure.py", loaded)
    answers = read_rows(output) if output.exists() else []
    with output.open("a", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if not answers:
            writer.writerow(Answer._fields)
        for lookup in islice(drawn(), number):
            for asked, form in ((asked, form) for asked in ("completed", "question") for form in ("said", "not said")):
                if any((a.name, a.asked, a.form) == (lookup.name, asked, form) for a in answers):
                    continue
                completes = asked == "completed"
                text = ReadText(loaded.model, loaded.tokenizer, lookup.text(form), new=32, completes=completes)
                answer = text.ask(f"{lookup.name} =" if completes else f"What is the value of {lookup.name}?")
                value = answer.partition("#")[0].strip()
                right = "yes" if lookup.is_in(answer) and (value == lookup.value or not completes) else "no"
                answers.append(Answer(lookup.name, asked, form, right, round(text.probability, 4), answer))
                writer.writerow(answers[-1])
                file.flush()
                print(*answers[-1][:5], repr(answer[:60]), sep="  ")
    choosing, judging = halves(answers)
    print(f"\n{table(judging, chosen_limit(choosing))}")


if __name__ == "__main__":
    run_script(study)
