"""``ctxext eval ruler``, and the same as a script for several processes: ``scripts/ruler.py``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
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
from ctxext.cli.options import Seed, Trust, grouped
from ctxext.cli.outputs import OutputOptions

__all__ = ["ruler"]


@dataclass(frozen=True, kw_only=True)
class RulerOptions(RetrievalOptions):
    """With the seed of NVIDIA's prompts."""

    seed: Seed = 42


@grouped
def ruler(
    *,
    asked: ReaderOptions,
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
    options: RulerOptions,
    results: OutputOptions,
    trust: Trust = False,
) -> None:
    """Measure RULER's tasks at every length, offline: unpatched, truncated, and extended.

    With --output, every finished trial is kept: run the same command again after an interruption, and it goes on.

    [bold]Example[/]: ctxext eval ruler Llama-3-8B --text book.txt --method yarn --factor 4 -o ruler.json -o ruler.png
    """
    from ctxext.evaluation.report.retrieval import save_ruler_figure, show_ruler
    from ctxext.evaluation.ruler import TASKS, Sources, ruler_prompts, ruler_report

    document = first_document(text, options.split, options.column)
    sources = Sources(document, squad, hotpotqa)
    session = open_session(asked, options, results, trust)
    with session.console.status("Drawing prompts ..."):
        prompts = ruler_prompts(
            session.checkpoint,
            lengths=session.lengths,
            tasks=task,
            samples=samples,
            seed=options.seed,
            sources=sources,
            chat=chat,
        )
    left_out = {} if task else {name: why for name, one in TASKS.items() if (why := one.why_not(sources))}
    where = f"{len(TASKS) - len(left_out) if task is None else len(task)} tasks"
    survey = run_survey(session, "ctxext eval ruler", prompts, where=where)
    if not session.group.is_main:
        return
    provenance = provenance_with(session.checkpoint, document, options.seed)
    report = ruler_report(survey, provenance, sources=sources, chat=chat, left_out=left_out)
    results.write(
        report, show=lambda: show_ruler(report, session.console), draw=lambda path: save_ruler_figure(report, path)
    )
