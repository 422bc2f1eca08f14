"""``ctxext eval perplexity``, and the same as a script for several processes: ``scripts/perplexity.py``."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from ctxext.cli.eval.common import load_both
from ctxext.cli.options import (
    Device,
    Dtype,
    Factor,
    Measured,
    Param,
    Reference,
    ScalingOption,
    SlidingWindow,
    Target,
    Text,
    TextOptions,
    Trained,
    Trust,
    Unpatched,
    arguments,
    grouped,
    method_names,
)
from ctxext.cli.outputs import OutputOptions

if TYPE_CHECKING:
    from ctxext.evaluation.checkpoint import Checkpoint as Loaded
    from ctxext.evaluation.corpus import Corpus
    from ctxext.evaluation.perplexity import PerplexityPlan

__all__ = ["perplexity"]


@grouped
def perplexity(
    *,
    checkpoint: Measured = None,
    text: Text = None,
    method: Annotated[
        str | None,
        typer.Option(
            "--method",
            "-m",
            help="Extend by this method; default: measure it as it is.",
            autocompletion=method_names,
        ),
    ] = None,
    factor: Factor = None,
    target_length: Target = None,
    length: Annotated[
        list[int] | None,
        typer.Option("--length", "-l", help="Tokens; repeatable. Default: what the extended model is meant for."),
    ] = None,
    mode: Annotated[
        str,
        typer.Option(help="position: one pass, loss at every position. sliding: nearly full windows. yarn, longlora."),
    ] = "position",
    stride: Annotated[
        int | None, typer.Option(help="Tokens between windows; default length / 8 (sliding), 256 (yarn, longlora).")
    ] = None,
    truncate: Annotated[bool, typer.Option("--truncate", help="In mode yarn: cut each text to one window.")] = False,
    tokens: Annotated[
        int | None, typer.Option(help="Tokens of each text that windows slide over; default twice the length.")
    ] = None,
    reference: Reference = None,
    unpatched: Unpatched = True,
    memory: Annotated[
        str | None, typer.Option(help="Budget for weights and passes, such as 2GiB.", show_default="no limit")
    ] = None,
    texts: TextOptions,
    trained_length: Trained = None,
    sliding_window: SlidingWindow = None,
    scaling: ScalingOption = None,
    param: Param = None,
    dtype: Dtype = "auto",
    device: Device = None,
    results: OutputOptions,
    trust: Trust = False,
) -> None:
    """Measure perplexity by position, or by a published protocol, against the best of several truncations.

    [bold]Example[/]: ctxext eval perplexity Llama-3-8B --text book.txt --method yarn --factor 4 -o loss.png
    """
    from ctxext.evaluation.forward import parse_bytes
    from ctxext.evaluation.perplexity import make_plan, run, total_cost
    from ctxext.evaluation.report.perplexity import announce, save_figure, show
    from ctxext.evaluation.survey import launched_processes
    from ctxext.progress import StageBar

    results.check()
    budget = None if memory is None else parse_bytes(memory)
    group = launched_processes()
    console = Console(stderr=results.to_stdout, quiet=not group.is_main, highlight=False)
    loaded, original = load_both(console, checkpoint, reference, dtype, device or group.device, trust)
    plan = make_plan(
        loaded.model,
        mode=mode,
        lengths=length or (),
        stride=stride,
        truncate=truncate,
        method=method,
        arguments=arguments(factor, target_length, trained_length, sliding_window, param, scaling),
        memory=budget,
        unpatched=unpatched,
    )
    corpus = _corpus(loaded, text, plan, tokens, texts)
    announce(console, loaded, corpus, plan)
    cost = total_cost(loaded, corpus, plan) / group.processes
    with StageBar(Console(stderr=True, quiet=not group.is_main), cost) as bar:
        result = run(loaded, corpus, plan, reference=original, spread=group.spread, progress=bar)
    if not group.is_main:
        return
    results.write(result, show=lambda: show(result, console), draw=lambda path: save_figure(result, path))


def _corpus(
    loaded: Loaded, text: list[str] | None, plan: PerplexityPlan, tokens: int | None, texts: TextOptions
) -> Corpus:
    """The texts, as long as the mode reads them, with the prefix that the mode puts in front."""
    from ctxext.errors import InvalidParameterError

    whole = plan.mode != "position"
    if not whole and tokens is not None:
        raise InvalidParameterError("--tokens is for windows that slide; in mode position, --length says it all.")
    if plan.mode == "longlora" and texts.bos not in ("auto", "none"):
        raise InvalidParameterError(
            f"LongLoRA's protocol has nothing in front of its texts; leave out --bos {texts.bos}."
        )
    if plan.mode == "longlora":
        texts = replace(texts, bos="none")
    elif plan.mode == "yarn" and texts.bos == "auto":  # its code adds the tokenizer's BOS wherever there is one
        texts = replace(texts, bos="none" if loaded.tokenizer.bos_token is None else "bos")
    least = 2 if plan.mode == "longlora" else plan.length + 1
    most = 2 * plan.length if tokens is None else tokens
    if whole and most < least:
        raise InvalidParameterError(f"--tokens must be at least {least:,}, one more than the length; found {most:,}.")
    found = texts.read(loaded, text, tokens=least, whole=whole)
    return found.cut(most) if whole else found
