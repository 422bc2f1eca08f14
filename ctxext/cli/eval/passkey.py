"""``ctxext eval passkey``; with several processes: ``accelerate launch -m ctxext eval passkey``."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from ctxext.cli.eval.common import ReaderOptions, RetrievalSession, first_document
from ctxext.cli.options import Column, OutputOptions, Seed, SourceOptions, Split, grouped


@grouped
def passkey(
    *,
    asked: ReaderOptions,
    depth: Annotated[
        list[float] | None,
        Option(
            help="Where in the text the key stands, 0 (start) to 1 (end). Repeatable. Default: 0, 0.25, 0.5, 0.75, 1."
        ),
    ] = None,
    trials: Annotated[int, Option(min=1, help="Keys per length and depth.")] = 1,
    text: Annotated[
        str | None,
        Option("--text", "-t", help="Hide keys in this text, a needle test. Default: repeated noise."),
    ] = None,
    split: Split = None,
    column: Column = None,
    seed: Seed = 0,
    source: SourceOptions,
    results: OutputOptions,
) -> None:
    """Ask for five digits hidden at every length and depth: unpatched, truncated, and extended.

    With --output, every finished trial is kept: run the same command again after an interruption, and it goes on.

    [bold]Example[/]: ctxext eval passkey Llama-3-8B --method yarn --factor 4 -o passkey.json -o passkey.png
    """
    from ctxext.evaluation.forward import turning_point
    from ctxext.evaluation.passkey import DEPTHS, make_prompts, passkey_report
    from ctxext.evaluation.report.retrieval import passkey_page
    from ctxext.texts.haystack import noise, of_text

    document = first_document(text, split, column)
    session = RetrievalSession(asked, source, results)
    tokenizer = session.checkpoint.tokenizer
    haystack = noise(tokenizer) if document is None else of_text(tokenizer, document.name, document.text)
    prompts = make_prompts(
        tokenizer,
        session.lengths,
        depth or DEPTHS,
        trials=trials,
        seed=seed,
        haystack=haystack,
        turning_point=turning_point(session.checkpoint.model),
    )
    survey = session.ask("ctxext eval passkey", prompts, where=f"keys in {haystack.name}")
    report = passkey_report(survey, haystack, session.provenance(document, seed))
    session.finish(report, passkey_page)
