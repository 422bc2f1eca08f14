"""``ctxext eval compare``; with several processes: ``accelerate launch -m ctxext eval compare``."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn
from rich.text import Text
from typer import Option

from ctxext.cli.eval.common import Session, amount_of_work, cost_of, told_on_interrupt
from ctxext.cli.options import Seed, SlidingWindow, SourceOptions, TextOptions, Trained, grouped
from ctxext.progress import DelayedBar, StageBar

if TYPE_CHECKING:
    from ctxext.evaluation.comparison.result import ComparisonResult
    from ctxext.evaluation.comparison.run import Comparison
    from ctxext.evaluation.survey import LossJob, PromptJob


@grouped
def compare(
    *,
    texts: TextOptions,
    output: Annotated[Path, Option("--output", "-o", help="Folder for the report and the finished cells.")] = Path(
        "report"
    ),
    method: Annotated[
        list[str] | None,
        Option(
            "--method",
            "-m",
            help='A method, with parameters where needed: -m "yarn ramp=turns". Repeatable. Default: all that apply.',
        ),
    ] = None,
    factor: Annotated[
        list[float] | None,
        Option("--factor", "-f", help="Target length / trained length. Repeatable. Default: 2."),
    ] = None,
    length: Annotated[
        list[int] | None,
        Option("--length", "-l", help="Tokens to read. Repeatable. Default: each factor times the trained length."),
    ] = None,
    passkey: Annotated[bool, Option(help="Also ask for passkeys at every length and depth.")] = True,
    depth: Annotated[
        list[float] | None,
        Option(
            help="Where in the text passkeys stand, 0 (start) to 1 (end). Repeatable. Default: 0, 0.25, 0.5, 0.75, 1."
        ),
    ] = None,
    trials: Annotated[int, Option(min=1, help="Passkeys per length and depth.")] = 1,
    trained_length: Trained = None,
    sliding_window: SlidingWindow = None,
    seed: Seed = 0,
    source: SourceOptions,
) -> None:
    """Compare all methods on a checkpoint and a text: does a longer context beat dropping the old tokens?

    Every finished part is kept: run the same command again after an interruption, and it goes on.

    [bold]Example[/]: ctxext eval compare Llama-3-8B --text book.txt -o report
    """
    from ctxext.evaluation.comparison.run import prepare
    from ctxext.evaluation.passkey import DEPTHS
    from ctxext.evaluation.report.figures import require_matplotlib

    require_matplotlib()
    session = Session(source)
    console, group = session.console, session.group
    with DelayedBar("trying methods", BarColumn(), MofNCompleteColumn(), after=2.0) as trying:
        comparison = prepare(
            session.checkpoint,
            lambda tokens: texts.read(session.checkpoint, tokens=tokens, whole=True),
            output,
            methods=method or (),
            factors=factor or (2.0,),
            lengths=length or (),
            depths=(depth or DEPTHS) if passkey else (),
            trials=trials,
            seed=seed,
            trained_length=trained_length,
            sliding_window=sliding_window,
            group=group,
            progress=trying if group.is_main else lambda *_: None,
        )
    mine = comparison.begin()
    _announce(console, comparison, mine)
    with told_on_interrupt(console, comparison):
        _measure(console, comparison, mine)
    if group.is_main:
        _show(console, comparison.result(), output)


def _announce(console: Console, comparison: Comparison, mine: tuple[LossJob | PromptJob, ...]) -> None:
    from ctxext.evaluation.labels import all_of, tokens_label

    corpus = comparison.corpus
    names = all_of([document.name for document in corpus.documents])
    short = corpus.read - len(corpus.documents)
    about = (
        f", trained to {tokens_label(comparison.trained_length)} tokens, in "
        f"{comparison.checkpoint.dtype_note}, reads {all_of([tokens_label(n) for n in comparison.lengths])} tokens of "
        f"{names}"
        + (f" ({short} shorter documents left out)" if short else "")
        + f"; in front of each: {corpus.prefix}."
    )
    console.print(Text.assemble((comparison.checkpoint.name, "bold"), about))
    for refusal in comparison.refusals:
        console.print(f"Not measured: {refusal.label}. {refusal.reason}")
    console.print(f"{len(comparison.readings)} ways of reading, {amount_of_work(comparison, mine)}.")


def _measure(console: Console, comparison: Comparison, mine: tuple[LossJob | PromptJob, ...]) -> None:
    """Measure with a bar; say after the first cell how long the rest will take."""
    total = cost_of(mine)
    began, done, told = time.monotonic(), 0.0, False

    with StageBar(console, total, report=not console.is_terminal) as bar:

        def advance(name: str, cost: float) -> None:
            nonlocal done, told
            if mine and not cost and done >= mine[0].cost * 0.999 and not told:
                told = True
                _estimate(console, (time.monotonic() - began) / done * (total - done), mine)
            done += cost
            bar(name, cost)

        comparison.measure(mine, progress=advance)


def _estimate(console: Console, seconds: float, mine: tuple[LossJob | PromptJob, ...]) -> None:
    from ctxext.evaluation.survey import PromptJob

    share = cost_of([job for job in mine if isinstance(job, PromptJob)]) / cost_of(mine)
    cheaper = f" ({share:.0%} of it for passkeys, which --no-passkey leaves out)" if share and seconds > 120 else ""
    left = f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
    left = f"{seconds:.0f} s" if seconds < 120 else left
    console.print(f"About {left} for the other {len(mine) - 1} cells{cheaper}.")


def _show(console: Console, result: ComparisonResult, output: Path) -> None:
    from ctxext.evaluation.report.comparison import comparison_page
    from ctxext.evaluation.report.page import write_page

    page = comparison_page(result)
    with console.status("Drawing the report ..."):
        data = json.dumps(result.to_dict(), indent=1, ensure_ascii=False) + "\n"
        written = write_page(page, output, "report", data)
    page.show(console)
    console.print(f"\nWritten: {written[0]} (open it), {', '.join(str(path) for path in written[1:])}", soft_wrap=True)
