"""``ctxext eval passkey``, and the same as a script for several processes: ``scripts/passkey.py``."""

from __future__ import annotations

from typing import Annotated

import typer

from ctxext.cli.eval.common import (
    ReaderOptions,
    RetrievalOptions,
    first_document,
    open_session,
    provenance_with,
    run_survey,
)
from ctxext.cli.options import Trust, grouped
from ctxext.cli.outputs import OutputOptions

__all__ = ["passkey"]


@grouped
def passkey(
    *,
    asked: ReaderOptions,
    depth: Annotated[
        list[float] | None,
        typer.Option(
            "--depth",
            help="Of the key, 0 (start) to 1 (end); repeatable. Default: 0, 0.25, 0.5, 0.75, 1.",
            show_default=False,
        ),
    ] = None,
    trials: Annotated[int, typer.Option("--trials", min=1, help="Keys per length and depth.")] = 1,
    text: Annotated[
        str | None,
        typer.Option(
            "--text", "-t", help="Hide keys in this text, a needle test. Default: repeated noise.", show_default=False
        ),
    ] = None,
    options: RetrievalOptions,
    results: OutputOptions,
    trust: Trust = False,
) -> None:
    """Ask for five digits hidden at every length and depth: unpatched, truncated, and extended.

    With --output, every finished trial is kept: run the same command again after an interruption, and it goes on.

    [bold]Example[/]: ctxext eval passkey Llama-3-8B --method yarn --factor 4 -o passkey.json -o passkey.png
    """
    from ctxext.evaluation.forward import turning_point
    from ctxext.evaluation.haystack import noise, of_text
    from ctxext.evaluation.passkey import DEPTHS, make_prompts, passkey_report
    from ctxext.evaluation.report.retrieval import save_passkey_figure, show_passkeys

    document = first_document(text, options.split, options.column)
    session = open_session(asked, options, results, trust)
    tokenizer = session.checkpoint.tokenizer
    haystack = noise(tokenizer) if document is None else of_text(tokenizer, document.name, document.text)
    prompts = make_prompts(
        tokenizer,
        session.lengths,
        depth or DEPTHS,
        trials=trials,
        seed=options.seed,
        haystack=haystack,
        turning_point=turning_point(session.checkpoint.model),
    )
    survey = run_survey(session, "ctxext eval passkey", prompts, where=f"keys in {haystack.name}")
    if not session.group.is_main:
        return
    report = passkey_report(survey, haystack, provenance_with(session.checkpoint, document, options.seed))
    results.write(
        report,
        show=lambda: show_passkeys(report, session.console),
        draw=lambda path: save_passkey_figure(report, path),
    )
