"""Where does a longer window beat choosing what to read? The ends of long texts, by how much they repeat from afar.

    python scripts/studies/selecting.py --text kinds.parquet --text code.parquet --skip 0 -n 100 -o study
    python scripts/studies/selecting.py --text kinds.parquet --text code.parquet --skip 0 -n 100 --total 64K -o far

The last positions of each text, a quarter of the trained window, are read from the best of four truncations, from
chunks that are chosen within the trained window (``ctxext.measuring.selection``, one choice for the end), and from
twice the window by a method. Of texts longer than that, twice the window is the newest part, or as much that is chosen
from all. Everything finished is kept in the output folder: the same command goes on, also with more texts.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor
from typer import Option

sys.path.insert(0, str(Path(__file__).parents[2]))

from ctxext.cli.eval.common import Session
from ctxext.cli.options import SourceOptions, TextOptions, grouped, run_script, token_count
from ctxext.evaluation.report.figures import COLOURS, DASHED, INK, draw_grid, saved_figure
from ctxext.measuring.forward import turning_point
from ctxext.measuring.journal import Journal
from ctxext.measuring.readings import Reader, Readings, chosen_methods
from ctxext.measuring.selection import selection_windows
from ctxext.measuring.statistics import grouped_difference
from ctxext.measuring.survey import LossJob, Survey
from ctxext.measuring.truncation import SELECTED, TRUNCATED, UNPATCHED, tail_windows
from ctxext.texts.corpus import TokenisedDocument
from ctxext.texts.repeats import CLASSES, Likeness, far_repeats, kept, likeness_of
from scripts.bench import machine, markdown_table

CHOSEN = "chosen for it"  # of a text that is longer than the extended window


class Ends(NamedTuple):
    """The end of one text.

    Args:
        repeats: share of it that repeats from afar.
        losses: of each reading, [scored], by name.
        seconds: of each reading.
    """

    name: str
    repeats: float
    losses: dict[str, Tensor]
    seconds: dict[str, float]


def jobs_of(
    readers: Sequence[Reader], text: TokenisedDocument, total: int, trained: int, point: int
) -> dict[str, LossJob]:
    """Return the job of each reading of one text, by name."""
    quarter, jobs = trained // 4, dict[str, LossJob]()
    span: dict[str, Any] = {"start": total - quarter, "positions": total, "prefix": text.prefix}
    for reader in readers:
        reading = reader.reading
        window = reading.window or (trained if reading.name == SELECTED else 2 * trained)
        ways = {} if reading.name == SELECTED else {reading.name: tail_windows(window, **span)}
        if reading.window is None and total > window:
            name = SELECTED if reading.name == SELECTED else f"{reading.name}, {CHOSEN}"
            ways[name] = selection_windows(text.input_ids, window=window, block=quarter, **span)
        for name, windows in ways.items():
            jobs[name] = LossJob.of(reader, text, windows, name=f"{name}, {text.name}", turning_point=point)
    return jobs


def by_class(ends: Sequence[Ends]) -> Iterator[tuple[Likeness, list[Ends]]]:
    """Yield the classes that have texts here, with these."""
    for each in CLASSES:
        if members := [end for end in ends if likeness_of(end.repeats) == each]:
            yield each, members


def short_of(ends: Sequence[Ends]) -> str:
    """Return the truncation that predicts these ends best."""
    cuts = [name for name in ends[0].losses if name.startswith(TRUNCATED)]
    return min(cuts, key=lambda name: sum(end.losses[name].double().mean().item() for end in ends))


def gain(end: Ends, name: str, base: str) -> float:
    """Return the nats per token by which a reading predicts an end better than another does."""
    return (end.losses[base].double().mean() - end.losses[name].double().mean()).item()


def against(ends: Sequence[Ends], name: str, base: Sequence[str]) -> str:
    """Return the mean gain over the best of some readings, for texts of a class, with its standard error."""
    best = min(base, key=lambda other: sum(end.losses[other].double().mean().item() for end in ends))
    groups = ([end.losses[one] for end in ends] for one in (best, name))
    found = grouped_difference(*groups, over="texts", baselines=len(base))
    return f"{found.mean:+.3f} ± {found.standard_error:.3f}"


def tables(ends: Sequence[Ends], methods: Sequence[str], total: int) -> str:
    """Return a row for each class of texts, and for each text."""
    rows, names = [], [SELECTED, *methods]
    for each, members in by_class(ends):
        cut = short_of(members)
        gains = [against(members, name, [cut]) for name in names] if len(members) > 1 else ["" for _ in names]
        better = against(members, methods[0], [cut, SELECTED]) if len(members) > 1 else ""
        rows.append([f"below {each.below:.0%}", str(len(members)), cut, *gains, better])
    header = ["repeats from afar", "texts", "best truncation", *names, f"{methods[0]} over the better of both"]
    classes = markdown_table(f"Gain over the best truncation at {total:,} tokens; {machine('cpu')}", header, rows)
    seconds = {name: sum(end.seconds[name] for end in ends) / len(ends) for name in ends[0].seconds}
    return classes + "\nSeconds a text: " + ", ".join(f"{name} {each:.0f}" for name, each in seconds.items()) + "\n"


def write_rows(path: Path, ends: Sequence[Ends], methods: Sequence[str]) -> None:
    """Write a row a text, those that repeat most first."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        names = [*dict.fromkeys([*ends[0].losses])]
        writer.writerow(["text", "repeats from afar", "predicted from", "predicted to", *names])
        for end in sorted(ends, key=lambda end: -end.repeats):
            low, high = likeness_of(end.repeats).gain
            losses = [f"{end.losses[name].double().mean().item():.4f}" for name in names]
            writer.writerow([end.name, f"{end.repeats:.1%}", f"{low:+.2f}", f"{high:+.2f}", *losses])


