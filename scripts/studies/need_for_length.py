"""Hold what a longer context is worth against how much a text needs it: a point a text, out of finished studies.

    python scripts/studies/need_for_length.py study=kinds.parquet code-study=code.parquet:"source code" \
        novels-study=novels.parquet:novels:2000 -o need.png

Each study is a folder that ``zero_shot.py`` wrote at twice the trained window, with the file of its texts, and where
the file has no column ``kind``, their kind; last, the tokens that were skipped. Two measures of need are taken before
any extension: how much the unextended model gains at the end of a text from the last 2K tokens to the last 8K, and the
share of those tokens that *repeat from afar*: they belong to a string of six tokens that stands more than three
quarters of a trained window before, and nowhere nearer. The second one needs no model.
"""

from __future__ import annotations

import csv
import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import pyarrow.parquet as parquet
import torch
from safetensors.torch import load_file
from typer import Argument, Option

sys.path.insert(0, str(Path(__file__).parents[2]))

from ctxext.cli.options import run_script
from ctxext.evaluation.report.figures import COLOURS, DASHED, NOTE, draw_grid, saved_figure
from ctxext.measuring.checkpoint import load_checkpoint
from ctxext.measuring.labels import tokens_label
from ctxext.measuring.statistics import ENOUGH_DOCUMENTS, grouped_difference
from ctxext.texts.repeats import CLASSES, far_repeats, kept
from scripts.bench import markdown_table

METHODS = {
    "self_extend x2": "Self-Extend",
    "retrieval_heads x2": "retrieval heads",
    "dual_chunk": "Dual Chunk",
    "yarn x2": "YaRN",
}
SHOWN = "self_extend x2"


class Text(NamedTuple):
    """One text.

    Args:
        name: of the text.
        kind: of text.
        need: nats per token that the last 8K tokens predict better than the last 2K do.
        repeats: share of the last tokens that repeat from afar.
        gains: nats per token by which each method predicts the last tokens better than the best truncation.
    """

    name: str
    kind: str
    need: float
    repeats: float
    gains: dict[str, float]


def texts_of(study: Path, file: Path, kind: str | None, skip: int, tokenizer: Any, window: int) -> list[Text]:
    """Return the texts of a study that all methods have read; gains are over the best truncation of their kind."""
    lines = [json.loads(line) for line in (study / "cells.jsonl").read_text(encoding="utf-8").splitlines()]
    quarter, ends = window // 4, defaultdict[str, dict[str, float]](dict)
    for line in lines:
        if "file" in line:
            losses = load_file(study / line["file"])["losses"]
            ends[line["item"]][line["reading"]] = losses[-quarter:].double().mean().item()
    cuts = [f"truncated {window * share // 4}" for share in (1, 2, 3, 4)]
    rows = {row["name"]: row for row in parquet.read_table(file).to_pylist()}
    whole = {name: end for name, end in ends.items() if {*cuts, SHOWN} <= set(end)}
    kinds = defaultdict(list)
    for name in whole:
        kinds[kind or rows[name]["kind"]].append(name)
    found = []
    for of_kind, names in kinds.items():
        best = min(cuts, key=lambda cut: sum(whole[name][cut] for name in names))
        for name in names:
            ids = tokenizer(rows[name]["text"][: 16 * (2 * window + skip)])["input_ids"][skip : skip + 2 * window]
            end = whole[name]
            gains = {method: end[best] - end[method] for method in METHODS if method in end}
            repeats = far_repeats(ids, kept(window), quarter)
            found.append(Text(name, of_kind, end[cuts[0]] - end[cuts[3]], repeats, gains))
    return found


def mean_and_margin(values: list[float]) -> tuple[float, float]:
    """Return a mean and half of its 95 percent interval; zero for values too few for one."""
    if len(values) < ENOUGH_DOCUMENTS:
        return statistics.fmean(values), 0.0
    groups = [torch.tensor([value], dtype=torch.float64) for value in values]
    gain = grouped_difference(groups, [torch.zeros(1)] * len(values), over="texts")
    return gain.mean, gain.margin


def kinds_table(texts: list[Text]) -> str:
    """Return a row a kind, as Markdown."""
    rows = []
    for kind in dict.fromkeys(text.kind for text in texts):
        of = [text for text in texts if text.kind == kind]
        cells = []
        for method in METHODS:
            gains = [text.gains[method] for text in of if method in text.gains]
            mean, margin = mean_and_margin(gains) if gains else (0.0, 0.0)
            each = f" ({', '.join(f'{gain:+.3f}' for gain in gains)})" if len(gains) > 1 else ""
            cells.append("" if not gains else f"{mean:+.3f}" + (f" ± {margin:.3f}" if margin else each))
        need, repeats = sum(text.need for text in of) / len(of), sum(text.repeats for text in of) / len(of)
        rows.append([kind, str(len(of)), f"{need:.3f}", f"{repeats:.1%}", *cells])
    columns = ["kind", "texts", "2K to 8K", "repeats from afar", *METHODS.values()]
    return markdown_table("Gain over the best truncation, nats per token, with 95 % intervals", columns, rows)


