"""``ctxext choose``: the extension that suits a checkpoint and texts, measured."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ctxext.cli.eval.common import Session, ending_on_interrupt
from ctxext.cli.options import (
    OutputOptions,
    Seed,
    SlidingWindow,
    SourceOptions,
    TextOptions,
    Trained,
    grouped,
    option,
    option_group,
    token_option,
)
from ctxext.errors import CheckpointError
from ctxext.files import gguf_at

if TYPE_CHECKING:
    from ctxext.choosing.choose import ChoiceSettings

# Plays that are read where no text is named: one alone has too few stretches to choose on and to judge on.
PLAYS = 8


@option_group
class ChoiceOptions:
    """Candidates, length and cost of a choice."""

    target: int = token_option("Tokens to extend to, above the trained length.", default=...)
    budget: str | None = option(
        "Limit of the work: 30min, 2h or 90s of computing, or '25 passes' over the target length, "
        "which is the same on every machine.",
        show_default="all rounds, about forty passes",
    )
    passkey: bool = option(
        "Also test passkeys hidden in a text of the target length.", "--passkey/--no-passkey", default=True
    )
    stock: bool = option(
        "Choose only among methods that plain transformers loads, as other runtimes may.", "--stock", default=False
    )
    trained_length: Trained = None
    sliding_window: SlidingWindow = None
    seed: Seed = 0

    @property
    def settings(self) -> ChoiceSettings:
        """The options as the library takes them."""
        from ctxext.choosing.choose import ChoiceSettings

        given = {name: value for name, value in vars(self).items() if name not in ("target", "passkey")}
        return ChoiceSettings(target_length=self.target, keys=self.passkey, **given)


@option_group
class ChoiceOutputOptions(OutputOptions):
    """Files that a choice is written to."""

    output: list[Path] | None = option(
        "Also write a file: .json, a page (.md) or a figure of the rounds (.png). Repeatable. Finished parts are kept "
        "in a folder beside the first one.",
        "--output",
        "-o",
        metavar="FILE",
        show_default="none",
    )
    save: Path | None = option(
        "Also write an extended copy of the checkpoint into this directory, which must not exist yet.",
        metavar="DIR",
        show_default="none",
    )

    @property
    def folder(self) -> Path | None:
        """Folder that keeps finished jobs, next to the first output; None for no output."""
        return self.output[0].with_name(f"{self.output[0].stem}.rounds") if self.output else None


@grouped
def choose(*, texts: TextOptions, asked: ChoiceOptions, source: SourceOptions, results: ChoiceOutputOptions) -> None:
    """Choose an extension for a checkpoint and your texts by measuring, and report its margin.

    Every formula, some ways to remap positions and YaRN at many thresholds, divisors and temperatures are compared on
    some of the texts, in rounds of fewer and fewer candidates; the others judge what was chosen. With --output every
    finished part is kept: run the same command again after an interruption, and it goes on.

    [bold]Example[/]: ctxext choose Llama-3-8B -t mine.txt --target 32768 -o choice.json -o choice.png -o choice.md
    """
    if results.save is not None and not os.path.isdir(source.checkpoint or ""):
        raise CheckpointError(
            f"--save copies a checkpoint directory, and {source.checkpoint or 'the default checkpoint'} is none. "
            f"Leave it out; the choice (-o choice.json) names the method for ctxext patch."
        )
    if results.save is not None and gguf_at(str(source.checkpoint)) is None:
        from ctxext.checkpoints.write import refuse_copy

        refuse_copy(Path(str(source.checkpoint)), results.save)
    from ctxext.choosing.choose import PlannedChoice
    from ctxext.choosing.report import choice_page
    from ctxext.measuring.forward import pass_cost
    from ctxext.measuring.labels import tokens_label

    session = Session(source, results)
    # Uncut: the plan divides texts into stretches to choose on and to judge on. Of a number of documents each counts.
    counted = texts.documents is not None
    read = texts if texts.text or counted else replace(texts, documents=PLAYS)
    corpus = read.read(session.checkpoint, tokens=max(2, asked.target + 1) if counted else 2, whole=True)

    planned = session.planned_by_trying(
        lambda trying: PlannedChoice(
            session.checkpoint, corpus, asked.settings, folder=results.folder, group=session.group, trying=trying
        )
    )
    split = planned.split
    about = (
        f": {len(planned.candidates)} candidates for {tokens_label(planned.length)} tokens; {len(split.choosing)} "
        f"stretches of text to choose on, {len(split.held_out)} to judge on, as far as needed."
    )
    session.announce(planned.trained, about)
    total = planned.passes * pass_cost(planned.length, planned.costs.turning_point)
    with ending_on_interrupt(session.console, planned), session.bar(total) as bar:
        planned.progress = bar
        choice = planned.run()
    if not session.group.is_main:  # the processes share the measuring; one of them writes
        return
    results.write(choice, choice_page(choice), session.console)
    if results.save is not None:
        from ctxext.checkpoints.write import patch_checkpoint

        patch_checkpoint(
            str(source.checkpoint),
            results.save,
            choice.method,
            trust_remote_code=source.trust,
            chosen=choice.record,
            results=choice.sentence,
            trained_length=asked.trained_length,
            sliding_window=asked.sliding_window,
        )
        session.console.print(f"Saved: {results.save}, extended by the choice.", soft_wrap=True)
