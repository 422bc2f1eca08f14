"""``ctxext choose``: the extension that suits a checkpoint and texts, measured."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn
from rich.text import Text
from typer import Option

from ctxext.cli.eval.common import Session, told_on_interrupt
from ctxext.cli.options import (
    OutputOptions,
    Seed,
    SlidingWindow,
    SourceOptions,
    TextOptions,
    Trained,
    grouped,
    option,
)
from ctxext.errors import CheckpointError, InvalidParameterError
from ctxext.files import refuse_existing
from ctxext.progress import DelayedBar, StageBar, terminal

if TYPE_CHECKING:
    from ctxext.choosing.choice import Choice
    from ctxext.choosing.run import Contest

# Plays that are read where no text is named: one alone has too few stretches to choose on and to judge on.
PLAYS = 8


@dataclass(frozen=True, kw_only=True)
class PageOptions(OutputOptions):
    """Where a choice goes beside the terminal."""

    output: list[Path] | None = option(
        "Also write a file: .json, a page (.md) or a figure of the race (.png). Repeatable. Finished parts are kept in "
        "a folder beside the first one.",
        "--output",
        "-o",
        metavar="FILE",
        show_default="none",
    )

    @property
    def folder(self) -> Path | None:
        """Where finished cells are kept; None where no output is named."""
        return self.output[0].with_name(f"{self.output[0].stem}.race") if self.output else None


@grouped
def choose(
    *,
    texts: TextOptions,
    target: Annotated[int, Option("--target", help="Tokens to extend to, above the trained length.")],
    budget: Annotated[
        str | None,
        Option(
            help="What it may take: 30min, 2h or 90s of computing, or, the same on every machine, '25 passes' over the "
            "target length.",
            show_default="as much as the race takes, some forty passes",
        ),
    ] = None,
    save: Annotated[
        Path | None,
        Option(
            help="Also write an extended copy of the checkpoint directory, where nothing exists yet.",
            metavar="DIR",
            show_default="none",
        ),
    ] = None,
    passkey: Annotated[bool, Option(help="Also hide keys in a text of the target length and ask for them.")] = True,
    stock: Annotated[
        bool, Option("--stock", help="Choose only among what stock transformers loads, and other runtimes may.")
    ] = False,
    search: Annotated[
        bool,
        Option(
            "--search",
            help="After the race, search the frequencies themselves by gradients; taken only if better on texts kept "
            "back for that. Ten times the passes, where no budget says less.",
        ),
    ] = False,
    trained_length: Trained = None,
    sliding_window: SlidingWindow = None,
    seed: Seed = 0,
    source: SourceOptions,
    results: PageOptions,
) -> None:
    """Choose the extension that suits a checkpoint and your texts, by measuring, and say by how much it is better.

    Every formula, some ways to remap positions and YaRN at many thresholds, divisors and temperatures run a race on
    some of the texts; the others judge what was chosen. With --output every finished part is kept: run the same
    command again after an interruption, and it goes on.

    [bold]Example[/]: ctxext choose Llama-3-8B -t mine.txt --target 32768 -o choice.json -o choice.png -o choice.md
    """
    from ctxext.choosing.budget import parse_budget
    from ctxext.choosing.run import prepare

    parse_budget(budget)
    _refuse_save(save, source.checkpoint)
    session = Session(source, results)
    if session.group.processes > 1:
        raise InvalidParameterError("A race is run by one process: what is read next depends on what was read before.")
    read = texts if texts.text or texts.documents is not None else replace(texts, documents=PLAYS)
    with DelayedBar("trying methods", BarColumn(), MofNCompleteColumn(), after=2.0) as trying:
        contest = prepare(
            session.checkpoint,
            read.read(session.checkpoint, tokens=2, whole=True),
            target_length=target,
            budget=budget,
            seed=seed,
            keys=passkey,
            stock=stock,
            search=search,
            trained_length=trained_length,
            sliding_window=sliding_window,
            folder=results.folder,
            trying=trying,
        )
    choice = _run(session.console, contest)
    _write(session.console, choice, results)
    if save is not None:
        from ctxext.checkpoints.write import patch_checkpoint

        patch_checkpoint(
            str(source.checkpoint),
            save,
            choice.method,
            trust_remote_code=source.trust,
            chosen=choice.record,
            trained_length=trained_length,
            sliding_window=sliding_window,
        )
        session.console.print(f"Saved: {save}, extended by the choice.", soft_wrap=True)


def _refuse_save(save: Path | None, checkpoint: str | None) -> None:
    """Refuse a copy that could not be written, before hours are spent."""
    if save is None:
        return
    if checkpoint is None or not os.path.isdir(checkpoint):
        raise CheckpointError(
            f"--save copies a checkpoint directory, and {checkpoint or 'the default checkpoint'} is none. Leave it "
            f"out; the choice (-o choice.json) names the method for ctxext patch."
        )
    refuse_existing(save)


def _run(console: Console, contest: Contest) -> Choice:
    from ctxext.evaluation.forward import pass_cost
    from ctxext.evaluation.labels import tokens_label

    split = contest.split
    kept_back = f"{len(split.accepting)} to accept what is searched on, " if split.accepting else ""
    about = (
        f", trained to {tokens_label(contest.trained)} tokens, in "
        f"{contest.checkpoint.dtype_note}: {len(contest.entered)} candidates for {tokens_label(contest.length)} "
        f"tokens; {len(split.choosing)} stretches of text to choose on, {kept_back}{len(split.held_out)} to judge on, "
        f"as far as needed."
    )
    console.print(Text.assemble((contest.checkpoint.name, "bold"), about))
    passes = contest.passes_of(None if contest.budget.seconds else contest.budget.passes)
    total = passes * pass_cost(contest.length, contest.costs.turning_point)
    with told_on_interrupt(console, contest), StageBar(terminal(stderr=True, quiet=console.quiet), total) as bar:
        contest.progress = bar
        return contest.run()


def _write(console: Console, choice: Choice, results: PageOptions) -> None:
    from ctxext.choosing.report import page, save_race_figure, show_choice

    class RacePage:
        """The old report in the form of a page, until it is one."""

        name, figures = "race", property(lambda self: [self])

        def show(self, console: Console) -> None:
            show_choice(choice, console)

        def markdown(self, pictures: dict[str, str]) -> str:
            return page(choice, pictures.get("race"))

        def save(self, path: Path) -> None:
            save_race_figure(choice, path)

    results.write(choice, RacePage(), console)  # type: ignore[arg-type]
