"""The files that the laboratory ends in: one page that needs nothing else, its figures, and the numbers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from ctxext.evaluation.labels import label_of
from ctxext.evaluation.report.comparison_tables import NONE, TextTable, terminal_table
from ctxext.evaluation.report.style import rendered, require_report, write_pages
from ctxext.laboratory.claims import LabVerdict, verdicts
from ctxext.laboratory.figures import CLASSIC, drawings, name_of
from ctxext.laboratory.result import LEAST, LabReading, LabResult, over_seeds
from ctxext.laboratory.subjects import ROPE
from ctxext.laboratory.tasks import MULTIPLES, REACH, TASKS, TEXT

PAGE, DATA = "lab.html", "lab.json"
LONGER = (1, 2, 4, REACH)
# Perplexity at 3512 words of WikiText-103 after training on 512: Press et al., arXiv:2108.12409.
PUBLISHED = {"alibi": 18.4, "t5_bias": 22.9, ROPE: 35.5, "sinusoidal": 179.0}


def write_page(result: LabResult, output: Path) -> list[Path]:
    """Write all files and return their paths, the page first.

    Raises:
        ResultsError: a file cannot be written.
        InvalidParameterError: matplotlib or jinja2 is not installed.
    """
    require_report()
    texts = {PAGE: page(result), DATA: json.dumps(result.to_dict(), ensure_ascii=False) + "\n"}
    return write_pages(output, texts, drawings(result))


def page(result: LabResult) -> str:
    """All of it as one HTML document without any reference to another."""
    judged = verdicts(result)
    return rendered(
        "lab.html.jinja",
        "ctxext.laboratory",
        title=_title(result),
        result=result,
        headline=headline(judged),
        learned=learned_table(result),
        figures=[(figure, figure.svg()) for figure in drawings(result)],
        classic=classic_table(result) if TEXT in result.tasks else None,
        claims=claims_table(judged),
        tables=[*([text_table(result)] if TEXT in result.tasks else []), *puzzle_tables(result)],
        facts=_facts(result),
        least=LEAST,
        seeds=_seeds(result),
    )


def show_result(result: LabResult, console: Console) -> None:
    """What matters, in a terminal: whether order was learned comes first."""
    judged = verdicts(result)
    claims = claims_table(judged)  # its sources stand on the page, where there is room
    claims = replace(claims, header=claims.header[:-1], rows=tuple(row[:-1] for row in claims.rows))
    tables = [learned_table(result), *([classic_table(result)] if TEXT in result.tasks else []), claims]
    for table in tables:
        console.print()
        console.print(terminal_table(table))
        console.print(f"\n{table.caption}", style="dim")
    console.print(f"\n{headline(judged)}", style="bold")


def headline(judged: Sequence[LabVerdict]) -> str:
    """How many claims stand."""
    answers = ("reproduced", "not at this size", "contradicted", "not measured")
    counts = [(sum(one.answer == answer for one in judged), answer) for answer in answers]
    told = ", ".join(f"{count} {answer}" for count, answer in counts if count)
    return f"Of {len(judged)} published claims: {told}."


def _title(result: LabResult) -> str:
    count = len({one.subject for one in result.readings})
    who = f"{count} ways to know the order of tokens" if count > 1 else name_of(result.readings[0])
    return f"{who}, trained short and tested {REACH} times as long"


def _seeds(result: LabResult) -> int:
    return max(len(one.seeds) for one in result.readings)


def _mean(result: LabResult, reading: LabReading, multiple: float | int) -> str:
    mean, error = over_seeds(result.at(reading, multiple))
    if reading.task != TEXT:
        mean, error = 100 * mean, None if error is None else 100 * error
    digits = 3 if reading.task == TEXT else 0
    return f"{mean:.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")


def learned_table(result: LabResult) -> TextTable:
    """Whether order was learned inside the trained length, by everyone: what extrapolation means anything for."""
    plain = list(dict.fromkeys(one.subject for one in result.readings))
    rows = []
    for name in plain:
        found = [result.find(task, name) for task in result.tasks]
        first = next(one for one in found if one is not None)
        cells = [NONE if one is None else _learned(result, one) for one in found]
        rows.append((name_of(first), f"{first.parameters:,}", *cells))
    names = ["shuffled text costs" if task == TEXT else f"{task}, above chance" for task in result.tasks]
    return TextTable(
        caption=f"Did it learn order at all? Inside the trained length: how many nats per byte the loss rises when "
        f"what was read before is shuffled, but for the last byte; and the share of a puzzle's answers that is right, "
        f"above chance; ± standard error over windows or puzzles. In brackets where it is below {LEAST} or not above "
        f"its error: there, what happens beyond the window says nothing. Weights are those of the first task.",
        header=("", "weights", *names),
        rows=tuple(rows),
        emphasis=tuple("" for _ in rows),
    )


def _learned(result: LabResult, reading: LabReading) -> str:
    found = str(result.evidence(reading))
    return found if result.has_learned(reading) else f"({found})"


def classic_table(result: LabResult) -> TextTable:
    """The table that textbooks and documents have, beside the published order."""
    wanted = ("sinusoidal", "learned", "t5_bias", ROPE, f"{ROPE} + pi", f"{ROPE} + ntk", f"{ROPE} + yarn", "alibi")
    found = [one for one in (result.find(TEXT, name) for name in wanted) if one is not None]
    last = {one.name: result.at(one, REACH).mean().item() for one in found if one.name in PUBLISHED}
    own, theirs = sorted(last, key=lambda name: last[name]), sorted(PUBLISHED, key=lambda name: PUBLISHED[name])
    rows = [
        (
            name_of(one),
            f"{one.steps:,}",
            *(_mean(result, one, multiple) for multiple in LONGER),
            f"{own.index(one.name) + 1}" if one.name in own else NONE,
            f"{theirs.index(one.name) + 1} ({PUBLISHED[one.name]:g})" if one.name in PUBLISHED else NONE,
        )
        for one in found
    ]
    return TextTable(
        caption=f"Nats per byte of the last doubling before each length, in multiples of the trained {result.trained} "
        f"bytes{_with_error(result)}. Other lengths are other bytes: compare down a column. Published: place at 3512 "
        f"words after training on 512, and the perplexity there (Press et al., arXiv:2108.12409, WikiText-103). "
        f"Learned rows behind the window were never trained, and no perplexity is published for them.",
        header=("", "steps", *(f"at {one}x" for one in LONGER), "place here", "published"),
        rows=tuple(rows),
        emphasis=tuple("reference" if one.extension else "" for one in found),
    )


def _with_error(result: LabResult) -> str:
    count = _seeds(result)
    return f", ± standard error over {count} seeds" if count > 1 else " (one seed, no error)"


def claims_table(judged: Sequence[LabVerdict]) -> TextTable:
    """A verdict per claim."""
    rows = []
    for one in judged:
        gap = NONE if one.advantage is None else f"{one.advantage} (95 %: ± {one.advantage.margin:.3f})"
        where = f"{', '.join(one.claim.tasks)} at {one.claim.multiple:g}x"
        answer = one.answer + (f": {one.why}" if one.why else "")
        rows.append((one.claim.says, where, gap, answer, one.claim.source))
    return TextTable(
        caption="What was published, and whether this size shows it. The difference is in favour of the claim, on the "
        "same windows or puzzles, in nats per byte (text) or as a share of the answers; its error knows seeds and "
        "windows. Reproduced: above its 95 percent interval; contradicted: below; not at this size: within, or one of "
        "the two did not learn order. Against every other the difference is the one to the best of them; each must be "
        "beaten, and a contradiction divides the 5 percent among them.",
        header=("claim", "where", "difference", "verdict", "source"),
        rows=tuple(rows),
        emphasis=tuple("best" if one.answer == "reproduced" else "" for one in judged),
    )


def text_table(result: LabResult) -> TextTable:
    """Everyone on text."""
    rows = []
    for one in result.of(TEXT):
        truncated = over_seeds(result.truncated_at(one, REACH))[0] if one.truncated else None
        rows.append(
            (
                name_of(one),
                f"{one.parameters:,}",
                f"{one.steps:,}" if not one.extension else "none more",
                f"{one.seconds:,.0f}" if not one.extension else NONE,
                *(_mean(result, one, multiple) for multiple in LONGER),
                NONE if truncated is None else f"{truncated:.3f}",
            )
        )
    least = min(one.steps for one in result.of(TEXT))
    return TextTable(
        caption=f"All on text: nats per byte as above{_with_error(result)}. Steps: who adds vectors to the "
        f"embeddings, and who has no positions, is trained longer, since that leaves a plateau late; all others take "
        f"{least:,}. Seconds of one processor per seed, the test included. Truncated: the same model at "
        f"{REACH}x, which sees the last {result.trained // 2} to {result.trained} bytes alone; who is worse than that "
        f"gives nothing for its length.",
        header=("", "weights", "steps", "s", *(f"at {one}x" for one in LONGER), f"truncated, {REACH}x"),
        rows=tuple(rows),
        emphasis=tuple("reference" if one.extension else "" for one in result.of(TEXT)),
    )


def puzzle_tables(result: LabResult) -> list[TextTable]:
    """Everyone on each puzzle: answers, and whole puzzles."""
    return [_puzzle_table(result, task) for task in result.puzzles]


def _puzzle_table(result: LabResult, task: str) -> TextTable:
    found = result.of(task)
    rows = [
        (
            name_of(one),
            f"{one.parameters:,}",
            f"{one.steps:,}" if not one.extension else "none more",
            *(f"{_mean(result, one, multiple)}, {_whole(result, one, multiple):.0f}" for multiple in MULTIPLES),
        )
        for one in found
    ]
    return TextTable(
        caption=f"{task}: {TASKS[task].asks}; trained on up to {TASKS[task].trained} symbols. Percent of the answers "
        f"that are right{_with_error(result)}, and, after the comma, of the puzzles without a mistake. Chance: "
        f"{100 * TASKS[task].chance:.0f}.",
        header=("", "weights", "steps", *(f"at {one:g}x" for one in MULTIPLES)),
        rows=tuple(rows),
        emphasis=tuple("reference" if one.extension else "" for one in found),
    )


def _whole(result: LabResult, reading: LabReading, multiple: float | int) -> float:
    return 100 * (result.at(reading, multiple) == 1).double().mean().item()


def _facts(result: LabResult) -> dict[str, str]:
    found = result.provenance
    settings = result.settings
    texts = f"{', '.join(result.documents)}; sha256 {result.text_sha256}"
    return {
        "Preset": result.preset,
        "Model": f"Llama, {settings['text']['layers']} layers of width {settings['text']['hidden']} on text, "
        f"{settings['puzzle']['layers']} of {settings['puzzle']['hidden']} on puzzles",
        "Training": f"AdamW, learning rate {settings['rate']:g} for all, warmup and cosine; text: "
        f"{settings['text_rows']} x {settings['length']} bytes a step; puzzles: about {settings['puzzle_tokens']:,} "
        f"tokens a step",
        **({"Texts": texts} if result.documents else {}),
        "Classic kinds": ", ".join(label_of(name) for name in CLASSIC),
        "Versions": ", ".join(f"{name} {version}" for name, version in found["versions"].items()),
        "Machine": f"{found['machine']}; each cell on one thread",
        "Command": found["command"],
        "Made": f"{found['date']}, {result.seconds:,.0f} s of one processor",
    }