def write_texts(path: Path, texts: list[Text]) -> None:
    """Write a row a text to a CSV file, those that repeat most first."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["text", "kind", "2K to 8K", "repeats from afar", *METHODS.values()])
        for text in sorted(texts, key=lambda text: -text.repeats):
            gains = [f"{text.gains[method]:+.3f}" if method in text.gains else "" for method in METHODS]
            writer.writerow([text.name, text.kind, f"{text.need:+.3f}", f"{text.repeats:.1%}", *gains])


PALETTE = ("#A3195B", "#0072B2", "#00855F", "#B87700", "#6F5BC8", "#7A5C45", "#16838E", "#C45500", "#6E6E6E")


def draw(path: Path, texts: list[Text], window: int) -> None:
    """Draw a point a text above, and the mean of each kind by two methods below."""
    kinds = sorted(dict.fromkeys(text.kind for text in texts), key=lambda kind: -kind_mean(texts, kind, SHOWN)[0])
    colours = dict(zip(kinds, PALETTE, strict=False))
    title = "A longer window pays where a text repeats itself from afar"
    with saved_figure(path, (7.2, 8.6), title) as figure:
        left, right = figure.subplots(2, 1)
        begin = 0.0
        for each in CLASSES:
            across = [100 * begin + 1, 100 * each.below + 1]
            left.fill_between(across, *each.gain, color=NOTE, alpha=0.14, lw=0, zorder=0)
            begin = each.below
        for kind in kinds:
            of = [text for text in texts if text.kind == kind]
            x, y = [100 * text.repeats + 1 for text in of], [text.gains[SHOWN] for text in of]
            left.scatter(x, y, s=40, color=colours[kind], edgecolor="white", lw=0.6, zorder=3)
        left.axhline(0, color=COLOURS["truncated"], lw=1.4, ls=DASHED, zorder=1)
        left.set_xscale("log")
        ticks = (0, 1, 2, 5, 10, 20, 50, 100)
        left.set_xticks([tick + 1 for tick in ticks], [str(tick) for tick in ticks])
        left.minorticks_off()
        left.set_xlim(0.97, 101)
        left.set_xlabel(f"last tokens that repeat what stands more than {tokens_label(kept(window))} before, percent")
        left.set_ylabel("gain, nats per token")
        draw_grid(left, "A point is a text, read by Self-Extend; grey: 95 % of texts like it")
        for place, kind in enumerate(kinds):
            for method, shift, marker in ((SHOWN, -0.14, "o"), ("yarn x2", 0.14, "D")):
                if not any(text.kind == kind and method in text.gains for text in texts):
                    continue
                mean, margin = kind_mean(texts, kind, method)
                if not margin:
                    few = [text.gains[method] for text in texts if text.kind == kind and method in text.gains]
                    right.scatter(
                        few, [place + shift] * len(few), s=20, facecolor="none", edgecolor=colours[kind], lw=0.9
                    )
                colour = colours[kind] if method == SHOWN else "white"
                right.errorbar(
                    mean,
                    place + shift,
                    xerr=margin,
                    fmt=marker,
                    ms=6.5 if method == SHOWN else 5,
                    lw=1.6,
                    color=colours[kind],
                    mfc=colour,
                )
        right.axvline(0, color=COLOURS["truncated"], lw=1.4, ls=DASHED, zorder=1)
        counts = {kind: sum(text.kind == kind for text in texts) for kind in kinds}
        right.set_yticks(range(len(kinds)), [f"{kind} ({counts[kind]})" for kind in kinds])
        right.set_ylim(len(kinds) - 0.4, -0.6)
        right.tick_params(axis="y", length=0)
        right.set_xlabel("gain over the best truncation, nats per token; 95 % interval, or each text")
        draw_grid(right, "By kind; filled: Self-Extend, diamond: YaRN", axis="x")
        for label, kind in zip(right.get_yticklabels(), kinds, strict=True):
            label.set_color(colours[kind])


def kind_mean(texts: list[Text], kind: str, method: str) -> tuple[float, float]:
    """Return the mean gain of a kind, and half of its interval."""
    return mean_and_margin([text.gains[method] for text in texts if text.kind == kind and method in text.gains])


def main(
    studies: Annotated[list[str], Argument(help="FOLDER=FILE, FOLDER=FILE:KIND or FOLDER=FILE:KIND:SKIPPED")],
    output: Annotated[
        Path, Option("--output", "-o", help="the picture; a .csv file of all texts is written beside it")
    ],
    checkpoint: Annotated[str | None, Option(help="whose tokenizer and window; by default the installed one")] = None,
) -> None:
    """Print the table of kinds and the lines, write all texts, and draw the picture."""
    loaded = load_checkpoint(checkpoint)
    window = loaded.model.config.max_position_embeddings
    texts: list[Text] = []
    for study in studies:
        folder, _, rest = study.partition("=")
        file, kind, skip = (*rest.split(":"), "", "")[:3]
        texts += texts_of(Path(folder), Path(file), kind or None, int(skip or 0), loaded.tokenizer, window)
    print(kinds_table(texts))
    write_texts(output.with_suffix(".csv"), texts)
    gains = [text.gains[SHOWN] for text in texts]
    for name, values in (("need", [text.need for text in texts]), ("repeats", [text.repeats for text in texts])):
        slope, start = statistics.linear_regression(values, gains)
        correlation = statistics.correlation(values, gains)
        print(
            f"gain of {METHODS[SHOWN]} = {start:+.3f} {slope:+.3f} * {name}; "
            f"correlation {correlation:.2f}, {len(texts)} texts"
        )
    draw(output, texts, window)


if __name__ == "__main__":
    run_script(main)
