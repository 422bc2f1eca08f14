"""What the commands of long measurements share: the session, the work with a bar, an interruption, the files."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

import typer
from rich.console import Console
from rich.text import Text

from ctxext.cli.options import (
    Factors,
    Measurement,
    Methods,
    OutputOptions,
    Reference,
    SlidingWindow,
    SourceOptions,
    Trained,
    Unpatched,
    option,
)
from ctxext.errors import InvalidParameterError
from ctxext.progress import StageBar, terminal

if TYPE_CHECKING:
    from ctxext.evaluation.checkpoint import Checkpoint
    from ctxext.evaluation.journal import Journal
    from ctxext.evaluation.provenance import Provenance
    from ctxext.evaluation.report.page import Page
    from ctxext.evaluation.survey import Job, Prompt, PromptJob, Survey
    from ctxext.texts.documents import Document

Result = TypeVar("Result", bound=Measurement)


@runtime_checkable
class Resumable(Protocol):
    """A long measurement that goes on where it was stopped."""

    journal: Journal

    @property
    def done(self) -> str:
        """How much is finished, such as ``5 of 14 jobs``."""


class Session:
    """One measurement from its options to its files: the loaded checkpoints, the processes, the terminal.

    Args:
        source: what is measured.
        results: where the result goes; without it the command writes files of its own.
        reference: name of the checkpoint that the references are read with, where it is another.
        masked: whether it is a model that fills in masked tokens.

    Attributes:
        group: the processes that share the work.
        console: quiet in all processes but the main one; standard error where standard output is for a program.
        checkpoint: what is measured, loaded.
        reference: what the references are read with, loaded; None where that is the checkpoint.

    Raises:
        CtxextError: whatever cannot be right, before anything is measured.
    """

    def __init__(
        self,
        source: SourceOptions,
        results: OutputOptions | None = None,
        *,
        reference: str | None = None,
        masked: bool = False,
    ) -> None:
        from ctxext.evaluation.survey import launched_processes

        self.results = results or OutputOptions()
        self.results.check()
        self.group = launched_processes()
        self.console = terminal(stderr=self.results.as_json, quiet=not self.group.is_main)
        self._source = source
        self._masked = masked
        self.checkpoint = self.load(source.checkpoint)
        self.reference = None if reference is None else self.load(reference)

    def load(self, name: str | None) -> Checkpoint:
        """Load a checkpoint as the options ask for, onto the device of this process; None for the default one."""
        from ctxext.evaluation.checkpoint import load_checkpoint

        asked = self._source
        device = asked.device or self.group.device
        with self.console.status("Loading the checkpoint ..."):
            return load_checkpoint(
                name, dtype=asked.dtype, device=device, trust_remote_code=asked.trust, masked=self._masked
            )

    def bar(self, total: float) -> StageBar:
        """A bar for so much work, on standard error; quiet in all processes but the main one."""
        return StageBar(terminal(stderr=True, quiet=self.console.quiet), total)

    def measure(self, survey: Survey[Any]) -> None:
        """Do what is not finished yet, with a bar and the time left.

        Args:
            survey: whose jobs are measured.

        Raises:
            CtxextError: as the measurement does; finished jobs are kept.
            Exit: with code 130 on Ctrl-C.
        """
        mine, path = survey.begin(), survey.journal.path
        kept = f"Each is kept in {path}." if path else "--output FILE would keep each that is finished."
        self.console.print(f"{amount_of_work(survey, mine)}. {kept}")
        with told_on_interrupt(self.console, survey), self.bar(cost_of(mine)) as bar:
            survey.measure(mine, progress=bar)

    def finish(self, result: Result, page: Callable[[Result], Page]) -> None:
        """Show and write what was measured, in the main process; see ``OutputOptions.write``."""
        if self.group.is_main:
            self.results.write(result, page(result), self.console)


@dataclass(frozen=True, kw_only=True)
class ReaderOptions:
    """Who is asked for what is hidden in a text, and at which lengths; see ``find_readers``."""

    method: Methods = None
    factor: Factors = None
    length: list[int] | None = option(
        "Tokens of prompt and answer. Repeatable. Default: the trained length and what each method reaches.",
        "--length",
        "-l",
    )
    reference: Reference = None
    unpatched: Unpatched = True
    beyond: bool = option(
        "Allow lengths for which a model is not meant, to see how it fails.", "--beyond", default=False
    )
    trained_length: Trained = None
    sliding_window: SlidingWindow = None


class RetrievalSession(Session):
    """A session that asks readers for what is hidden in a text, and keeps each finished trial beside the output.

    Attributes:
        readers: who is asked, the references first.
        trials: the file that keeps finished trials; None where no output was named.
    """

    def __init__(self, asked: ReaderOptions, source: SourceOptions, results: OutputOptions) -> None:
        from ctxext.evaluation.readings import find_readers

        super().__init__(source, results, reference=asked.reference)
        self.readers = find_readers(
            self.checkpoint,
            reference=self.reference,
            methods=asked.method or (),
            factors=asked.factor or (),
            lengths=asked.length or (),
            unpatched=asked.unpatched,
            beyond=asked.beyond,
            trained_length=asked.trained_length,
            sliding_window=asked.sliding_window,
        )
        self.trials = trials_beside(results)

    @property
    def lengths(self) -> list[int]:
        """All at which anybody is asked, in tokens, increasing."""
        return sorted({length for reader in self.readers for length in reader.lengths})

    def ask(self, made_by: str, prompts: Sequence[Prompt], *, where: str) -> Survey[PromptJob]:
        """Ask everything that is not yet answered, with a bar and the time left.

        Args:
            made_by: the command.
            prompts: what is asked.
            where: in what things are hidden, to show.

        Raises:
            CtxextError: as the measurement does; finished trials are kept.
            Exit: with code 130 on Ctrl-C.
        """
        from ctxext.evaluation.journal import Journal
        from ctxext.evaluation.labels import all_of, tokens_label
        from ctxext.evaluation.survey import Survey, jobs_of

        journal = Journal(self.trials, self.group.process)
        survey = Survey(made_by, self.checkpoint, jobs_of(self.readers, prompts), journal=journal, group=self.group)
        about = (
            f", trained to {tokens_label(self.readers[0].readings.trained_length)} "
            f"tokens, in {self.checkpoint.dtype_note}, is asked at {all_of(list(map(tokens_label, self.lengths)))} "
            f"tokens, {where}."
        )
        self.console.print(Text.assemble((self.checkpoint.name, "bold"), about))
        self.console.print(f"Readings: {all_of([reader.reading.label for reader in self.readers])}.")
        self.measure(survey)
        return survey

    def provenance(self, document: Document | None, seed: int) -> Provenance:
        """The provenance of prompts that are drawn, with the text that they hide things in."""
        import hashlib

        from ctxext.evaluation.provenance import provenance_of
        from ctxext.texts.corpus import prefix_label, special_prefix

        prefix = prefix_label(self.checkpoint.tokenizer, special_prefix(self.checkpoint.tokenizer))
        found = replace(provenance_of(self.checkpoint, seed=seed), prefix=prefix)
        if document is None:
            return found
        digest = hashlib.sha256(document.text.encode()).hexdigest()[:12]
        return replace(found, documents=(document.name,), corpus_sha256=digest)


def amount_of_work(survey: Survey[Any], mine: Sequence[Job]) -> str:
    """How much a survey has to do, and this process of it, such as ``14 jobs, 5 of them finished before``."""
    finished, processes = survey.finished, survey.group.processes
    return (
        f"{len(survey.keys)} jobs"
        + (f", {finished} of them finished before" if finished else "")
        + (f"; {len(mine)} for this process of {processes}" if processes > 1 else "")
    )


def cost_of(jobs: Sequence[Job]) -> float:
    """The total for a bar."""
    return sum((job.cost for job in jobs), 0.0)


@contextlib.contextmanager
def told_on_interrupt(console: Console, work: Resumable) -> Iterator[None]:
    """End a command on Ctrl-C by what is finished and how to go on, with exit code 130."""
    try:
        yield
    except KeyboardInterrupt:
        path = work.journal.path
        place = f"kept in {path}; run the same command again to go on" if path else "lost: there is no --output"
        console.print(f"Interrupted. {work.done} are finished and {place}.")
        raise typer.Exit(130) from None


def trials_beside(results: OutputOptions) -> Path | None:
    """The file that keeps finished trials, beside the first output; None where none was named."""
    named = results.output
    return named[0].with_name(f"{named[0].stem}.trials.jsonl") if named else None


def first_document(text: str | None, split: str | None, column: str | None) -> Document | None:
    """The first document of a source; None where no source is named.

    Raises:
        InvalidParameterError: it cannot be read, or holds no text.
    """
    from ctxext.texts.documents import read_documents

    if text is None:
        return None
    document = next(read_documents([text], split=split, column=column), None)
    if document is None:
        raise InvalidParameterError(f"{text!r} holds no text to hide anything in.")
    return document
