"""``ctxext eval retrieval``; with several processes: ``accelerate launch -m ctxext eval retrieval``."""

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
    token_option,
)
from ctxext.errors import InvalidParameterError, refuse_unknown
from ctxext.evaluation.retrieval import TASK_NAMES


@option_group
class RetrievalOptions:
    """Questions to ask."""

    task: list[str] | None = option(f"A kind of question: {', '.join(TASK_NAMES)}. Repeatable.", show_default="all")
    samples: int = option("Texts per task and length.", default=10, min=2)
    choices: int = option("Questions about each text, and therefore answers to choose from.", default=4, min=2, max=8)
    base: int | None = token_option(
        "The length whose score the effective length keeps 85 percent of.", show_default="the shortest"
    )
    seed: Seed = 0

    def check(self, lengths: list[int]) -> None:
        """Refuse what cannot be asked.

        Raises:
            UnknownNameError: an unknown task.
            InvalidParameterError: a base length that is not measured.
        """
        refuse_unknown("retrieval task", self.task, TASK_NAMES)
        if self.base is not None and lengths and self.base not in lengths:
            raise InvalidParameterError(
                f"--base {self.base} is none of the lengths that are measured. Give --length {self.base} too."
            )


@grouped
def retrieval(
    *,
    asked: ReaderOptions,
    questions: RetrievalOptions,
    haystack: HaystackOptions,
    source: SourceOptions,
    results: OutputOptions,
) -> None:
    """Measure questions that keyword search cannot answer, at every length: unpatched, truncated, and extended.

    With --output, every finished job is kept: run the same command again after an interruption, and it goes on.

    [bold]Example[/]: ctxext eval retrieval Llama-3-8B -m yarn -f 4 -l 1K -l 32K -o choices.json -o choices.png
    """
    questions.check(asked.length or [])
    from ctxext.evaluation.report.retrieval import retrieval_page
    from ctxext.evaluation.retrieval.choices import RetrievalReport, make_prompts

    session = Asking(asked, haystack, source, results)
    lengths = session.lengths
    questions.check(lengths)
    given = {name: getattr(questions, name) for name in ("samples", "choices", "seed")}
    text = session.haystack
    prompts = session.draw(make_prompts, lengths, tasks=questions.task, haystack=text, **given)
    session.ask(
        RetrievalReport,
        prompts,
        f"things hidden in {text.name}",
        retrieval_page,
        seed=questions.seed,
        haystack=text.name,
        base=questions.base or lengths[0],
    )