def draw(path: Path, ends: Sequence[Ends], method: str, title: str) -> None:
    """Draw what a choice and what a longer window gain on each text, joined, by how much it repeats."""
    with saved_figure(path, (7.2, 4.4), title) as figure:
        panel = figure.subplots()
        panel.axhline(0, color=COLOURS[TRUNCATED], lw=1.4, ls=DASHED, zorder=1)
        for _, members in by_class(ends):
            cut = short_of(members)
            for end in members:
                across, gains = 100 * end.repeats + 1, [gain(end, name, cut) for name in (SELECTED, method)]
                panel.plot([across] * 2, gains, color=INK, lw=0.8, alpha=0.4, zorder=2)
                panel.scatter(across, gains[0], s=30, facecolor="white", edgecolor=INK, zorder=3)
                panel.scatter(across, gains[1], s=34, color=COLOURS[method.split()[0]], zorder=4)
        panel.set_xscale("log")
        ticks = (0, 1, 2, 5, 10, 20, 50, 100)
        panel.set_xticks([tick + 1 for tick in ticks], [f"{tick}" for tick in ticks])
        panel.set_xlabel("last tokens that repeat from afar, percent")
        panel.set_ylabel("gain over the best truncation, nats per token")
        draw_grid(panel, "Each text: ring, chunks chosen within the window; filled, twice the window")


@grouped
def main(
    *,
    texts: TextOptions,
    output: Annotated[Path, Option("--output", "-o", help="Folder for what is finished, the table and the figure.")],
    total: Annotated[
        int | None, Option(help="Tokens of each text; default twice the window.", parser=token_count)
    ] = None,
    method: Annotated[str, Option("--method", "-m", help="The method that reads twice the window.")] = "self_extend",
    title: Annotated[str, Option(help="Of the figure.")] = "A longer window, or choosing what to read",
    source: SourceOptions,
) -> None:
    """Measure truncation, choosing and an extended window at the ends of long texts."""
    session = Session(source)
    session.load_weights()
    checkpoint, console = session.checkpoint, session.console
    model = Readings(checkpoint, select=True)
    trained = model.trained_length
    total = total or 2 * trained
    readings = model.find(chosen_methods(checkpoint.subject, [method], [2.0]))[0]
    used = [one for one in readings if one.name != UNPATCHED and (one.window or one.name != TRUNCATED)]
    corpus = texts.read(checkpoint, tokens=total + 1)
    point, readers = turning_point(checkpoint.subject), [Reader(reading, model, ()) for reading in used]
    jobs = {text.name: jobs_of(readers, text, total, trained, point) for text in corpus.documents}
    every = [job for each in jobs.values() for job in each.values()]
    journal = Journal(output / "cells.jsonl", session.group.process, identity="study.json")
    survey = Survey("selecting.py", checkpoint, every, journal=journal, group=session.group)
    console.print(f"{len(jobs)} texts of {total:,} tokens.")
    session.measure(survey)
    lines, losses = journal.finished(), survey.losses()
    ends = [
        Ends(
            text.name,
            far_repeats(text.input_ids[0, :total].tolist(), kept(trained), trained // 4),
            {name: losses[job.key] for name, job in jobs[text.name].items()},
            {name: lines[job.key]["seconds"] for name, job in jobs[text.name].items()},
        )
        for text in corpus.documents
    ]
    methods = [name for name in ends[0].losses if name != SELECTED and not name.startswith(TRUNCATED)]
    written = tables(ends, methods, total)
    (output / "table.md").write_text(written, encoding="utf-8")
    write_rows(output / "selecting.csv", ends, methods)
    draw(output / "selecting.png", ends, methods[0], title)
    console.print(written, markup=False, soft_wrap=True)


if __name__ == "__main__":
    with torch.inference_mode():
        run_script(main)
