"""``ctxext eval ruler``; with several processes: ``accelerate launch -m ctxext eval ruler``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ctxext.cli.eval.common import Session, lengths_of
from ctxext.cli.options import (
    HaystackOptions,
    OutputOptions,
    ReaderOptions,
    Seed,
    SourceOptions,
    grouped,
    option,
)
from ctxext.mistakes import refuse_unknown

TASKS = (
    *("niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3"),
    *("niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa_1", "qa_2"),
)


@dataclass(frozen=True, kw_only=True)
class RulerOptions:
    """Tasks, and what they are made of."""

    task: list[str] | None = option("A task, such as vt. Repeatable. Default: all that can be made from what is given.")
    samples: int = option("Prompts per task and length; NVIDIA takes 500.", default=10, min=1)
    squad: Path | None = option("SQuAD 2.0's dev set, a JSON file, for qa_1.", show_default="without it", exists=True)
    hotpotqa: Path | None = option("HotpotQA's dev set, a JSON file, for qa_2.", show_default="without it", exists=True)
    chat: bool = option("Put prompts into the model's chat template.", "--chat", default=False)
    seed: Seed = 42  # that of NVIDIA's prompts

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
    from ctxext.evaluation.ruler import TASKS as MADE
    from ctxext.evaluation.ruler import Sources, ruler_prompts, ruler_report
    from ctxext.measuring.forward import turning_point

    document = haystack.document()
    sources = Sources(document, tasks.squad, tasks.hotpotqa)
    session = Session(source, results, reference=asked.reference)
    readers = session.readers(asked)
    with session.console.status("Drawing prompts ..."):
        prompts = ruler_prompts(
            session.checkpoint.tokenizer,
            lengths=lengths_of(readers),
            tasks=tasks.task,
            samples=tasks.samples,
            seed=tasks.seed,
            sources=sources,
            chat=tasks.chat,
            turning_point=turning_point(session.checkpoint.model),
        )
    left_out = {} if tasks.task else {name: why for name, task in MADE.items() if (why := task.why_not(sources))}
    count = len(tasks.task or MADE) - len(left_out)
    survey = session.ask("ctxext eval ruler", readers, prompts, f"{count} tasks")
    provenance = session.provenance(document, tasks.seed)
    report = ruler_report(survey, provenance, sources=sources, chat=tasks.chat, left_out=left_out)
    session.finish(report, ruler_page)
