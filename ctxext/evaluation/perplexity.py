"""Measure the perplexity of an extended model, and of the references that it has to beat."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ctxext.checkpoints.carried import already_extended
from ctxext.core import patching
from ctxext.core.architecture import architecture_of
from ctxext.core.patching import patched_state
from ctxext.core.subject import Subject
from ctxext.errors import InvalidParameterError
from ctxext.evaluation.perplexity_result import LENGTH, POSITIONS, PerplexityReading, PerplexityResult, PerplexityScore
from ctxext.measuring.checkpoint import Checkpoint
from ctxext.measuring.forward import cached_tokens_for, check_positions, fitted_length_of, follows_length, turning_point
from ctxext.measuring.journal import Journal
from ctxext.measuring.labels import label_of
from ctxext.measuring.loss import Window
from ctxext.measuring.loss_table import LossTable
from ctxext.measuring.provenance import ExtensionRecord, Provenance, provenance_of
from ctxext.measuring.readings import Reader, Reading, Readings, check_reference, known_trained_length
from ctxext.measuring.statistics import PairedDifference
from ctxext.measuring.survey import LossJob, ProcessGroup, Survey
from ctxext.measuring.truncation import (
    AS_SAVED,
    SELECTED,
    TRUNCATED,
    UNPATCHED,
    window_name,
    windows_of,
)
from ctxext.texts.corpus import Corpus, TokenisedDocument

PARTS = 4


@dataclass(frozen=True, kw_only=True)
class PerplexityPlan:
    """Plan of a measurement: its lengths and options, checked against the model by ``make_plan``.

    Args:
        method: Name of the method; None measures the checkpoint as it is.
        fitted_lengths: Length that the positions of each length are made for.
        select: True to measure chosen chunks as well as truncations.
    """

    trained_length: int
    lengths: tuple[int, ...]
    method: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    extension: ExtensionRecord = field(default_factory=ExtensionRecord)
    dynamic: bool = False
    fitted_lengths: Mapping[int, int] = field(default_factory=dict)
    cached: int | None = None
    unpatched: bool = True
    select: bool = False

    @property
    def length(self) -> int:
        """The greatest length."""
        return self.lengths[-1]

    def passes(self, fitted: Callable[[int], int]) -> dict[int, list[int]]:
        """Return the lengths that a pass at each length serves: those fitted to the same length."""
        groups: dict[int, list[int]] = {}
        for length in self.lengths:
            groups.setdefault(fitted(length), []).append(length)
        return {max(group): group for group in groups.values()}


def _beginning(text: TokenisedDocument, length: int) -> Window:
    """Return the pass over the first positions of a text; a conversation may have fewer."""
    positions = min(length, text.tokens - 1)
    return Window(0, positions + 1, positions)


def make_plan(
    model: nn.Module,
    *,
    lengths: Sequence[int] = (),
    method: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    memory: int | None = None,
    unpatched: bool = True,
    select: bool = False,
) -> PerplexityPlan:
    """Check the options against the model, and leave the model unchanged.

    Args:
        lengths: Tokens to read; default the reach of the extended model. One length is divided into seven spans: up
            to a quarter, a half and the whole of the trained window, and four equal ones beyond.
        arguments: Arguments of ``ctxext.patch`` besides the method; without factor and target length, the greatest
            length is the target.
        memory: Budget in bytes for weights and passes; None for no limit.
        select: True to measure chosen chunks as well as truncations (``ctxext.measuring.selection``).

    Raises:
        CtxextError: as ``ctxext.patch``.
        InvalidParameterError: a length out of range, or arguments without a method.
    """
    given = {name: value for name, value in (arguments or {}).items() if value is not None}
    if method is None and given.keys() - {"trained_length"}:
        raise InvalidParameterError(f"{', '.join(given)}: only with a method.")
    subject = Subject.of(model)
    trained = known_trained_length(subject, given.get("trained_length"))
    if method is not None and not given.keys() & {"factor", "target_length"} and max(lengths, default=0) > trained:
        given["target_length"] = max(lengths)
    with patching.patched(model, method, **given) if method is not None else contextlib.nullcontext():
        extension, dynamic = ExtensionRecord.of(model), follows_length(subject)
        fitted = fitted_length_of(subject, trained)
        extended = dynamic or patched_state(subject.model) is not None or already_extended(subject.config) is not None
        reach = patching.describe(model).target_length if extended else None
    chosen = _lengths(lengths, trained, reach)
    if reach is not None and chosen[-1] > reach and not dynamic:
        raise InvalidParameterError(
            f"A length of {chosen[-1]:,} tokens is beyond what the model is extended for: {reach:,}. Raise "
            f"--factor, or give a smaller --length."
        )
    if method is None and chosen[-1] > trained:
        architecture_of(subject)  # which refuses a model that has no positions there
    if method is None:
        check_positions(subject, chosen[-1])
    return PerplexityPlan(
        trained_length=trained,
        lengths=chosen,
        method=method,
        arguments=given if method is not None else {},
        extension=extension,
        dynamic=dynamic,
        fitted_lengths={length: fitted(length) for length in chosen},
        cached=cached_tokens_for(subject, chosen[-1], memory),
        unpatched=unpatched,
        select=select,
    )


def _lengths(lengths: Sequence[int], trained: int, reach: int | None) -> tuple[int, ...]:
    asked = sorted(set(lengths)) or [max(reach or 0, trained)]
    if asked[0] < 2:
        raise InvalidParameterError(f"A length is at least 2 tokens, found {asked[0]}.")
    if len(asked) > 1:
        return tuple(sorted({*asked, *({trained} if asked[-1] > trained else ())}))
    inside = min(asked[0], trained)
    beyond = [trained + (asked[0] - trained) * part // PARTS for part in range(1, PARTS + 1)]
    spans = {inside // 4, inside // 2, inside, *(beyond if asked[0] > trained else ())}
    return tuple(sorted(length for length in spans if length >= 2))


@dataclass(frozen=True, eq=False)
class LossesAt:
    """The jobs whose losses make up one reading.

    Args:
        at: Jobs whose losses follow each other, of each text, by increasing length.
        counted: Jobs whose passes the reading is charged for.
    """

    name: str
    at: Mapping[int, Sequence[Sequence[LossJob]]]
    counted: Sequence[LossJob] = ()


@dataclass(eq=False, kw_only=True)
class Perplexity(Survey[LossJob]):
    """A planned measurement: call ``begin``, ``measure`` the pending jobs, then call ``result``.

    Args:
        inside: Positions inside the trained window that are compared with the unpatched model's.
        measured_inside: Jobs of the measured model inside the window, of each text; empty without a comparison.
        plain_inside: Jobs of the unpatched model there.
        known_inside: Losses of the unpatched model there, where they are known from before.
    """

    plan: PerplexityPlan
    readings: tuple[LossesAt, ...]
    inside: int
    measured_inside: Sequence[Sequence[LossJob]]
    plain_inside: Sequence[Sequence[LossJob]]
    known_inside: Sequence[Tensor] | None
    provenance: Provenance
    notes: tuple[str, ...]

    def result(self) -> PerplexityResult:
        """Average the losses of the finished jobs.

        Raises:
            ResultsError: losses cannot be read.
        """
        losses, lines = self.losses(), self.journal.finished()
        scores: dict[str, list[PerplexityScore]] = {reading.name: [] for reading in self.readings}
        # PerplexityReading.scores holds scores of positions first.
        spans = [(POSITIONS, *span) for span in itertools.pairwise((0, *self.plan.lengths))]
        for span in (*spans, *((LENGTH, 0, length) for length in self.plan.lengths)):
            for name, score in self._scores(losses, *span):
                scores[name].append(score)
        measured = self.readings[-1]
        return PerplexityResult(
            trained_length=self.plan.trained_length,
            lengths=self.plan.lengths,
            readings=tuple(
                PerplexityReading(
                    name=reading.name,
                    scores=tuple(scores[reading.name]),
                    in_window=self._in_window(losses) if reading is measured else None,
                    dynamic=self.plan.dynamic and reading is measured,
                    passes=sum(len(job.windows) for job in reading.counted),
                    tokens=sum(window.positions for job in reading.counted for window in job.windows),
                    seconds=sum((lines[job.key]["seconds"] for job in reading.counted), 0.0),
                )
                for reading in self.readings
            ),
            notes=self.notes,
            provenance=self.provenance,
        )

    def _in_window(self, losses: Mapping[str, Tensor]) -> PairedDifference | None:
        """Return the loss inside the trained window minus the unpatched model's; None without a comparison."""
        if not self.measured_inside:
            return None
        plain = self.known_inside
        plain = _joined(losses, self.plain_inside, 0, self.inside) if plain is None else plain
        table = LossTable.of({"": _joined(losses, self.measured_inside, 0, self.inside), UNPATCHED: plain})
        return table.select(partial(_counted, self.measured_inside)).versus("", UNPATCHED)

    def _scores(
        self, losses: Mapping[str, Tensor], kind: str, start: int, stop: int
    ) -> Iterator[tuple[str, PerplexityScore]]:
        """Yield the score of each reading, with its name.

        Between two lengths, a dynamic method's losses come from the pass at the greater one.
        """
        plan, measured = self.plan, self.readings[-1].at[stop]
        losses_of = {reading.name: _joined(losses, reading.at[stop], start, stop) for reading in self.readings}
        table = LossTable.of(losses_of).select(partial(_counted, measured, start=start))
        if not table.tokens(self.readings[-1].name):  # conversations whose answers lie elsewhere
            return
        beyond = table.short and (start >= plan.trained_length or (kind == LENGTH and stop > plan.trained_length))
        for name in losses_of:
            scored = PerplexityScore(
                kind=kind,
                start=start,
                stop=stop,
                tokens=table.tokens(name),
                loss=table.mean(name),
                versus_truncation=table.versus(name) if beyond else None,
                window=table.window_of(name) if beyond else None,
                selected=bool(beyond) and name == TRUNCATED and table.selected,
            )
            yield name, scored


