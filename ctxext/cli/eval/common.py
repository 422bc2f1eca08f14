"""The driver of all measuring commands: load, announce, measure with a bar, resume after an interruption, report."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn
from rich.text import Text

from ctxext.cli.options import Measurement, OutputOptions, SourceOptions
from ctxext.files import digest, is_choice
from ctxext.progress import DelayedBar, StageBar, terminal
from ctxext.quantities import method_said

if TYPE_CHECKING:
    from ctxext.evaluation.report.page import Page
    from ctxext.measuring.checkpoint import Checkpoint
    from ctxext.measuring.journal import Journal
    from ctxext.measuring.provenance import Provenance
    from ctxext.measuring.readings import Reader
    from ctxext.measuring.survey import Job, Survey
    from ctxext.texts.corpus import Corpus
    from ctxext.texts.documents import Document

Result = TypeVar("Result", bound=Measurement)
Planned = TypeVar("Planned")


@runtime_checkable
class Resumable(Protocol):
    """Long measurement that goes on where it was stopped."""

    journal: Journal

    @property
    def done(self) -> str:
        """Finished jobs and all jobs, such as ``5 of 14 jobs``."""


class Session:
    """One measurement from its options to its files: the loaded checkpoints, the processes, the terminal.

    Args:
        results: Options for the files of the result; None if the command writes its files itself.
        reference: name of the checkpoint that the references are read with, where it is another.
        masked: True for masked language models.
        methods: Methods with their parameters; None among them is skipped.

    Attributes:
        group: the processes that share the work.
        console: quiet in all processes but the main one; standard error where standard output is for a program.
        checkpoint: Checkpoint that is measured: without weights until ``load_weights``, unless a method reads them.
        reference: Checkpoint that reads the references, likewise; None where that is the checkpoint.

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
        methods: Iterable[str | None] = (),
    ) -> None:
        from ctxext.checkpoints.load import reads_weights
        from ctxext.measuring.survey import launched_processes

        self.results = results or OutputOptions()
        self.group = launched_processes()
        self.console = terminal(stderr=self.results.as_json, quiet=not self.group.is_main)
        self._source, self._masked, self._reference = source, masked, reference
        weights = any(reads_weights(said if is_choice(said) else method_said(said)[0]) for said in methods if said)
        self.checkpoint = self.load(source.checkpoint, weights=weights)
        self.reference: Checkpoint | None = None if reference is None else self.load(reference, weights=weights)

    def planned(self, plan: Callable[[], Planned]) -> Planned:
        """Plan first without weights, to report mistakes early, and again once they are loaded."""
        made = plan()
        return plan() if self.load_weights() else made

    def planned_by_trying(self, plan: Callable[[DelayedBar], Planned]) -> Planned:
        """Plan likewise, with a bar for the methods that are tried, which appears where that takes long."""

        def made() -> Planned:
            with DelayedBar("trying methods", BarColumn(), MofNCompleteColumn(), after=2.0) as trying:
                return plan(trying)

        return self.planned(made)

    def load_weights(self) -> bool:
        """Load the weights that are not there yet; return whether there were any to load."""
        before = self.checkpoint, self.reference
        if not self.checkpoint.has_weights:
            self.checkpoint = self.load(self._source.checkpoint, tokenizer=self.checkpoint.tokenizer)
        if self.reference is not None and not self.reference.has_weights:
            self.reference = self.load(self._reference, tokenizer=self.reference.tokenizer)
        return before != (self.checkpoint, self.reference)

    def load(self, name: str | None, **how: Any) -> Checkpoint:
        """Load a checkpoint as the options ask for, onto the device of this process; None for the default one."""
        from ctxext.measuring.checkpoint import load_checkpoint

        how |= self._source.loading | {"device": self._source.device or self.group.device}
        with self.console.status("Loading the checkpoint ..."):
            return load_checkpoint(name, masked=self._masked, **how)

    def announce(self, trained_length: int, about: str) -> None:
        """Print the checkpoint, its trained length in tokens, and a description of the measurement behind these."""
        from ctxext.measuring.labels import tokens_label

        trained = f", trained to {tokens_label(trained_length)} tokens, in {self.checkpoint.dtype_note}{about}"
        self.console.print(Text.assemble((self.checkpoint.name, "bold"), trained))

    @property
    def journal(self) -> Journal:
        """The journal that keeps finished jobs next to the first output; in memory if no output was named."""
        from ctxext.measuring.journal import Journal

        named = self.results.output
        return Journal(named[0].with_name(f"{named[0].stem}.trials.jsonl") if named else None, self.group.process)

    def bar(self, total: float) -> StageBar:
        """Return a bar on standard error for work of this cost; without a terminal, a line for each finished job.

        It is quiet in all processes but the main one.
        """
        return StageBar(terminal(stderr=True, quiet=self.console.quiet), total)

    def measure(self, survey: Survey[Any]) -> None:
        """Do the jobs of a survey that are not finished yet, with a bar and the time left.

        Raises:
            CtxextError: as the measurement does; finished jobs are kept.
            Exit: with code 130 on Ctrl-C.
        """
        mine, path = survey.begin(), survey.journal.path
        said = f"{len(survey.keys)} jobs"  # such as "14 jobs, 5 of them finished before"
        said += f", {survey.finished} of them finished before" if survey.finished else ""
        said += f"; {len(mine)} for this process of {self.group.processes}" if self.group.processes > 1 else ""
        kept = f"Each is kept in {path}." if path else "--output FILE would keep each that is finished."
        self.console.print(f"{said}. {kept}")
        with ending_on_interrupt(self.console, survey), self.bar(cost_of(mine)) as bar:
            survey.measure(mine, progress=bar)

    def provenance(self, document: Document | None, seed: int) -> Provenance:
        """Return the provenance of prompts that are drawn, with the text that they hide things in."""
        from ctxext.measuring.provenance import provenance_of
        from ctxext.texts.corpus import prefix_label, special_prefix

        prefix = prefix_label(self.checkpoint.tokenizer, special_prefix(self.checkpoint.tokenizer))
        provenance = replace(provenance_of(self.checkpoint, seed=seed), prefix=prefix)
        if document is None:
            return provenance
        return replace(provenance, documents=(document.name,), corpus_sha256=digest(document.text))

    def finish(self, result: Result, page: Callable[[Result], Page]) -> None:
        """Show and write what was measured, in the main process; see ``OutputOptions.write``."""
        if self.group.is_main:
            self.results.write(result, page(result), self.console)


def texts_in_words(corpus: Corpus) -> str:
    """Name the texts of a corpus, how many were left out, and the prefix of each."""
    from ctxext.measuring.labels import few_of

    counts = {"shorter documents": corpus.read - len(corpus.documents) - corpus.copies, "copies": corpus.copies}
    less = " and ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    left_out = f" ({less} left out)" if less else ""
    return f"{few_of([document.name for document in corpus.documents])}{left_out}; in front of each: {corpus.prefix}"


def lengths_of(readers: Sequence[Reader]) -> list[int]:
    """Return all lengths at which any reading is measured, in tokens, increasing."""
    return sorted({length for reader in readers for length in reader.lengths})


def cost_of(jobs: Sequence[Job]) -> float:
    """Return the total cost of jobs, for a bar."""
    return sum((job.cost for job in jobs), 0.0)


@contextlib.contextmanager
def ending_on_interrupt(console: Console, work: Resumable) -> Iterator[None]:
    """End a command on Ctrl-C with exit code 130, after the number of finished jobs and how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        path = work.journal.path
        place = f"kept in {path}; run the same command again to go on" if path else "lost: there is no --output"
        console.print(f"Interrupted. {work.done} are finished and {place}.")
        raise typer.Exit(130) from None
