"""``ctxext check``: whether a running server computes an extension, and which window it accepts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from ctxext.cli.options import (
    REQUIRED,
    ExtensionOptions,
    Json,
    SourceOptions,
    TextOptions,
    grouped,
    option,
    option_group,
    print_json,
    token_option,
)
from ctxext.errors import VerificationError
from ctxext.mistakes import why_unreachable
from ctxext.progress import StageBar, terminal

if TYPE_CHECKING:
    from ctxext.serving.check import ServerCheck


@option_group
class AskedOptions:
    """Server to ask, and how far."""

    url: str = option("Address of the server, such as http://127.0.0.1:8000.", default=REQUIRED)
    name: str = option("Name of the model on the server.", default="", show_default="the first that it lists")
    api_key: str | None = option("Key of the server.", envvar="CTXEXT_API_KEY", show_default="none")
    length: int = token_option(
        "Tokens of the longest prompt, if the window is longer.", "--length", "-l", default="16K", least=32
    )


@grouped
def check(
    *,
    source: SourceOptions,
    asked: AskedOptions,
    extension: ExtensionOptions,
    text: TextOptions,
    as_json: Json = False,
) -> None:
    """Check whether a running server extends its model as in the files, and which window it accepts.

    Works with vLLM, SGLang, llama.cpp's server, transformers' and ctxext's. The command compares the server's answers
    to long prompts with the extended model, the plain model and common mistakes, which all run locally, in up to ten
    passes over the longest prompt (--length shortens it). Pass --method if the server got the method by flags and not
    from the files. The exit status is 1 if the server is wrong.

    [bold]Example[/]: ctxext check Llama-3-8B-32k --url http://127.0.0.1:8000
    """
    if why := why_unreachable(asked.url):
        raise VerificationError(f"{asked.url} does not answer as a server of OpenAI's API: {why}.")
    from ctxext.core.patching import describe
    from ctxext.serving.check import Client, check_server
    from ctxext.serving.load import load_served

    client = Client(asked.url, asked.api_key, asked.name)
    loading = source.loading | extension.arguments()
    served = load_served(source.checkpoint, weights=False, **loading)
    window = describe(served.checkpoint.model).target_length or asked.length
    tokens = min(window, asked.length)
    # One text: a data set may have no end.
    ids = replace(text, documents=1).read(served.checkpoint, tokens=tokens).documents[0].input_ids
    if not served.checkpoint.has_weights:
        served = load_served(source.checkpoint, tokenizer=served.checkpoint.tokenizer, **loading)
    with StageBar(terminal(stderr=True), 1.0) as bar:
        found = check_server(client, served.checkpoint.model, served.checkpoint.tokenizer, ids, progress=bar)
    if as_json:
        print_json(found)
    else:
        show_check(found, terminal())
    if not found.right:
        raise typer.Exit(1)


def show_check(found: ServerCheck, console: Console) -> None:
    """Print what a server computes, how far its answers are from each reading, and its window."""
    verdict = found.computes or "none of the readings below, or it cannot be told which"
    console.print(f"{found.url} computes {found.model}: {verdict}", style="green" if found.right else "red")
    table = Table("reading", "beyond the trained window", "inside it", box=box.SIMPLE)
    for label, distance in sorted(found.beyond.items(), key=lambda item: item[1]):
        table.add_row(label, *(_nats(value) for value in (distance, found.inside[label])))
    console.print(table)
    console.print(f"  distance in nats, compared by {found.compared}", soft_wrap=True)
    stated = "" if found.stated is None else f", states {found.stated:,}"
    refused = "" if found.refused is None else f" and not {found.refused:,}"
    console.print(
        f"  window: answers {found.accepted:,} tokens{refused}{stated}; extended {found.target_length:,}, trained "
        f"{found.trained_length:,}",
        soft_wrap=True,
    )
    for note in found.notes:
        console.print(f"  - {note}", soft_wrap=True)


def _nats(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}"
