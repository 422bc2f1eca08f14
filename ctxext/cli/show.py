"""Tables and sentences by which the command line shows what the library returns."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ctxext.checkpoints.inspect import Inspection, MethodCheck
from ctxext.checkpoints.write import Written
from ctxext.cli.methods import show_heading
from ctxext.errors import InvalidParameterError
from ctxext.recommended import to_take
from ctxext.runtimes import RUNTIMES
from ctxext.runtimes.base import Export
from ctxext.texts.corpus import tokenise
from ctxext.texts.documents import read_documents
from ctxext.texts.repeats import CLASSES, Repeats, likeness_of, repeats_of

# Below the verdicts of ``--text``.
GUIDE = (
    "Counted: strings of six tokens, last seen more than three quarters of a window before. Closer ones a truncation "
    f"holds. Measured on {sum(each.texts for each in CLASSES)} texts by a model of 135M parameters. Whether more text "
    "helps at all, only weights can tell: one text with 13 % of repeats lost 0.06 nats. To measure it:"
)


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
    """Print the methods to take, the others, methods that are useless until trained, and reasons of refusals."""
    applies = [verdict for verdict in verdicts if verdict.refused is None]
    ready = [verdict for verdict in applies if not verdict.needs_training]
    show_heading("take", to_take([verdict.method for verdict in ready]), console)
    if applies:
        console.print(Text.assemble(("\nmethods", "bold"), ": tried on this architecture, without weights"))
        console.print(_verdict_table(ready))
    useless = [verdict.method for verdict in applies if verdict.needs_training]
    if useless:
        console.print(
            Text.assemble(("useless until the model is trained with them", "bold"), f": {', '.join(useless)}")
        )
    refused: dict[str, list[str]] = {}
    for verdict in verdicts:
        if verdict.refused is not None:
            reason = verdict.refused.replace(f"method {verdict.method!r}", "this method").replace(
                repr(verdict.method), "it"
            )
            refused.setdefault(reason, []).append(verdict.method)
    if refused:
        console.print(Text("refused", style="bold"))
    for reason, names in refused.items():
        console.print(Text.assemble((f"  {', '.join(names)}", "cyan"), f": {reason}"), style="dim")


def show_written(written: Written) -> None:
    """Print what ``ctxext patch`` did."""
    weights = {
        f"{written.linked} linked (they are the source's: what writes into one writes into both)": written.linked,
        f"{written.cloned} cloned (they take no space until they are written)": written.cloned,
        "rewritten (the extension changes some of them)": written.rewritten,
        "rewritten, dequantised to bfloat16": written.unpacked,
        f"{written.copied} copied": written.copied,
    }
    lines = [f"Wrote {written.directory}", *(f"stays, and cuts texts: {limit}" for limit in written.limits)]
    lines += [str(written.description), f"weight files: {', '.join(way for way, is_so in weights.items() if is_so)}"]
    lines += [f"changed {change}" for change in written.changed]
    if written.left_out:
        lines.append(f"left out, as not part of a safetensors checkpoint: {', '.join(written.left_out)}")
    typer.echo("\n".join(lines))
    if written.draft is not None:
        show_written(written.draft)


def show_inspection(inspection: Inspection, checkpoint: str, said: Sequence[str], console: Console) -> None:
    """Print what ``ctxext inspect`` found; ``said`` are words for commands, as the user gave them."""
    table = Table(box=None, show_header=False, pad_edge=False)
    for key, value in _facts(inspection):
        table.add_row(Text(key, style="bold"), value)
    console.print(table)
    if inspection.description is not None:
        console.print(f"\n{inspection.description}")
    _show_verdicts(inspection.verdicts, console)
    if inspection.exports is None and inspection.positions:  # runtimes have flags for rotary positions
        window = ("--sliding-window", "lift") if inspection.window_caps else ()
        _show_how_to_export(checkpoint, inspection.verdicts, (*window, *said), console)
    for target, export in (inspection.exports or {}).items():
        console.print(target, style="bold")
        if isinstance(export, str):
            console.print(f"  cannot: {export}")
        else:
            show_export(export, console)


def repeats_in(texts: Sequence[str], tokenizer: Any, window: int | None) -> list[Repeats]:
    """Return how much each text repeats from beyond the window.

    Raises:
        InvalidParameterError: nothing says how long the window is, or a text is empty.
    """
    if window is None:
        raise InvalidParameterError("The config names no trained length to look beyond. Give --trained-length.")
    found = list[Repeats]()
    for text in texts:
        documents = [tokenise(document, tokenizer, prefix=()) for document in read_documents([text])]
        if not documents:
            raise InvalidParameterError(f"{text!r} holds no text. Leave it out.")
        found += (repeats_of(one.name, one.input_ids[0].tolist(), window) for one in documents)
    return found


def show_repeats(repeats: Sequence[Repeats], checkpoint: str, said: Sequence[str], console: Console) -> None:
    """Print whether each text would gain from a longer window, the most repetitive first, and how to measure it."""
    longer = sorted((one for one in repeats if one.beyond), key=lambda one: -one.share)
    for one in longer:
        console.print(Text.assemble((one.name, "bold"), f": {one.verdict}"), soft_wrap=True)
        like = likeness_of(one.share)
        gains = " and ".join(f"{nats:+.2f}" for nats in like.gain)
        told = f"gains between {gains} nats per token on 95 % of texts like this ({like.texts} measured)"
        console.print(f"  twice the window {told}", style="dim", soft_wrap=True)
    if fitting := len(repeats) - len(longer):
        costs = "Within the window, where a longer one has nothing to offer and static scaling costs quality"
        console.print(f"{costs}: {fitting} of {len(repeats)} texts.", soft_wrap=True)
    if longer:
        console.print(GUIDE)
        command = shlex.join(["ctxext", "eval", "compare", checkpoint, *said, "--factor", "2"])
        console.print(f"  {command}\n", soft_wrap=True)


def _show_how_to_export(
    checkpoint: str, verdicts: Sequence[MethodCheck], options: tuple[str, ...], console: Console
) -> None:
    """Print the commands that extend a checkpoint for other runtimes, each by a method that the runtime computes."""
    place = "ORIGINAL" if checkpoint.endswith(".gguf") else checkpoint
    for target in RUNTIMES:
        able = [each.method for each in verdicts if target in each.runtimes and not each.needs_training]
        for method in [name for name in ("yarn", "ntk", *able) if name in able][:1]:
            words = ("ctxext", "export", place, "--to", target, "--method", method, "--factor", "2", *options)
            console.print(f"To serve an extension with {target}: {shlex.join(words)}", soft_wrap=True)
    if place != checkpoint:
        console.print("ORIGINAL: the checkpoint that this file was converted from.")


def show_export(export: Export, console: Console) -> None:
    """Print the whole command that serves the checkpoint, ready to paste, then what to know about it."""
    for line in str(export).split("\n"):
        console.print(line, soft_wrap=True)