def _joined(
    losses: Mapping[str, Tensor], texts: Sequence[Sequence[LossJob]], start: int = 0, stop: int | None = None
) -> list[Tensor]:
    """Join the losses of each text's jobs in their order, and return positions ``start`` to ``stop``."""
    return [torch.cat([losses[job.key] for job in jobs])[start:stop] for jobs in texts]


def _counted(texts: Sequence[Sequence[LossJob]], losses: Sequence[Tensor], start: int = 0) -> list[Tensor]:
    """Return the losses of each text, which begin at position ``start``, but only of answers in a conversation."""
    return [
        part if (answers := jobs[0].text.answers) is None else part[answers[0, start + 1 :][: len(part)]]
        for jobs, part in zip(texts, losses, strict=True)
    ]


def prepare(
    checkpoint: Checkpoint,
    corpus: Corpus,
    plan: PerplexityPlan,
    *,
    reference: Checkpoint | None = None,
    inside: Sequence[Tensor] | None = None,
    name: str | None = None,
    journal: Journal | None = None,
    group: ProcessGroup | None = None,
) -> Perplexity:
    """Lay out the references' jobs, then the extended model's, before anything is measured.

    The references are read by the checkpoint unpatched, the control where it has positions for the length. A checkpoint
    that comes extended may have been trained since, so that taking its extension off gives a model that nobody uses:
    then they are read by ``reference``, or, without one, the truncations by the extended model itself and the
    short-context column is left out.

    Args:
        inside: Losses that ``inside_survey`` found before, where the original no longer exists as a ``reference``.
            The truncations are read by the extended model itself.

    Raises:
        InvalidParameterError: a reference that makes no sense, or a text that is too short.
    """
    saved = plan.method is None and already_extended(checkpoint.subject.config) is not None
    measured = name or plan.method or (AS_SAVED if saved else UNPATCHED)
    plain = None if inside is not None or saved else checkpoint
    if reference is not None and inside is None:
        check_reference(checkpoint, reference)
        plain = reference
    records = {measured: plan.extension if plan.method else ExtensionRecord.of(checkpoint.model)}
    if plain is not None and measured != UNPATCHED:
        records = {UNPATCHED: ExtensionRecord.of(plain.model)} | records
    layout = _Layout.of(checkpoint, corpus, plan)
    originals = layout if plain is None or plain is checkpoint else _Layout.of(plain, corpus, plan)
    apply = partial(patching.patched, checkpoint.model, plan.method, **plan.arguments) if plan.method else None
    extended = layout.reader(measured, records[measured], apply)
    unpatched = originals.reader(window_name(plan.trained_length) if plain is None else UNPATCHED)

    windows = originals.truncations(unpatched)
    readings = [*windows.values(), layout.whole(extended, plan.fitted_lengths.__getitem__)]
    if windows:  # each score takes the best of them there
        whole = windows[window_name(plan.trained_length)].at
        readings.insert(-1, LossesAt(TRUNCATED, whole))
    control: LossesAt | None = None
    measured_inside: Sequence[Sequence[LossJob]] = ()
    plain_inside: Sequence[Sequence[LossJob]] = ()
    if measured != UNPATCHED and plain is not None:
        if plan.unpatched and windows and plan.length <= (originals.readings.most or plan.length):
            control = originals.whole(unpatched, fitted_length_of(plain.subject, plan.trained_length))
            readings.insert(0, control)
        plain_inside = originals.inside(unpatched, control)
    if measured != UNPATCHED and (inside is not None or plain is not None):
        measured_inside = layout.inside(extended, readings[-1])
    jobs = [job for reading in readings for texts in reading.at.values() for text in texts for job in text]
    jobs += [job for text in (*plain_inside, *measured_inside) for job in text]
    order = {job.reader: number for number, job in reversed(list(enumerate(jobs)))}  # a model is patched once
    unique = {job.key: job for job in sorted(jobs, key=lambda job: order[job.reader])}
    return Perplexity(
        "ctxext eval perplexity",
        checkpoint,
        list(unique.values()),
        corpus=corpus,
        journal=journal or Journal(None),
        group=group or ProcessGroup(),
        plan=plan,
        readings=tuple(readings),
        inside=layout.window,
        measured_inside=measured_inside,
        plain_inside=plain_inside,
        known_inside=inside,
        provenance=replace(provenance_of(checkpoint, corpus, trained_length=plan.trained_length), extensions=records),
        notes=_notes(checkpoint, corpus, plan, plain, reference, inside is not None),
    )


