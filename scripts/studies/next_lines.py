"""Complete lines of source code that use a name last said beyond the trained window, by each way of reading.

    python scripts/studies/next_lines.py --text code.parquet -n 12 -m self_extend -m yarn -o study

Every text is cut at twice the trained window. A line counts if it lies among the last tokens, a quarter of the window,
and uses a name of six or more letters that stands somewhere before it, but not within one trained window before it. A
method reads the whole text once; the unextended model reads the last window of it. Each then writes the line greedily
from what stands before it, over the same cache, which is cut at the start of the line. Finished texts are kept in the
output folder, so that the same command goes on after an interruption. A checkpoint that is extended already is
read by its own method, and without it by the last window.
"""

from __future__ import annotations

import bisect
import json
import math
import re
import statistics
import sys
import time
from collections import defaultdict
from difflib import SequenceMatcher
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache
from typer import Option

sys.path.insert(0, str(Path(__file__).parents[2]))

import ctxext
from ctxext.cli.eval.common import Session
from ctxext.cli.options import SourceOptions, grouped, run_script
from ctxext.files import write_whole
from ctxext.measuring.statistics import grouped_difference
from ctxext.methods import saved_class
from ctxext.texts.documents import read_documents
from scripts.bench import claim, machine, markdown_table

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{5,}")
SHORTEST_LINE = 8
"""Characters below which a line is not asked for."""

SPARE = 8
"""Tokens that an answer may be longer than the line."""


class Line(NamedTuple):
    """A line to be written.

    Args:
        start: index of its first token.
        stop: index behind its last token.
        text: of the line.
        names: used in it, last said more than a window before.
        defined: of these names, those that a def, a class or an assignment before the window introduces.
    """

    start: int
    stop: int
    text: str
    names: list[str]
    defined: list[str]


def far_lines(text: str, offsets: list[tuple[int, int]], window: int, most: int) -> list[Line]:
    """Return at most ``most`` lines at the end of a text that use a far name, spread evenly."""
    starts = [start for start, _ in offsets]
    token_at = lambda place: bisect.bisect_left(starts, place)  # noqa: E731
    said = defaultdict(list)
    for match in NAME.finditer(text):
        said[match.group()].append(match.start())
    lines = []
    for match in re.finditer(r"(?m)^.+$", text):
        start, stop = token_at(match.start()), token_at(match.end())
        if start < len(offsets) - window // 4 or len(match.group().strip()) < SHORTEST_LINE:
            continue
        names = [
            name
            for name in dict.fromkeys(NAME.findall(match.group()))
            if (before := [place for place in said[name] if place < match.start()])
            and token_at(before[-1]) < start - window
        ]
        introduced = [
            name
            for name in names
            if re.search(
                rf"(?m)^\s*(?:(?:async )?def|class)\s+{name}\b|^\s*{name}\s*(?::[^=\n]+)?=(?!=)", text[: match.start()]
            )
        ]
        if names and starts[start] <= match.start() + len(match.group()) - len(match.group().lstrip()):
            lines.append(Line(start, stop, match.group(), names, introduced))
    every = max(1, math.ceil(len(lines) / most))
    return lines[::every]


@torch.no_grad()
def write_lines(model: Any, tokenizer: Any, ids: Tensor, lines: list[Line], first: int) -> list[dict[str, Any]]:
    """Return what a model writes at each line, and its losses there, after reading ``ids`` from ``first`` on once."""
    cache, rows = DynamicCache(config=model.config), []
    model(ids[None, first : lines[-1].start], past_key_values=cache, use_cache=True, logits_to_keep=1)
    for line in reversed(lines):
        before = line.start - 1  # this token is read again, for its logits
        cache.crop(before - first - cache.get_seq_length())
        truth = ids[line.start : line.stop]
        logits = model(ids[None, before : line.stop - 1], past_key_values=cache, use_cache=True).logits[0].float()
        losses = functional.cross_entropy(logits, truth, reduction="none")
        cache.crop(before - first - cache.get_seq_length())
        token, written = ids[None, before : line.start], []
        for _ in range(len(truth) + SPARE):
            token = model(token, past_key_values=cache, use_cache=True).logits[:, -1].argmax(-1, keepdim=True)
            written.append(token.item())
            if "\n" in tokenizer.decode(written[-1:]):
                break
        answer = tokenizer.decode(written).split("\n")[0].rstrip()
        want = line.text.rstrip()
        rows.append(
            {
                "start": line.start,
                "line": want,
                "answer": answer,
                "exact": answer.strip() == want.strip(),
                "similarity": SequenceMatcher(None, answer.strip(), want.strip()).ratio(),
                "names": sum(name in NAME.findall(answer) for name in line.names) / len(line.names),
                "defined": bool(line.defined),
                "loss": losses.mean().item(),
                "tokens": len(truth),
            }
        )
    return rows[::-1]


