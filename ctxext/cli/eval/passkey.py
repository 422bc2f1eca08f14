"""``ctxext eval passkey``, and the same as a script for several processes: ``scripts/passkey.py``."""

from __future__ import annotations

from typing import Annotated

import typer

from ctxext.cli.eval.common import first_document, open_session, provenance_with, run_survey
from ctxext.cli.options import (
    Beyond,
    Column,
    Csv,
    Device,
    Dtype,
    Factors,
    Json,
    Lengths,
    Measured,
    Methods,
    Output,
    Reference,
    Seed,
    SlidingWindow,
    Split,
    Trained,
    Trust,
    Unpatched,
)
from ctxext.cli.outputs import write_outputs

__all__ = ["passkey"]


def passkey(
    checkpoint: Measured = None,
    method: Methods = None,
    factor: Factors = None,
    length: Lengths = None,
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
    reference: Reference = None,
    unpatched: Unpatched = True,
    beyond: Beyond = False,
    split: Split = None,
    column: Column = None,
    trained_length: Trained = None,
    sliding_window: SlidingWindow = None,
    dtype: Dtype = "auto",
    device: Device = None,
    seed: Seed = 0,
    output: Output = None,
    as_json: Json = False,
    as_csv: Csv = False,
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

    document = first_document(text, split, column)
    session = open_session(
        checkpoint,
        output=output,
        as_json=as_json,
        as_csv=as_csv,
        dtype=dtype,
        device=device,
        trust=trust,
        reference=reference,
        sliding_window=sliding_window,
        methods=method or (),
        factors=factor or (),
        lengths=length or (),
        unpatched=unpatched,
        beyond=beyond,
        trained_length=trained_length,
    )
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
    survey = run_survey(session, "ctxext eval passkey", prompts, where=f"keys in {haystack.name}")
    if not session.group.is_main:
        return
    report = passkey_report(survey, haystack, provenance_with(session.checkpoint, document, seed))
    if not (as_json or as_csv):
        show_passkeys(report, session.console)
    write_outputs(
        report.to_dict(),
        report.rows(),
        draw=lambda path: save_passkey_figure(report, path),
        output=output,
        as_json=as_json,
        as_csv=as_csv,
    )
