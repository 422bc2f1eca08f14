"""``ctxext eval ruler``, and the same as a script for several processes: ``scripts/ruler.py``."""

from __future__ import annotations

from pathlib import Path
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

__all__ = ["ruler"]


def ruler(
    checkpoint: Measured = None,
    method: Methods = None,
    factor: Factors = None,
    length: Lengths = None,
    task: Annotated[
        list[str] | None,
        typer.Option(
            "--task",
            help="Such as vt; repeatable. Default: all that can be made from what is given.",
            show_default=False,
        ),
    ] = None,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Prompts per task and length; NVIDIA's: 500.")] = 10,
    text: Annotated[
        str | None,
        typer.Option(
            "--text",
            "-t",
            help="Prose for the tasks that hide things in it, such as a novel.",
            show_default="without them",
        ),
    ] = None,
    squad: Annotated[
        Path | None,
        typer.Option("--squad", help="SQuAD 2.0's dev set, a JSON file, for qa_1.", show_default="without it"),
    ] = None,
    hotpotqa: Annotated[
        Path | None,
        typer.Option("--hotpotqa", help="HotpotQA's dev set, a JSON file, for qa_2.", show_default="without it"),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put prompts into the model's chat template.")] = False,
    reference: Reference = None,
    unpatched: Unpatched = True,
    beyond: Beyond = False,
    split: Split = None,
    column: Column = None,
    trained_length: Trained = None,
    sliding_window: SlidingWindow = None,
    dtype: Dtype = "auto",
    device: Device = None,
    seed: Seed = 42,
    output: Output = None,
    as_json: Json = False,
    as_csv: Csv = False,
    trust: Trust = False,
) -> None:
    """Measure RULER's tasks at every length, offline: unpatched, truncated, and extended.

    With --output, every finished trial is kept: run the same command again after an interruption, and it goes on.

    [bold]Example[/]: ctxext eval ruler Llama-3-8B --text book.txt --method yarn --factor 4 -o ruler.json -o ruler.png
    """
    from ctxext.evaluation.report.retrieval import save_ruler_figure, show_ruler
    from ctxext.evaluation.ruler import TASKS, Sources, ruler_prompts, ruler_report

    document = first_document(text, split, column)
    sources = Sources(document, squad, hotpotqa)
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
    with session.console.status("Drawing prompts ..."):
        prompts = ruler_prompts(
            session.checkpoint,
            lengths=session.lengths,
            tasks=task,
            samples=samples,
            seed=seed,
            sources=sources,
            chat=chat,
        )
    left_out = {} if task else {name: why for name, one in TASKS.items() if (why := one.why_not(sources))}
    where = f"{len(TASKS) - len(left_out) if task is None else len(task)} tasks"
    survey = run_survey(session, "ctxext eval ruler", prompts, where=where)
    if not session.group.is_main:
        return
    provenance = provenance_with(session.checkpoint, document, seed)
    report = ruler_report(survey, provenance, sources=sources, chat=chat, left_out=left_out)
    if not (as_json or as_csv):
        show_ruler(report, session.console)
    write_outputs(
        report.to_dict(),
        report.rows(),
        draw=lambda path: save_ruler_figure(report, path),
        output=output,
        as_json=as_json,
        as_csv=as_csv,
    )
