"""Tables and sentences by which the command line shows what the library returns."""

from __future__ import annotations

import inspect
import itertools
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ctxext.checkpoints.inspect import Inspection, MethodCheck
from ctxext.checkpoints.write import Written
from ctxext.errors import InvalidParameterError
from ctxext.methods import BiasMethod, BucketMethod, EncodingMethod, Method, RopeMethod, TableMethod, known_methods
from ctxext.methods.recommended import RECOMMENDED, to_take
from ctxext.methods.remap import RemapMethod
from ctxext.progress import terminal
from ctxext.runtimes import RUNTIMES
from ctxext.runtimes.base import Export
from ctxext.spec import LLAMA
from ctxext.texts.corpus import tokenise
from ctxext.texts.documents import read_documents
from ctxext.texts.repeats import Repeats, repeats_of

COLUMNS = ("method", "group", "what it does", "pick it", "dynamic", "stock form on a Llama", "source")
# Below the text of ``--text``; the counts are those of docs/results/zero-shot.md.
GUIDE = (
    "They are in strings of six tokens that stand more than a window before, and nowhere nearer. By twice the window, "
    "16 measured texts with 5 % or more gained 0.38 nats per token in the mean, and 35 with less 0.02."
)
# What a method extends, then what an encoding changes, in the order of listings. A method of several groups stands with
# the first.
GROUPS = ("rotary", "remapping", "ALiBi", "tables", "buckets", "input", "scores", "attention", "other")
KINDS = {"rotary": RopeMethod, "ALiBi": BiasMethod, "tables": TableMethod, "buckets": BucketMethod}


def method_rows(*, to_train: bool = False) -> list[dict[str, str]]:
    """Return one row per method, from what the methods themselves say, group by group.

    Args:
        to_train: list the encodings that a model has to be trained with, instead of what extends a checkpoint.
    """
    rows = []
    for name, kind in known_methods().items():
        if kind.needs_training == to_train:
            example = kind.example(LLAMA)
            dynamic = "yes" if example.dynamic else "no"
            cells = (name, _group(example), kind.summary, _pick(kind), dynamic, _stock_form(example), kind.source)
            rows.append(dict(zip(COLUMNS, cells, strict=True)))
    return sorted(rows, key=lambda row: GROUPS.index(_heading(row)))


def _group(method: Method) -> str:
    """Return what a method extends, or what an encoding changes."""
    if isinstance(method, EncodingMethod):
        return {"added": "input", "own": "attention"}.get(method.form, "scores")
    if isinstance(method, RemapMethod):
        return "remapping"
    return ", ".join(name for name, kind in KINDS.items() if isinstance(method, kind)) or "other"


def _heading(row: Mapping[str, str]) -> str:
    """Return the first group of a row."""
    return row["group"].split(", ")[0]


def methods_table(rows: Sequence[Mapping[str, str]]) -> Table:
    """Lay ``method_rows`` out for a terminal: one paragraph each, under the heading of its group."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 1, 0))
    for heading, group in itertools.groupby(rows, key=_heading):
        table.add_row(Text(heading, style="bold"), "")
        for row in group:
            what = Text(row["what it does"] + "\n")
            what.append(f"Pick it {row['pick it']}.\n".replace("`", ""))
            what.append(
                f"{row['group']}; stock form on a Llama: {row['stock form on a Llama']}; "
                f"dynamic: {row['dynamic']}; {row['source']}",
                style="dim",
            )
            table.add_row(Text(row["method"], style="bold cyan"), what)
    return table


def methods_markdown(rows: Sequence[Mapping[str, str]]) -> str:
    """Write ``method_rows`` as the Markdown of docs/methods.md."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for row in rows:
        link = re.sub(r"^arXiv:(\S+)$", r"[arXiv:\1](https://arxiv.org/abs/\1)", row["source"])
        cells = {**row, "method": f"`{row['method']}`", "source": link}.values()
        lines.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    return "\n".join(lines)