def inside_survey(checkpoint: Checkpoint, corpus: Corpus, plan: PerplexityPlan) -> Survey[LossJob]:
    """Return the jobs, one per text, that read inside the trained window; for ``prepare(inside=...)``."""
    layout = _Layout.of(checkpoint, corpus, plan)
    texts = layout.inside(layout.reader(UNPATCHED))
    return Survey("ctxext eval perplexity", checkpoint, [job for jobs in texts for job in jobs], corpus=corpus)


@dataclass(frozen=True, eq=False)
class _Layout:
    """Lays out what one checkpoint reads."""

    readings: Readings
    corpus: Corpus
    plan: PerplexityPlan
    turning_point: int

    @classmethod
    def of(cls, checkpoint: Checkpoint, corpus: Corpus, plan: PerplexityPlan) -> _Layout:
        """Cut the texts for a checkpoint."""
        lifted = plan.arguments.get("sliding_window")
        readings = Readings(checkpoint, trained_length=plan.trained_length, sliding_window=lifted, windows=())
        return cls(readings, corpus, plan, turning_point(checkpoint.subject))

    @property
    def window(self) -> int:
        """Positions inside the trained window that every text has, conversations aside, up to the greatest length."""
        texts = [document.tokens - 1 for document in self.corpus.documents if document.answers is None]
        return min(self.plan.trained_length, self.plan.length, *texts)

    def reader(
        self,
        name: str,
        record: ExtensionRecord | None = None,
        apply: Callable[[], contextlib.AbstractContextManager[Any]] | None = None,
    ) -> Reader:
        """Return a reader of the model as it is, or as ``apply`` makes it."""
        reading = Reading(name=name, label=label_of(name), **(vars(record) if record else {}))
        return Reader(reading, self.readings, self.plan.lengths, apply=apply or contextlib.nullcontext)

    def whole(self, reader: Reader, fitted: Callable[[int], int]) -> LossesAt:
        """Lay out one pass over each text, or where positions follow the length, one for every ``fitted`` length."""
        at: dict[int, Sequence[Sequence[LossJob]]] = {}
        counted: list[LossJob] = []
        for longest, lengths in self.plan.passes(fitted).items():
            jobs = [self._job(reader, text, [_beginning(text, longest)]) for text in self.corpus.documents]
            at |= {length: [(job,) for job in jobs] for length in lengths}
            counted += jobs
        return LossesAt(reader.reading.name, dict(sorted(at.items())), counted)

    def truncations(self, unpatched: Reader) -> dict[str, LossesAt]:
        """Lay out the readings of a part of a text, by name; none where nothing lies beyond the trained window.

        Inside the trained window nothing is dropped: what ``unpatched`` reads there is part of each.
        """
        plan, trained = self.plan, self.plan.trained_length
        truncations: dict[str, LossesAt] = {}
        if plan.length <= trained:
            return truncations
        for name in [*map(window_name, windows_of(trained)), *[SELECTED] * plan.select]:
            reader = self.reader(name)
            texts = [self._truncated(unpatched, reader, text) for text in self.corpus.documents]
            counted = [job for text in texts for job in text if name == window_name(trained) or job.reader is reader]
            truncations[name] = LossesAt(name, dict.fromkeys(plan.lengths, texts), counted)
        return truncations

    def inside(self, reader: Reader, known: LossesAt | None = None) -> Sequence[Sequence[LossJob]]:
        """Lay out the positions inside the trained window, for each text; ``known`` has them."""
        if known is not None:
            nearest = next(length for length in self.plan.lengths if length >= self.window)
            return known.at[nearest]
        return [
            (self._job(reader, document, [_beginning(document, self.window)]),) for document in self.corpus.documents
        ]

    def _truncated(self, unpatched: Reader, reader: Reader, text: TokenisedDocument) -> tuple[LossJob, ...]:
        """Lay out the start of a text up to the trained length, and the rest as a part of it shows it, if any."""
        plan, trained = self.plan, self.plan.trained_length
        positions = min(text.tokens - 1, plan.length)
        head = self._job(unpatched, text, [_beginning(text, trained)])
        if positions <= trained:
            return (head,)
        return head, self._job(reader, text, reader.beyond(text, positions))

    def _job(self, reader: Reader, text: TokenisedDocument, windows: Sequence[Window]) -> LossJob:
        name = f"{reader.reading.name}, {text.name}"
        return LossJob.of(reader, text, windows, name=name, turning_point=self.turning_point, cached=self.plan.cached)


