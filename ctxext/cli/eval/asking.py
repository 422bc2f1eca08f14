"""Session of the commands that hide needles in a text and ask for them: passkeys, RULER's tasks, questions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ctxext.cli.eval.common import Session, lengths_of
from ctxext.cli.options import HaystackOptions, OutputOptions, ReaderOptions, SourceOptions

if TYPE_CHECKING:
    from ctxext.evaluation.report.page import Page
    from ctxext.evaluation.trials import TrialReport
    from ctxext.measuring.readings import Reader
    from ctxext.measuring.survey import Prompt
    from ctxext.texts.haystack import Haystack

Drawn = TypeVar("Drawn", bound="Prompt")
Asked = TypeVar("Asked", bound="TrialReport")


class Asking(Session):
    """Measurement of needles in a text, or in repeated noise, at several lengths and by several readings."""

    def __init__(
        self, asked: ReaderOptions, haystack: HaystackOptions, source: SourceOptions, results: OutputOptions
    ) -> None:
        self.document = haystack.document()  # before anything is loaded: a mistake is answered quickly
        self._asked = asked
        super().__init__(source, results, reference=asked.reference, methods=asked.method or ())

    @functools.cached_property
    def haystack(self) -> Haystack:
        """The text as sentences of tokens."""
        from ctxext.texts.haystack import noise, of_text

        tokenizer, document = self.checkpoint.tokenizer, self.document
        return noise(tokenizer) if document is None else of_text(tokenizer, document.name, document.text)

    @functools.cached_property
    def readers(self) -> tuple[Reader, ...]:
        """The readings that are asked, the references first; see ``find_readers``."""
        from ctxext.measuring.readers import find_readers

        return find_readers(self.checkpoint, reference=self.reference, **self._asked.arguments())

    @property
    def lengths(self) -> list[int]:
        """All lengths at which any reading is measured, in tokens, increasing."""
        return lengths_of(self.readers)

    def draw(self, make: Callable[..., Sequence[Drawn]], lengths: Sequence[int], **given: Any) -> Sequence[Drawn]:
        """Make prompts of these lengths for the checkpoint; ``given`` are the other arguments of ``make``."""
        from ctxext.measuring.forward import turning_point

        with self.console.status("Drawing prompts ..."):
            point = turning_point(self.checkpoint.subject)
            return make(self.checkpoint.tokenizer, lengths=lengths, turning_point=point, **given)

    def ask(
        self,
        kind: type[Asked],
        prompts: Sequence[Prompt],
        where: str,
        page: Callable[[Asked], Page],
        *,
        seed: int,
        **about: Any,
    ) -> None:
        """Ask all readings everything that is not answered yet, then show and write the report.

        Args:
            where: Words for what things are hidden in.
            about: More fields of the report; see ``TrialReport.of``.

        Raises:
            CtxextError: as the measurement does; finished trials are kept.
            Exit: with code 130 on Ctrl-C.
        """
        from ctxext.measuring.labels import all_of, tokens_label
        from ctxext.measuring.survey import Survey, jobs_of

        if self.load_weights():
            vars(self).pop("readers", None)  # they hold the model without weights
        jobs = jobs_of(self.readers, prompts)
        survey = Survey(f"ctxext eval {kind.KIND}", self.checkpoint, jobs, journal=self.journal, group=self.group)
        lengths = all_of(list(map(tokens_label, self.lengths)))
        trained = self.readers[0].readings.trained_length
        self.announce(trained, f", is asked at {lengths} tokens, {where}.")
        self.console.print(f"Readings: {all_of([reader.reading.label for reader in self.readers])}.")
        self.measure(survey)
        self.finish(kind.of(survey, self.provenance(self.document, seed), **about), page)