def show_methods(*, to_train: bool, as_json: bool, markdown: bool) -> None:
    """Print ``method_rows`` as a terminal's table, JSON or Markdown."""
    rows = method_rows(to_train=to_train)
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    elif markdown:
        typer.echo(methods_markdown(rows))
    else:
        console = terminal()
        if not to_train:
            _show_heading("take first", RECOMMENDED, console)
            console.print()
        console.print(methods_table(rows))


def _pick(kind: type[Method]) -> str:
    """Return the sentence of a method's docstring that says when one would pick it."""
    paragraphs = (inspect.getdoc(kind) or "").split("\n\n")
    reason = next((" ".join(text.split()) for text in paragraphs if text.startswith("Pick it ")), "")
    return reason.removeprefix("Pick it ").split(". ")[0].removesuffix(".").replace("``", "`")


def _stock_form(method: Method) -> str:
    if isinstance(method, BucketMethod):
        return "not for a Llama; on a T5, another largest distance"
    form = method.rope_parameters(LLAMA) if isinstance(method, RopeMethod) else None
    if form is None:
        return "for tables" if isinstance(method, TableMethod) else "none"
    return "default, other base" if form["rope_type"] == "default" else str(form["rope_type"])


def _facts(inspection: Inspection) -> list[tuple[str, str]]:
    """Return what ``ctxext inspect`` prints about a checkpoint, line by line."""
    trained, longest = inspection.trained_length, inspection.longest
    lines = [("model type", inspection.model_type)]
    for site in inspection.positions:
        known = ", ".join(part for part in (site.side, site.layer_type) if part)
        where = f" ({known})" if known else ""
        lines.append((f"rope{where}", f"{site.rope_type}, base {site.base:g}, {site.rotary_dim} rotary dimensions"))
    if inspection.no_positions:
        lines.append(("rope", inspection.no_positions))
    lines.append(("trained length", f"{trained:,} tokens" if trained else "not in the config"))
    if longest and longest != trained:
        lines.append(("max positions", f"{longest:,} tokens (max_position_embeddings)"))
    lines += [("sliding window", inspection.window or "none"), ("extended", inspection.extended or "no")]
    return [*lines, *(("note", note) for note in inspection.notes)]


