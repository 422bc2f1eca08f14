"""Are more look-ups answered from a whole text, or from chunks that are chosen for the question?

    python scripts/studies/lookups.py demo -o lookups.csv

Texts: files of Python's standard library, packed to 15,000 tokens. Look-ups: constants in them whose value the model
completes after ``NAME =`` where it reads 1,000 tokens around the definition and nothing else. The same question is then
answered from the whole text (Self-Extend, read once for all questions) and from selections of two sizes (within the
trained window). Finished look-ups are kept: the same command goes on after an interruption.
"""

from __future__ import annotations

import csv
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from typer import Argument, Option

sys.path.insert(0, str(Path(__file__).parents[2]))

from ctxext.cli.options import run_script
from ctxext.core.patching import patch
from ctxext.measuring.checkpoint import load_checkpoint
from ctxext.serving.ask import UNSURE, ReadText
from ctxext.serving.selected import select, tokens_in
from scripts.bench import claim, machine, markdown_table
from scripts.studies.unsure import DEFINITION, Lookup, library

TOKENS, AROUND, SIZES, NEW = 15_000, 1000, (1536, 4096), 12
WHOLE = "whole"


class Answer(NamedTuple):
    """A row of the results: a look-up by one reading; ``right`` is yes or no."""

    name: str
    text: int
    place: float
    reading: str
    right: str
    probability: float
    seconds: float
    answer: str


class Packed(NamedTuple):
    """A text, and the constants in it with the character at which each definition begins."""

    text: str
    lookups: tuple[tuple[Lookup, int], ...]


def packed(tokenizer: Any) -> Iterator[Packed]:
    """Pack whole files, drawn with a fixed seed, into texts; a name that is defined twice is not asked for."""
    draw = random.Random(73)
    parts, size = list[str](), 0
    for file in library(draw):
        part = f"# {file.name}\n" + file.read_text(encoding="utf-8", errors="replace")
        count = len(tokenizer(part)["input_ids"])
        if not 1000 <= count <= 5000 or not any(DEFINITION.match(line) for line in part.splitlines()):
            continue
        if size + count > TOKENS:
            yield Packed("\n".join(parts), tuple(_lookups("\n".join(parts), draw)))
            parts, size = [], 0
        parts, size = [*parts, part], size + count


def _lookups(text: str, draw: random.Random) -> Iterator[tuple[Lookup, int]]:
    found, at = dict[str, list[tuple[Lookup, int]]](), 0
    for line in text.splitlines(keepends=True):
        if (match := DEFINITION.match(line.rstrip("\n"))) is not None:
            found.setdefault(match[1], []).append((Lookup(match[1], match[2], ()), at))
        at += len(line)
    single = [places[0] for places in found.values() if len(places) == 1]
    yield from draw.sample(single, min(12, len(single)))


def around(tokenizer: Any, text: str, at: int) -> str:
    """Return 1,000 tokens of a text around a character, which stands at three quarters of them."""
    _, starts = tokens_in(tokenizer, text, "Take another checkpoint.")
    place = sum(first < at for first in starts)
    begin = max(0, min(place - AROUND * 3 // 4, len(starts) - AROUND))
    return text[starts[begin] : (starts[begin + AROUND] if begin + AROUND < len(starts) else len(text))]


def read_rows(path: Path) -> list[Answer]:
    """Return the finished answers of a file."""
    with path.open(encoding="utf-8", newline="") as file:
        numbers = {"place": float, "probability": float, "seconds": float, "text": int}
        rows = [row | {name: kind(row[name]) for name, kind in numbers.items()} for row in csv.DictReader(file)]
    return [Answer(**row) for row in rows]


def finished(answers: Sequence[Answer]) -> set[tuple[int, str]]:
    """Return the look-ups that each reading has answered, by their text and name."""
    return {(answer.text, answer.name) for answer in answers if answer.reading == WHOLE}


def table(answers: Sequence[Answer]) -> str:
    """Return what each reading answered, of the look-ups that the model answers where it reads nothing else."""
    rows, done = [], finished(answers)
    for reading in dict.fromkeys(answer.reading for answer in answers):
        own = [answer for answer in answers if answer.reading == reading and (answer.text, answer.name) in done]
        right, wrong = ([answer for answer in own if answer.right == so] for so in ("yes", "no"))
        seconds = statistics.fmean(answer.seconds for answer in own)
        unsure = [sum(answer.probability < UNSURE for answer in some) for some in (right, wrong)]
        counts = [f"{of} of {len(some)}" for of, some in zip(unsure, (right, wrong), strict=True)]
        rows.append([reading, f"{len(right)} of {len(own)}", f"{seconds:.1f}", *counts])
    columns = ["read", "right", "seconds a question", "right ones called unsure", "wrong ones called unsure"]
    return markdown_table(f"# {len(done)} look-ups", columns, rows, [machine("cpu")])


def study(
    checkpoint: Annotated[str | None, Argument(help="A checkpoint; the bundled one without it.")] = None,
    number: Annotated[int, Option("-n", help="Look-ups, at most; Python 3.11 has 32.", min=1)] = 40,
    output: Annotated[Path, Option("-o", help="CSV file.")] = Path("lookups.csv"),
) -> None:
    """Ask for constants by every reading, and print the table."""
    loaded = load_checkpoint(checkpoint)
    claim(output, "lookups.py", loaded)
    model, tokenizer = loaded.model, loaded.tokenizer
    patch(model, "self_extend", factor=2)  # inside the trained window as before, bit for bit
    known = read_rows(output) if output.exists() else []
    with output.open("a", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if not known:
            writer.writerow(Answer._fields)

        def ask(read: ReadText, lookup: Lookup, number: int, place: float, reading: str, spent: float) -> Answer:
            start = time.perf_counter()
            said = read.ask(f"{lookup.name} =")
            seconds, right = time.perf_counter() - start + spent, "yes" if lookup.is_in(said) else "no"
            answer = Answer(
                lookup.name,
                number,
                round(place, 3),
                reading,
                right,
                round(read.probability, 3),
                round(seconds, 2),
                said,
            )
            known.append(answer)
            writer.writerow(answer)
            file.flush()
            return answer

        def of(text: str) -> ReadText:
            return ReadText(model, tokenizer, text, (), NEW, completes=True)

        for at, one in enumerate(packed(tokenizer)):
            able = []
            for lookup, begin in one.lookups:
                if len(finished(known)) + len(able) >= number:
                    break
                earlier = [a for a in known if (a.text, a.name) == (at, lookup.name)]
                if any(a.reading == WHOLE for a in earlier):
                    continue
                alone = next((a for a in earlier if a.reading == "around"), None) or ask(
                    of(around(tokenizer, one.text, begin)), lookup, at, begin / len(one.text), "around", 0.0
                )
                able += [(lookup, begin / len(one.text))] * (alone.right == "yes")
            if able:
                whole, start = of(one.text), time.perf_counter()
                whole.read()
                spent = (time.perf_counter() - start) / len(able)
                for lookup, place in able:
                    for size in SIZES:
                        start = time.perf_counter()
                        part = of(select(tokenizer, one.text, [f"{lookup.name} ="], size)[0].text)
                        ask(part, lookup, at, place, f"selected {size}", time.perf_counter() - start)
                    ask(whole, lookup, at, place, WHOLE, spent)
            print(f"{len(finished(known))} of {number} look-ups", file=sys.stderr)
            if len(finished(known)) >= number:
                break
    print(table(known), end="")


if __name__ == "__main__":
    run_script(study)
