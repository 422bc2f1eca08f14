"""Figures of the laboratory: loss by position over the trained length, and what was right by length."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

from ctxext.evaluation.report.figures import Figure, Line, Panel, heat_panel, lines_panel, paneled
from ctxext.laboratory.result import LabReading, LabResult, blocks_of, over_seeds
from ctxext.laboratory.subjects import ROPE
from ctxext.laboratory.tasks import MULTIPLES, REACH, TASKS, TEXT
from ctxext.measuring.labels import all_of, label_of
from ctxext.measuring.truncation import TRUNCATED

CLASSIC = ("sinusoidal", "learned", "t5_bias", ROPE, "alibi", "nope")
"""The kinds that textbooks compare."""
REFERENCES = (ROPE, "alibi")
"""Readings in every panel, to compare panels by."""
HUES = ("unpatched", "yarn", "ntk", "dynamic_ntk", "dynamic_yarn", "ntk_by_parts", "llama3")
"""Methods whose colours the lines of a panel get: as many as can be told apart."""
TICKS = {1 / 8: "1/8", 1 / 4: "1/4", 1 / 2: "1/2", 1: "1", 2: "2", 4: "4", 8: "8"}


def name_of(reading: LabReading) -> str:
    """Return the label of a reading's subject and of its extension."""
    return " + ".join(label_of(part) for part in reading.name.split(" + "))


def figures(result: LabResult) -> list[Figure]:
    """Return all figures of a result."""
    drawn = [_by_position(result)] if TEXT in result.tasks else []
    return [*drawn, *([_by_length(result)] if result.puzzles else [])]


def _by_position(result: LabResult) -> Figure:
    """Draw readings on text in panels: classic kinds, extensions of rotation, other encodings, recurrent models."""
    readings = result.of(TEXT)
    groups = {
        "What textbooks compare": lambda reading: reading.name in CLASSIC,
        "RoPE, extended without training": lambda reading: reading.subject == ROPE,
        "Newer encodings": lambda reading: reading.kind == "encoding" and reading.name not in CLASSIC,
        "Recurrent models, which need no positions": lambda reading: reading.kind == "recurrent",
    }
    panels: list[Panel] = []
    for title, belongs in groups.items():
        group = list(filter(belongs, readings))
        # More readings than colours go into several panels of about the same size.
        count = math.ceil(len(group) / len(HUES))
        for place in range(count):
            part = group[place * len(group) // count : (place + 1) * len(group) // count]
            others = [reading for reading in readings if reading.name in REFERENCES and reading not in part]
            lines = [_line(result, reading, hue) for reading, hue in zip(part, HUES, strict=False)]
            lines += [_line(result, reading, TRUNCATED) for reading in others]
            panel = lines_panel(
                lines,
                title=title,
                x_label="position / trained length",
                y_label="nats per byte",
                ticks=TICKS,
                doubling=True,
                log=False,
                trained_length=1,
            )
            panels.append(panel)
    seeds = max(len(reading.seeds) for reading in readings)
    band = f" Bands: one standard error over {seeds} seeds." if seeds > 1 else ""
    known = [name_of(reading) for reading in readings if reading.name in REFERENCES]
    dashed = f" Dashed: {all_of(known)}, in panels about others." if known else ""
    return paneled(
        "loss-by-position",
        "Loss by position over the trained length",
        panels,
        across=2,
        caption=f"Nats per byte, by where a byte stands; the trained length is {result.trained} "
        f"bytes.{band}{dashed} Scales differ.",
    )


def _line(result: LabResult, reading: LabReading, hue: str) -> Line:
    """Return the mean loss of each block from 1/8 of the trained length on; before, no model knows anything."""
    points, band = [], []
    for place, (start, stop) in enumerate(itertools.pairwise(blocks_of(result.trained))):
        middle = math.sqrt(max(start, stop / 2) * stop) / result.trained
        if middle >= 1 / REACH:
            mean, error = over_seeds(reading.values[:, :, place])
            points.append((middle, mean))
            band.append((mean - (error or 0.0), mean + (error or 0.0)))
    name = f"+ {label_of(reading.extension)}" if reading.extension else name_of(reading)
    return Line(hue, name, points, band if len(reading.seeds) > 1 else ())


def _by_length(result: LabResult) -> Figure:
    """Draw the share of right answers of each puzzle, the best in the mean over tasks and longer lengths first."""
    readings = {reading.name: reading for reading in result.readings if reading.task != TEXT}
    ranks = {name: result.reciprocal_rank(name) for name in readings}
    labels = {name: f"{name_of(readings[name])} ({ranks[name]:.2f})" for name in sorted(ranks, key=lambda n: -ranks[n])}
    panels = []
    for name in result.puzzles:
        task, cells = TASKS[name], {}
        for reading in sorted(result.of(name), key=lambda reading: -ranks[reading.name]):
            for multiple, length in zip(MULTIPLES, task.lengths(), strict=True):
                share = result.at(reading, multiple).mean().item()
                above = max(0.0, (share - task.chance) / (1 - task.chance))
                cells[labels[reading.name], task.tokens(length)] = above, f"{100 * share:.0f}"
        panels.append(heat_panel(name, cells, trained_length=task.tokens(task.trained)))
    drawn = paneled(
        "right-by-length",
        "What is right, by length",
        panels,
        across=2,
        caption="Percent of the answers, blue: all, red: as many as chance gives; the mean of all seeds. Left of the "
        "rule: lengths of training. The best in the mean over tasks and longer lengths is first (mean reciprocal rank, "
        "in brackets).",
    )
    return replace(drawn, alternative=f"Mean reciprocal ranks: {', '.join(labels.values())}.")