def _verdict_table(verdicts: Sequence[MethodCheck]) -> Table:
    """Return the table of the methods that extend a checkpoint."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("method", "tried to", "loaded by", "stored as"):
        table.add_column(column, overflow="fold", no_wrap=not column.startswith("stored"))
    for verdict in verdicts:
        loaded_by = "without ctxext" if verdict.stock else "ctxext.load"
        reaches = f"{verdict.target_length:,} ({verdict.factor:g}x)"
        stored_as = verdict.stored_as.removesuffix(", which only ctxext loads")
        table.add_row(Text(verdict.method, style="bold cyan"), reaches, loaded_by, stored_as)
    return table


def _show_verdicts(verdicts: Sequence[MethodCheck], console: Console) -> None:
    """Print the methods to take, the others, those that are useless until trained, and reasons of refusals."""
    applies = [verdict for verdict in verdicts if verdict.refused is None]
    ready = [verdict for verdict in applies if not verdict.needs_training]
    _show_heading("take", to_take([verdict.method for verdict in ready]), console)
    if applies:
        console.print(
            Text.assemble(("\nmethods", "bold"), ": each applied to this model without its weights, then taken back")
        )
        console.print(_verdict_table(ready))
    useless = [verdict.method for verdict in applies if verdict.needs_training]
    if useless:
        console.print(
            Text.assemble(("useless until the model is trained with them", "bold"), f": {', '.join(useless)}")
        )
    refused: dict[str, list[str]] = {}
    for verdict in verdicts:
        if verdict.refused is not None:
            reason = verdict.refused.replace(repr(verdict.method), "it").replace("method it", "it")
            refused.setdefault(reason, []).append(verdict.method)
    if refused:
        console.print(Text("refused", style="bold"))
    for reason, names in refused.items():
        console.print(Text.assemble((f"  {', '.join(names)}", "cyan"), f": {reason}"), style="dim")


def _show_heading(heading: str, sentences: Sequence[object], console: Console) -> None:
    """Print sentences under a heading, nothing where there are none."""
    if sentences:
        console.print(Text(f"\n{heading}", style="bold"))
        for sentence in sentences:
            console.print(f"  {sentence}", soft_wrap=True)


def show_written(written: Written) -> None:
    """Print what ``ctxext patch`` did."""
    weights = []
    if written.linked:
        weights.append(f"{written.linked} linked (they are the source's: what writes into one writes into both)")
    if written.cloned:
        weights.append(f"{written.cloned} cloned (they take no space until they are written)")
    if written.rewritten:
        weights.append("written anew (the extension changes some of them)")
    if written.unpacked:
        weights.append("written anew, dequantised to bfloat16")
    if written.copied:
        weights.append(f"{written.copied} copied")
    lines = [f"Wrote {written.directory}", str(written.description), f"weight files: {', '.join(weights)}"]
    lines += [f"changed {change}" for change in written.changed]
    lines += [f"stays, and cuts texts: {limit}" for limit in written.limits]
    if written.left_out:
        lines.append(f"left out, as not part of a safetensors checkpoint: {', '.join(written.left_out)}")
    typer.echo("\n".join(lines))


def show_inspection(inspection: Inspection, checkpoint: str, console: Console) -> None:
    """Print what ``ctxext inspect`` found."""
    table = Table(box=None, show_header=False, pad_edge=False)
    for key, value in _facts(inspection):
        table.add_row(Text(key, style="bold"), value)
    console.print(table)
    if inspection.description is not None:
        console.print(f"\n{inspection.description}")
    _show_verdicts(inspection.verdicts, console)
    extending = [verdict.method for verdict in inspection.verdicts if verdict.refused is None]
    if inspection.exports is None and extending and inspection.positions:  # runtimes have flags for rotary positions
        method = "yarn" if "yarn" in extending else extending[0]
        window = ("--sliding-window", "lift") if inspection.window_caps else ()
        _show_how_to_export(checkpoint, ("--method", method, "--factor", "4", *window), console)
    for target, export in (inspection.exports or {}).items():
        console.print(target, style="bold")
        if isinstance(export, str):
            console.print(f"  cannot: {export}")
        else:
            show_export(export, console)


def repeats_in(texts: Sequence[str], tokenizer: Any, window: int | None) -> list[Repeats]:
    """Return how much each text repeats from beyond the window.

    Raises:
        InvalidParameterError: nothing says how long the window is.
    """
    if window is None:
        raise InvalidParameterError("The config names no trained length to look beyond. Give --trained-length.")
    documents = (tokenise(document, tokenizer, prefix=()) for document in read_documents(texts))
    return [repeats_of(one.name, one.input_ids[0].tolist(), window) for one in documents]


def show_repeats(repeats: Sequence[Repeats], console: Console) -> None:
    """Print the share of repeats of each text that is longer than the window, the largest first."""
    longer = sorted((one for one in repeats if one.beyond), key=lambda one: -one.share)
    for one in longer:
        told = f"of {one.beyond:,} tokens beyond the window {one.share:.1%} repeat from afar"
        console.print(Text.assemble((one.name, "bold"), f": {told}"))
    if longer:
        console.print(GUIDE)
    if fitting := len(repeats) - len(longer):
        console.print(f"Within the window, where a longer one has nothing to offer: {fitting} of {len(repeats)} texts.")


def _show_how_to_export(checkpoint: str, options: tuple[str, ...], console: Console) -> None:
    """Print the commands that extend a checkpoint for other runtimes."""
    place = "ORIGINAL" if checkpoint.endswith(".gguf") else checkpoint
    for target, runtime in RUNTIMES.items():
        command = ("patch", place, "NEW") if runtime.files_only else ("export", place, "--to", target)
        line = shlex.join(("ctxext", *command, *options))
        console.print(f"To serve an extension with {target}: {line}", soft_wrap=True)
    if place != checkpoint:
        console.print("ORIGINAL: the checkpoint that this file was converted from.")


def show_export(export: Export, console: Console) -> None:
    """Print the whole command that serves the checkpoint, ready to paste, then what to know about it."""
    command, *others = str(export).split("\n")
    console.print(command, soft_wrap=True)
    for line in others:
        console.print(line, soft_wrap=True)
