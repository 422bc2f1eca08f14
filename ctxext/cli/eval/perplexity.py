"""``ctxext eval perplexity``; with several processes: ``accelerate launch -m ctxext eval perplexity``."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from rich.text import Text
from typer import Option

from ctxext.cli.eval.common import Session, trials_beside
from ctxext.cli.options import (
    ExtensionOptions,
    Lengths,
    OutputOptions,
    Reference,
    SourceOptions,
    TextOptions,
    Unpatched,
    grouped,
    method_names,
)
from ctxext.errors import InvalidParameterError

if TYPE_CHECKING:
    from ctxext.evaluation.checkpoint import Checkpoint as Loaded
    from ctxext.evaluation.perplexity import PerplexityPlan
    from ctxext.texts.corpus import Corpus


@grouped
def perplexity(
    *,
    texts: TextOptions,
    method: Annotated[
        str | None,
        Option(
            "--method",
            "-m",
            help="Extend by this method; default: measure the checkpoint as it is.",
            autocompletion=method_names,
        ),
    ] = None,
    extension: ExtensionOptions,
    length: Lengths = None,
    mode: Annotated[
        str,
        Option(
            help="How a text is read: position (one pass gives the loss at every position), sliding (windows that "
            "are nearly full at every token), or the published protocols yarn and longlora."
        ),
    ] = "position",
    stride: Annotated[
        int | None, Option(help="Tokens between windows; default length / 8 (sliding), 256 (yarn, longlora).")
    ] = None,
    truncate: Annotated[bool, Option("--truncate", help="In mode yarn: cut each text to one window.")] = False,
    tokens: Annotated[
        int | None, Option(help="Tokens of each text that windows slide over; default twice the length.")
    ] = None,
    reference: Reference = None,
    unpatched: Unpatched = True,
    memory: Annotated[
        str | None, Option(help="Budget for weights and passes, such as 2GiB.", show_default="no limit")
    ] = None,
    source: SourceOptions,
    results: OutputOptions,
) -> None:
    """Measure perplexity by position, or by a published protocol, against the best of several truncations.

    [bold]Example[/]: ctxext eval perplexity Llama-3-8B --text book.txt --method yarn --factor 4 -o loss.png
    """
    from ctxext.evaluation.forward import parse_bytes
    from ctxext.evaluation.journal import Journal
    from ctxext.evaluation.perplexity import make_plan, prepare
    from ctxext.evaluation.report.perplexity import perplexity_page

    budget = None if memory is None else parse_bytes(memory)
    session = Session(source, results, reference=reference)
    loaded, group = session.checkpoint, session.group
    plan = make_plan(
        loaded.model,
        mode=mode,
        lengths=length or (),
        stride=stride,
        truncate=truncate,
        method=method,
        arguments=extension.arguments(),
        memory=budget,
        unpatched=unpatched,
    )
    corpus = _corpus(loaded, texts, plan, tokens)
    _announce(session, corpus, plan)
    journal = Journal(trials_beside(results), group.process)
    survey = prepare(loaded, corpus, plan, reference=session.reference, journal=journal, group=group)
    session.measure(survey)
    session.finish(survey.result(), perplexity_page)


def _announce(session: Session, corpus: Corpus, plan: PerplexityPlan) -> None:
    """Say what is about to be measured, on which texts."""
    from ctxext.evaluation.labels import few_of, tokens_label

    short = corpus.read - len(corpus.documents)
    about = (
        f", trained to {tokens_label(plan.trained_length)} tokens, in {session.checkpoint.dtype_note}, reads "
        f"{corpus.tokens:,} tokens of {few_of([document.name for document in corpus.documents])}"
        + (f" ({short} shorter documents left out)" if short else "")
        + f"; in front of each: {corpus.prefix}."
    )
    session.console.print(Text.assemble((session.checkpoint.name, "bold"), about))


def _corpus(loaded: Loaded, texts: TextOptions, plan: PerplexityPlan, tokens: int | None) -> Corpus:
    """The texts, as long as the mode reads them, with the prefix that the mode puts in front."""
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
    found = texts.read(loaded, tokens=least, whole=whole)
    return found.cut(most) if whole else found
