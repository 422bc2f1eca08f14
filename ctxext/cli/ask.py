"""``ctxext ask``: questions about a long text."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument

from ctxext.cli.eval.common import Session
from ctxext.cli.options import (
    COMPILE_SAYS,
    Column,
    ExtensionOptions,
    Json,
    OutputOptions,
    SourceOptions,
    Split,
    grouped,
    option,
    option_group,
)
from ctxext.errors import InvalidParameterError
from ctxext.files import refuse_as_file
from ctxext.progress import StageBar
from ctxext.texts.documents import read_documents

UNSURE_SAYS = "this model may be too small, or the text may not say"
SMALL = 10**9  # parameters; smaller models find passages in a text, and understand little of them


@option_group
class AskOptions:
    """Text, questions and length of an answer."""

    text: list[str] = option(
        "Text, PDF, parquet, JSONL or CSV file, folder (of code too), or - for standard input. Repeatable.",
        "--text",
        "-t",
        default=...,
    )
    more: list[str] | None = option("Another question. Repeatable.", "--question", "-q", show_default="none")
    complete: bool = option(
        "Complete the line that each question begins, without a chat template; small models find more so.",
        "--complete",
        default=False,
    )
    tokens: int = option("Tokens of an answer, at most.", default=256, min=1)
    compile: bool = option(COMPILE_SAYS, "--compile", default=False)
    select: int | None = option(
        "Tokens of the text to read for each question, at most: its beginning, and the chunks that share most words "
        "with the question. Default: all of it, once.",
        min=256,
        show_default="all",
    )
    keep: Path | None = option(
        "File of what was read, to go on from another time: written, or read where it begins alike.",
        show_default="none",
    )
    split: Split = None
    column: Column = None


@grouped
def ask(
    *,
    source: SourceOptions,
    question: Annotated[str | None, Argument(help="What to ask.", show_default="questions that you type")] = None,
    asked: AskOptions,
    extension: ExtensionOptions,
    as_json: Json = False,
) -> None:
    """Answer questions about a text that may be longer than the model's window. The text is read once.

    Without --method a plain model is extended as far as the text needs, up to four times its trained length, by the
    method that `ctxext inspect` recommends without training. The beginning of a longer text is left out.

    [bold]Example[/]: ctxext ask demo -t src/ "Which function parses the command line?"
    """
    replace(extension, sliding_window=None).require_method()  # the method that is advised may need that choice
    # A space at the end would be a token that no text has there. Tokenizers refuse bytes that are not UTF-8.
    said = [one for one in (question, *(asked.more or ())) if one is not None]
    questions = [one.encode(errors="replace").decode().rstrip() for one in said]
    if "" in questions:
        raise InvalidParameterError("A question is empty. Leave it out.")
    if not questions and (as_json or "-" in asked.text):
        why = "--json prints answers to questions that are given" if as_json else "-t - reads all that is typed as text"
        raise InvalidParameterError(f"{why}. Give a question.")

    if asked.keep is not None:
        if asked.compile:
            raise InvalidParameterError(
                "--keep writes a cache that grows, and --compile needs a fixed one. Leave one out."
            )
        refuse_as_file(asked.keep)
    if asked.select is not None and (asked.keep is not None or not questions):
        why = "--keep is for a whole text" if asked.keep is not None else "--select chooses by the question"
        raise InvalidParameterError(f"{why}. Leave --select out, or give a question without --keep.")
    documents = list(read_documents(asked.text, split=asked.split, column=asked.column))
    together = "\n\n".join(f"# {one.name}\n\n{one.text}" if documents[1:] else one.text for one in documents)
    if not together.strip():
        raise InvalidParameterError(f"{', '.join(asked.text)} holds no text to ask about.")

    from transformers import TextStreamer

    from ctxext.core.patching import describe
    from ctxext.serving.ask import ReadText
    from ctxext.serving.load import extend_loaded
    from ctxext.serving.selected import SelectedText, select

    session = Session(source, OutputOptions(as_json=True), methods=[extension.method])
    notes = session.console
    notes.soft_wrap = True

    def plan() -> tuple[ReadText, int]:
        checkpoint = session.checkpoint
        if asked.select is not None and not parts:  # a plan is made before the weights are loaded, and after
            parts.update(zip(questions, select(checkpoint.tokenizer, together, questions, asked.select), strict=True))
        if extension.method is not None:  # first: a tokenizer out of a GGUF file takes seconds
            extend_loaded(checkpoint, **extension.arguments())
        given = (asked.tokens, asked.complete, asked.keep, asked.compile)
        whole = ReadText(checkpoint.model, checkpoint.tokenizer, together, questions, *given)
        selected = (replace(whole, text=part.text, questions=[one]) for one, part in parts.items())
        text = max(selected, key=lambda part: part.needed, default=whole)
        if extension.method is None:
            text.extend(extension.sliding_window)
        if parts and text.needed > text.window:
            raise InvalidParameterError(
                f"--select {asked.select}: text, question and answer take {text.needed:,} tokens, and the model's "
                f"window has {text.window:,}. Select fewer."
            )
        return text, text.cut()

    parts = dict[str, SelectedText]()
    text, left_out = session.planned(plan)
    tokens, method = len(text.shared), (describe(text.model).method or {}).get("method", "not extended")
    reads = f"reads {text.needed - text.new:,} of {text.window:,} tokens."
    notes.print(f"{session.checkpoint.name}, {method}, {reads}")
    if left_out:
        notes.print(f"The first {left_out:,} tokens of the text are left out: they exceed the window.", style="yellow")
    if (size := sum(weight.numel() for weight in text.model.parameters())) < SMALL:
        notes.print(f"A model of {size / 1e6:.0f}M parameters finds what is written, and understands little.")
    if not parts:
        with StageBar(notes, float(tokens)) as bar:
            text.read(lambda read: bar(f"reading {tokens:,} tokens", float(read)))
    for one in questions or typed():
        if one in parts:
            notes.print(parts[one].sentence)
            text = replace(text, text=parts[one].text, questions=[one])
        if len(questions) > 1 and not as_json:
            notes.print(f"\n{one}", style="bold")
        streamer = None if as_json else TextStreamer(text.tokenizer, skip_prompt=True, skip_special_tokens=True)
        try:
            answer = text.ask(one, streamer)
        except InvalidParameterError as error:
            if questions:
                raise
            notes.print(str(error), style="yellow")
            continue
        if as_json:
            sure = {"probability": round(text.probability, 3), "unsure": text.is_unsure}
            typer.echo(json.dumps({"question": one, "answer": answer} | sure))
        elif not answer:
            notes.print("(no answer)", style="dim")
        elif text.is_unsure:
            notes.print(f"(unsure, {text.probability:.2f}: {UNSURE_SAYS})", style="dim")


def typed() -> Iterator[str]:
    """Yield the questions that are typed, up to an empty line or the end of the input."""
    with contextlib.suppress(EOFError):
        while question := input("? " if sys.stdin.isatty() else "").rstrip():
            yield question