def by_text(lines: list[dict[str, Any]], key: str) -> list[Tensor]:
    """Return the values of lines, those of one text together, since they are alike."""
    groups = defaultdict(list)
    for line in lines:
        groups[line["text"]].append(float(line[key]))
    return [torch.tensor(group) for group in groups.values()]


def tables(found: dict[str, list[dict[str, Any]]], title: str) -> str:
    """Return the table: a row a way of reading, and the mean over texts of its difference to the first one."""
    base, *_ = found.values()
    rows = []
    for name, lines in found.items():
        cells = [name]
        for key, form in (("exact", "{:.1%}"), ("similarity", "{:.3f}"), ("names", "{:.1%}"), ("loss", "{:.3f}")):
            cells.append(form.format(statistics.fmean(float(line[key]) for line in lines)))
            if lines is not base:
                difference = grouped_difference(by_text(lines, key), by_text(base, key), over="texts")
                scale, digits = (100, 1) if "%" in form else (1, 3)
                cells[-1] += (
                    f" ({scale * difference.mean:+.{digits}f} ± {scale * difference.standard_error:.{digits}f})"
                )
        rows.append(cells)
    return markdown_table(title, ["read by", "exact", "similarity", "far names written", "loss, nats per token"], rows)


@grouped
def main(
    *,
    text: Annotated[Path, Option(help="A parquet file with the columns name and text.")],
    output: Annotated[Path, Option("--output", "-o", help="Folder for what is finished, and the table.")],
    documents: Annotated[int, Option("--documents", "-n", min=1, help="Texts, the first of the file.")] = 12,
    method: Annotated[
        list[str] | None, Option("--method", "-m", help="Repeatable. Default: the checkpoint's own, or self_extend.")
    ] = None,
    most: Annotated[int, Option(min=1, help="Lines of a text, at most.")] = 25,
    source: SourceOptions,
) -> None:
    """Let each method and the last window complete lines, and print how well."""
    session = Session(source)
    session.load_weights()
    claim(output, "next_lines.py", session.checkpoint, text=text, most=most)
    model, tokenizer = session.checkpoint.model, session.checkpoint.tokenizer
    own = ctxext.describe(model).method
    if own is not None:
        ctxext.unpatch(model)
    methods = {name: (name, {"factor": 2}) for name in method or (["self_extend"] if own is None else [])}
    if own is not None:
        methods[f"its own {own['method']}"] = (saved_class(own["method"]).from_dict(own), {})
    window = model.config.max_position_embeddings
    length = 2 * window
    path = output / "lines.jsonl"
    done = {}
    if path.exists():
        done = {(row["text"], row["by"]): row["lines"] for row in map(json.loads, path.read_text().splitlines())}
    cut_name = f"last {window // 1024}K"
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for number, document in enumerate(list(read_documents([text]))[:documents]):
        encoding = tokenizer(document.text[: 8 * length], return_offsets_mapping=True)
        ids = torch.tensor(encoding["input_ids"][:length], device=model.device)
        offsets = encoding["offset_mapping"][:length]
        lines = far_lines(document.text[: offsets[-1][1]], offsets, window, most)
        if len(ids) < length or not lines:
            continue
        for name in (cut_name, *methods):
            if (document.name, name) not in done:
                start, extended = time.monotonic(), name != cut_name
                if extended:
                    chosen, settings = methods[name]
                    ctxext.patch(model, chosen, **settings)
                rows = write_lines(model, tokenizer, ids, lines, 0 if extended else length - window)
                if extended:
                    ctxext.unpatch(model)
                done[document.name, name] = rows
                kept = [{"text": key[0], "by": key[1], "lines": value} for key, value in done.items()]
                write_whole(path, "".join(json.dumps(row) + "\n" for row in kept))
                print(f"{document.name}, {name}: {len(rows)} lines, {time.monotonic() - start:.0f} s", flush=True)
            found[name] += [row | {"text": number} for row in done[document.name, name]]
    place = machine(model.device.type)
    title = f"{session.checkpoint.name}, {session.checkpoint.dtype_note}; {len(found[cut_name])} lines; {place}"
    table = tables(found, title)
    (output / "table.md").write_text(table, encoding="utf-8")
    print(table)


if __name__ == "__main__":
    run_script(main)
