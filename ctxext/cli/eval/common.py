"""What the commands of long measurements share: who reads, the work with a bar, an interruption, the files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from ctxext.cli.options import (
    Beyond,
    Column,
    Device,
    Dtype,
    Factors,
    Lengths,
    Measured,
    Methods,
    Reference,
    Seed,
    SlidingWindow,
    Split,
    Trained,
    Unpatched,
)
from ctxext.cli.outputs import OutputOptions
from ctxext.errors import InvalidParameterError

if TYPE_CHECKING:
    from ctxext.evaluation.checkpoint import Checkpoint
    from ctxext.evaluation.corpus import Document
    from ctxext.evaluation.provenance import Provenance
    from ctxext.evaluation.readings import Reader
    from ctxext.evaluation.survey import Job, ProcessGroup, Prompt, PromptJob, Survey

__all__ = [
    "ReaderOptions",
    "RetrievalOptions",
    "Session",
    "amount_of_work",
    "cost_of",
    "first_document",
    "load_both",
    "open_session",
    "provenance_with",
    "run_survey",
    "told_on_interrupt",
]


@dataclass(frozen=True, eq=False)
class Session:
    """A loaded checkpoint and who reads with it.

    Args:
        checkpoint: to measure.
        readers: the references first.
        group: the processes that share the work.
        console: quiet in all processes but the main one.
        trials: the file that keeps finished trials; None where no output was named.
    """

    checkpoint: Checkpoint
    readers: tuple[Reader, ...]
    group: ProcessGroup
    console: Console
    trials: Path | None

    @property
    def lengths(self) -> list[int]:
        """All at which anybody is asked, in tokens, increasing."""
        return sorted({length for reader in self.readers for length in reader.lengths})


@dataclass(frozen=True, kw_only=True)
class ReaderOptions:
    """Who is asked, and at which lengths."""

    checkpoint: Measured = None
    method: Methods = None
    factor: Factors = None
    length: Lengths = None


@dataclass(frozen=True, kw_only=True)
class RetrievalOptions:
    """What asking for hidden things takes beside who is asked and what is hidden."""

    reference: Reference = None
    unpatched: Unpatched = True
    beyond: Beyond = False
    split: Split = None
    column: Column = None
    trained_length: Trained = None
    sliding_window: SlidingWindow = None
    dtype: Dtype = "auto"
    device: Device = None
    seed: Seed = 0


def load_both(
    console: Console, checkpoint: str | None, reference: str | None, dtype: str, device: str | None, trust: bool
) -> tuple[Checkpoint, Checkpoint | None]:
    """What is measured, and what the references are read with where that is another."""
    from ctxext.evaluation.checkpoint import load_checkpoint

    how: dict[str, Any] = {"dtype": dtype, "device": device, "trust_remote_code": trust}
    with console.status("Loading the checkpoint ..."):
        loaded = load_checkpoint(checkpoint, **how)
        return loaded, None if reference is None else load_checkpoint(reference, **how)


def open_session(asked: ReaderOptions, options: RetrievalOptions, results: OutputOptions, trust: bool) -> Session:
    """Load what the options name.

    Raises:
        CtxextError: whatever cannot be right, before anything is measured.
    """
    from ctxext.evaluation.readings import find_readers
    from ctxext.evaluation.survey import launched_processes

    results.check()
    group, output = launched_processes(), results.output
    if group.processes > 1 and not output:
        raise InvalidParameterError("Several processes exchange what they find through files; give --output FILE.")
    console = Console(stderr=results.to_stdout, quiet=not group.is_main, highlight=False)
    device = options.device or group.device
    loaded, original = load_both(console, asked.checkpoint, options.reference, options.dtype, device, trust)
    readers = find_readers(
        loaded,
        reference=original,
        methods=asked.method or (),
        factors=asked.factor or (),
        lengths=asked.length or (),
        unpatched=options.unpatched,
        beyond=options.beyond,
        trained_length=options.trained_length,
        sliding_window=options.sliding_window.value if options.sliding_window else None,
    )
    trials = output[0].with_name(f"{output[0].stem}.trials.jsonl") if output else None
    return Session(loaded, readers, group, console, trials)


def run_survey(session: Session, made_by: str, prompts: Sequence[Prompt], *, where: str) -> Survey[PromptJob]:
    """Ask everything that is not yet answered, with a bar and the time left.

    Args:
        session: from ``open_session``.
        made_by: the command.
        prompts: what is asked.
        where: in what things are hidden, to show.

    Raises:
        CtxextError: as the measurement does; finished trials are kept.
        Exit: with code 130 on Ctrl-C.
    """
    from ctxext.evaluation.journal import Journal
    from ctxext.evaluation.labels import tokens_label
    from ctxext.evaluation.report.sentences import all_of
    from ctxext.evaluation.survey import Survey, jobs_of
    from ctxext.progress import StageBar

    console, checkpoint, trained = session.console, session.checkpoint, session.readers[0].readings.trained_length
    journal = Journal(session.trials, session.group.process)
    survey = Survey(made_by, checkpoint, jobs_of(session.readers, prompts), journal=journal, group=session.group)
    mine = survey.begin()
    console.print(
        f"[bold]{checkpoint.name}[/], trained to {tokens_label(trained)} tokens, in {checkpoint.dtype_note}, is asked "
        f"at {all_of([tokens_label(length) for length in session.lengths])} tokens, {where}."
    )
    console.print(
        f"Readings: {all_of([one.reading.label for one in session.readers])}; {amount_of_work(survey, mine)}. "
        + (f"Each is kept in {session.trials}." if session.trials else "--output FILE would keep each finished trial.")
    )
    with told_on_interrupt(console, survey), StageBar(Console(stderr=True, quiet=console.quiet), cost_of(mine)) as bar:
        survey.measure(mine, progress=bar)
    return survey


def amount_of_work(survey: Survey[Any], mine: Sequence[Job]) -> str:
    """How much a survey has to do, and this process of it, such as ``14 trials, 5 of them finished before``."""
    finished, processes = survey.finished, survey.group.processes
    return (
        f"{len(survey.keys)} {survey.journal.work}"
        + (f", {finished} of them finished before" if finished else "")
        + (f"; {len(mine)} for this process of {processes}" if processes > 1 else "")
    )


def cost_of(jobs: Sequence[Job]) -> float:
    """The total for a bar."""
    return sum(job.cost for job in jobs)


@contextlib.contextmanager
def told_on_interrupt(console: Console, survey: Survey[Any]) -> Iterator[None]:
    """End a command on Ctrl-C by what is finished and how to go on, with exit code 130."""
    try:
        yield
    except KeyboardInterrupt:
        place = survey.journal.path
        console.print(
            f"Interrupted. {survey.finished if place else 0} of {len(survey.keys)} {survey.journal.work} are finished "
            f"and kept" + (f" in {place}; run the same command again to go on." if place else ": there is no --output.")
        )
        raise typer.Exit(130) from None


def first_document(text: str | None, split: str | None, column: str | None) -> Document | None:
    """The first document of a source; None where no source is named.

    Raises:
        InvalidParameterError: it cannot be read, or holds no text.
    """
    from ctxext.evaluation.corpus import read_documents

    if text is None:
        return None
    document = next(read_documents([text], split=split, column=column), None)
    if document is None:
        raise InvalidParameterError(f"{text!r} holds no text to hide anything in.")
    return document


def provenance_with(checkpoint: Checkpoint, document: Document | None, seed: int) -> Provenance:
    """The provenance of prompts that are drawn, with the text that they hide things in."""
    import hashlib

    from ctxext.evaluation.corpus import prefix_label, special_prefix
    from ctxext.evaluation.provenance import provenance_of

    tokenizer = checkpoint.tokenizer
    found = replace(provenance_of(checkpoint, seed=seed), prefix=prefix_label(tokenizer, special_prefix(tokenizer)))
    if document is None:
        return found
    digest = hashlib.sha256(document.text.encode()).hexdigest()[:12]
    return replace(found, documents=(document.name,), corpus_sha256=digest)
