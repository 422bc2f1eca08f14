"""``ctxext eval compare``; with several processes: ``accelerate launch -m ctxext eval compare``."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from ctxext.cli.eval.common import Session, texts_in_words
from ctxext.cli.options import (
    SELECT_SAYS,
    MethodOptions,
    Seed,
    SlidingWindow,
    SourceOptions,
    TextOptions,
    grouped,
    json_text,
    option,
    option_group,
    token_option,
)
from ctxext.files import refuse_read_only
from ctxext.registry import method_names


@option_group
class ComparedOptions(MethodOptions):
    """Methods to compare, by default all that apply, at one or more factors."""

    method: list[str] | None = option(
        'A method, with parameters where needed: -m "yarn ramp=turns". Repeatable. Default: all that apply.',
        "--method",
        "-m",
        autocompletion=method_names,
    )
    factor: list[float] | None = option("Target length / trained length. Repeatable. Default: 2.", "--factor", "-f")
    length: list[int] | None = token_option(
        "Tokens to read. Repeatable. Default: each factor times the trained length.", "--length", "-l"
    )
    sliding_window: SlidingWindow = None
    select: bool = option(SELECT_SAYS, "--select", default=False)

    def arguments(self) -> dict[str, Any]:
        """Return these options as arguments of ``comparison.prepare``."""
        arguments = super().arguments()
        return arguments | {"factors": arguments["factors"] or (2.0,)}


@option_group
class HiddenKeyOptions:
    """Passkeys to ask for."""

    passkey: bool = option("Also test passkeys at every length and depth.", default=True)
    depth: list[float] | None = option(
        "Positions of passkeys in the text, 0 (start) to 1 (end). Repeatable. Default: 0, 0.25, 0.5, 0.75, 1."
    )
    trials: int = option("Passkeys per length and depth.", default=1, min=1)
    seed: Seed = 0


@grouped
def compare(
    *,
    texts: TextOptions,
    output: Annotated[
        Path, Option("--output", "-o", file_okay=False, help="Folder for the report and the finished jobs.")
    ] = Path("report"),
    asked: ComparedOptions,
    keys: HiddenKeyOptions,
    source: SourceOptions,
) -> None:
    """Compare all methods on a checkpoint and a text: does a longer context beat dropping the old tokens?

    Every finished part is kept: run the same command again after an interruption, and it goes on.

    [bold]Example[/]: ctxext eval compare Llama-3-8B --text book.txt -o report
    """
    refuse_read_only(output)
    from ctxext.evaluation.comparison import prepare
    from ctxext.evaluation.passkey import DEPTHS
    from ctxext.evaluation.report.comparison import comparison_page
    from ctxext.evaluation.report.figures import require_matplotlib
    from ctxext.evaluation.report.page import write_page
    from ctxext.measuring.labels import all_of, tokens_label

    require_matplotlib()  # now: the report is drawn at the end, perhaps hours later
    session = Session(source, methods=asked.method or ())
    console = session.console
    # Cached, because the comparison may be planned twice; only planning tells how many tokens it needs.
    corpus = functools.cache(lambda tokens: texts.read(session.checkpoint, tokens=tokens, whole=True))

    comparison = session.planned_by_trying(
        lambda trying: prepare(
            session.checkpoint,
            corpus,
            output,
            depths=(keys.depth or DEPTHS) if keys.passkey else (),
            trials=keys.trials,
            seed=keys.seed,
            group=session.group,
            progress=trying if session.group.is_main else lambda *_: None,
            **asked.arguments(),
        )
    )
    lengths = all_of([tokens_label(length) for length in comparison.lengths])
    about = f", reads {lengths} tokens of {texts_in_words(comparison.corpus)}."
    session.announce(comparison.trained_length, about)
    for refusal in comparison.refusals:
        console.print(f"Not measured: {refusal.label}. {refusal.reason}")
    session.measure(comparison)
    if not session.group.is_main:  # one of the processes that share the measuring writes
        return
    result = comparison.result()
    page = comparison_page(result)
    with console.status("Drawing the report ..."):
        data = json_text(result.to_dict(), indent=1, ensure_ascii=False) + "\n"
        written = write_page(page, output, "report", data)
    page.show(console)
    console.print(f"\nWritten: {written[0]} (open it), {', '.join(map(str, written[1:]))}", soft_wrap=True)
