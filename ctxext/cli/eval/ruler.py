"""``ctxext eval ruler``; with several processes: ``accelerate launch -m ctxext eval ruler``."""

from __future__ import annotations

from ctxext.cli.eval.asking import Asking
from ctxext.cli.options import (
    HaystackOptions,
    OutputOptions,
    ReaderOptions,
    Seed,
    SourceOptions,
    grouped,
    option,
    option_group,
)
from ctxext.errors import refuse_unknown

TASKS = (
    *("niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3"),
    *("niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe"),
)


@option_group
class RulerOptions:
    """Tasks, and what they are made of."""

    task: list[str] | None = option("A task, such as vt. Repeatable. Default: all that the inputs allow.")
    samples: int = option("Prompts per task and length; NVIDIA takes 500.", default=10, min=1)
    chat: bool = option("Format prompts with the model's chat template.", "--chat", default=False)
    seed: Seed = 42  # as for NVIDIA's prompts

    def __post_init__(self) -> None:
        refuse_unknown("RULER task", self.task, TASKS)


@grouped
def ruler(
    *,
    asked: ReaderOptions,
    tasks: RulerOptions,
    haystack: HaystackOptions,
    source: SourceOptions,
    results: OutputOptions,
) -> None:
    """Measure RULER's tasks at every length, offline: unpatched, truncated, and extended.

    With --output, every finished job is kept: run the same command again after an interruption, and it goes on.

    [bold]Example[/]: ctxext eval ruler Llama-3-8B --text book.txt --method yarn --factor 4 -o ruler.json -o ruler.png
    """
    from ctxext.evaluation.report.retrieval import ruler_page
    from ctxext.evaluation.ruler.run import RulerReport, ruler_prompts
    from ctxext.evaluation.ruler.tasks import TASKS as MADE

    session = Asking(asked, haystack, source, results)
    given = {name: getattr(tasks, name) for name in ("samples", "seed", "chat")}
    prompts = session.draw(ruler_prompts, session.lengths, tasks=tasks.task, essay=session.document, **given)
    used = {prompt.task.name: prompt.task.in_essay for prompt in prompts}
    essay = session.document.name if session.document and any(used.values()) else None
    left_out = (
        {} if tasks.task else {name: why for name, task in MADE.items() if (why := task.why_not(session.document))}
    )
    session.ask(
        RulerReport,
        prompts,
        f"{len(used)} tasks",
        ruler_page,
        seed=tasks.seed,
        essay=essay,
        chat=tasks.chat,
        left_out=left_out,
    )
