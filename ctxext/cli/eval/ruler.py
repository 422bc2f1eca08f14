"""``ctxext eval ruler``; with several processes: ``accelerate launch -m ctxext eval ruler``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from ctxext.cli.eval.common import ReaderOptions, RetrievalSession, first_document
from ctxext.cli.options import Column, OutputOptions, Seed, SourceOptions, Split, grouped


@grouped
def ruler(
    *,
    asked: ReaderOptions,
    task: Annotated[
        list[str] | None,
        Option(help="A task, such as vt. Repeatable. Default: all that can be made from what is given."),
    ] = None,
    samples: Annotated[int, Option(min=1, help="Prompts per task and length; NVIDIA takes 500.")] = 10,
    text: Annotated[
        str | None,
        Option(
            "--text",
            "-t",
            help="Prose for the tasks that hide things in it, such as a novel.",
            show_default="without them",
        ),
    ] = None,
    split: Split = None,
    column: Column = None,
    squad: Annotated[
        Path | None, Option(help="SQuAD 2.0's dev set, a JSON file, for qa_1.", show_default="without it")
    ] = None,
    hotpotqa: Annotated[
        Path | None, Option(help="HotpotQA's dev set, a JSON file, for qa_2.", show_default="without it")
    ] = None,
    chat: Annotated[bool, Option("--chat", help="Put prompts into the model's chat template.")] = False,
    seed: Seed = 42,  # that of NVIDIA's prompts
    source: SourceOptions,
    results: OutputOptions,
) -> None:
    """Measure RULER's tasks at every length, offline: unpatched, truncated, and extended.

    With --output, every finished trial is kept: run the same command again after an interruption, and it goes on.

    [bold]Example[/]: ctxext eval ruler Llama-3-8B --text book.txt --method yarn --factor 4 -o ruler.json -o ruler.png
    """
    from ctxext.evaluation.forward import turning_point
    from ctxext.evaluation.report.retrieval import ruler_page
    from ctxext.evaluation.ruler import TASKS, Sources, ruler_prompts, ruler_report

    document = first_document(text, split, column)
    sources = Sources(document, squad, hotpotqa)
    session = RetrievalSession(asked, source, results)
    with session.console.status("Drawing prompts ..."):
        prompts = ruler_prompts(
            session.checkpoint.tokenizer,
            lengths=session.lengths,
            tasks=task,
            samples=samples,
            seed=seed,
            sources=sources,
            chat=chat,
            turning_point=turning_point(session.checkpoint.model),
        )
    left_out = {} if task else {name: why for name, one in TASKS.items() if (why := one.why_not(sources))}
    where = f"{len(TASKS) - len(left_out) if task is None else len(task)} tasks"
    survey = session.ask("ctxext eval ruler", prompts, where=where)
    provenance = session.provenance(document, seed)
    report = ruler_report(survey, provenance, sources=sources, chat=chat, left_out=left_out)
    session.finish(report, ruler_page)