def _notes(
    checkpoint: Checkpoint,
    corpus: Corpus,
    plan: PerplexityPlan,
    plain: Checkpoint | None,
    reference: Checkpoint | None,
    remembered: bool,
) -> tuple[str, ...]:
    notes = [f"In front of each text: {corpus.prefix}. Weights and arithmetic: {checkpoint.dtype_note}."]
    conversations = [document for document in corpus.documents if document.answers is not None]
    if conversations:
        scored, tokens = sum(text.answered for text in conversations), sum(text.tokens for text in conversations)
        notes.append(
            f"Of {len(conversations):,} conversations, written by the chat template, the answers alone are scored: "
            f"{scored:,} of {tokens:,} tokens."
        )
    if plan.dynamic:
        notes.append("Positions follow the length here: every length has a pass of its own, at that length.")
    if remembered:
        notes.append("The truncations are read by the extended model itself.")
    elif plain is None:
        notes.append(
            "The checkpoint came extended, so the extended model itself reads the truncations; name the original "
            "with --reference to compare with that, inside the window too."
        )
    elif reference is not None:
        notes.append(f"The references are read by {reference.name}.")
    if plan.cached is not None:
        notes.append(f"To fit the memory budget, texts were read {plan.cached:,} tokens at a time with a KV cache.")
    return tuple(notes)
