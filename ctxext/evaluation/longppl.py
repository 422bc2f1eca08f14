"""LongPPL: perplexity over key tokens, of one checkpoint extended in several ways, on the same key tokens.

The key tokens stand at the end of each text. Every length reads that end with more of the text before it, so that all
numbers are of the same tokens, and the only thing that changes is how far back the model can see.

**What a difference means.** The evaluator's own losses on its key tokens are lower than on tokens like them: being
predicted well by it is what made them key tokens. So on key tokens every other reading looks a little worse beside the
unpatched model than it is, the truncations least. Differences between extensions, and between lengths of one
extension, are free of that.

Source: Fang et al., arXiv:2410.23771.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ctxext.errors import InvalidParameterError
from ctxext.evaluation.key_tokens import KeyTokens, ending
from ctxext.measuring.checkpoint import Checkpoint
from ctxext.measuring.forward import turning_point
from ctxext.measuring.journal import Journal
from ctxext.measuring.labels import label_of
from ctxext.measuring.loss import Window
from ctxext.measuring.provenance import Provenance, Report, provenance_of
from ctxext.measuring.readings import Reader, Reading, Readings, check_reference, name_for
from ctxext.measuring.statistics import PairedDifference, document_difference
from ctxext.measuring.survey import LossJob, ProcessGroup, Survey
from ctxext.measuring.truncation import (
    AS_SAVED,
    TRUNCATED,
    UNPATCHED,
    best_window,
    is_reference,
    tail_windows,
    window_name,
    windows_of,
)
from ctxext.methods import Method
from ctxext.texts.corpus import Corpus


@dataclass(frozen=True, kw_only=True)
class LongPplScore:
    """One reading at one length.

    Args:
        length: tokens that the model may see; for the best truncation those of the longest.
        all_loss: mean over all tokens that could have been key tokens, nats.
        versus_truncation: over the key tokens, the loss minus that of the truncation that is best on them.
        versus_truncation_all: the same over all tokens, with the truncation that is best on those.
        window: of the best truncation: the tokens that it sees on the key tokens.
    """

    length: int
    key_loss: float
    all_loss: float
    versus_truncation: PairedDifference | None = None
    versus_truncation_all: PairedDifference | None = None
    window: int | None = None
    window_all: int | None = None

    @property
    def longppl(self) -> float:
        """Perplexity over the key tokens."""
        return math.exp(self.key_loss)

    @property
    def perplexity(self) -> float:
        """Perplexity over all tokens at the same place."""
        return math.exp(self.all_loss)


@dataclass(frozen=True)
class LongPplReading:
    """One way to read the texts.

    Args:
        name: of a reference: ``unpatched``, ``truncated 2048`` for the last 2,048 tokens, ``truncated`` for the best of
            such; ``as saved``; or the method with its factor.
    """

    name: str
    label: str
    scores: tuple[LongPplScore, ...]
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class LongPplResult(Report):
    """A whole measurement."""

    TITLE, KIND, FORMAT = "a LongPPL result", "longppl", 2

    keys: KeyTokens
    readings: tuple[LongPplReading, ...]
    provenance: Provenance

    def find(self, name: str) -> LongPplReading:
        """Return the reading of one name."""
        return next(reading for reading in self.readings if reading.name == name)

    @property
    def extensions(self) -> tuple[LongPplReading, ...]:
        """The readings without the references."""
        return tuple(reading for reading in self.readings if not is_reference(reading.name))


@dataclass(eq=False, kw_only=True)
class LongPpl(Survey[LossJob]):
    """A planned measurement; ``begin`` it, ``measure`` what is pending, then ask for its ``result``."""

    key_tokens: KeyTokens
    texts: Mapping[tuple[Reader, int], Sequence[LossJob]]

    def result(self) -> LongPplResult:
        """Average the losses over the key tokens, and over all tokens that could have been key tokens.

        Raises:
            ResultsError: losses cannot be read.
        """
        kept, lines = self.losses(), self.journal.finished()
        last = self.key_tokens.searched - 1
        places = [
            torch.tensor([last - after for after in reversed(passage.from_end)], dtype=torch.long)
            for passage in self.key_tokens.passages
        ]
        every = {place: [kept[job.key] for job in jobs] for place, jobs in self.texts.items()}
        on_keys = {
            place: [losses[where] for losses, where in zip(texts, places, strict=True)]
            for place, texts in every.items()
        }
        truncations = [place for place in self.texts if place[0].window is not None]
        on_all_windows = {length: every[reader, length] for reader, length in truncations}
        on_key_windows = {length: on_keys[reader, length] for reader, length in truncations}
        readings = []
        for reader in self.readers:
            places_of = [place for place in self.texts if place[0] is reader]
            compared = reader.reading.name != UNPATCHED
            scores = tuple(
                LongPplScore(
                    length=place[1],
                    key_loss=_mean(on_keys[place]),
                    all_loss=_mean(every[place]),
                    versus_truncation=_versus(on_keys[place], on_key_windows) if compared else None,
                    versus_truncation_all=_versus(every[place], on_all_windows) if compared else None,
                )
                for place in places_of
            )
            seconds = sum(lines[job.key]["seconds"] for place in places_of for job in self.texts[place])
            readings.append(LongPplReading(reader.reading.name, reader.reading.label, scores, seconds))
        window, window_all = best_window(on_key_windows), best_window(on_all_windows)
        best = LongPplScore(
            length=max(on_all_windows),
            key_loss=_mean(on_key_windows[window]),
            all_loss=_mean(on_all_windows[window_all]),
            window=window,
            window_all=window_all,
        )
        readings.insert(1 + len(truncations), LongPplReading(TRUNCATED, label_of(TRUNCATED), (best,)))
        provenance = self.with_extensions(provenance_of(self.checkpoint, self.corpus))
        return LongPplResult(keys=self.key_tokens, readings=tuple(readings), provenance=provenance)


def _mean(losses: Sequence[Tensor]) -> float:
    return torch.cat(list(losses)).double().mean().item()


def _versus(losses: Sequence[Tensor], truncations: Mapping[int, Sequence[Tensor]]) -> PairedDifference | None:
    """Return the loss minus that of the truncation that is best there; None where a single token counts."""
    if sum(map(len, losses)) < 2:
        return None
    return document_difference(losses, truncations[best_window(truncations)], baselines=len(truncations))


def prepare(
    checkpoint: Checkpoint,
    corpus: Corpus,
    keys: KeyTokens,
    *,
    lengths: Sequence[int],
    methods: Sequence[Method] = (),
    reference: Checkpoint | None = None,
    trained_length: int | None = None,
    journal: Journal | None = None,
    group: ProcessGroup | None = None,
) -> LongPpl:
    """Lay out the references' jobs, then those of the checkpoint extended by each method.

    Args:
        corpus: the texts of ``keys``, each longer than the greatest length.
        lengths: tokens, each at least ``keys.window``, which is added to them.
        methods: to extend by; none measures the checkpoint as it was saved, extended.

    Raises:
        InvalidParameterError: key tokens of other texts, a length out of range, a method twice, or no unextended model
            for the references.
        IncompatibleError: a method that cannot be right on this model.
    """
    readings = Readings(checkpoint, trained_length=trained_length, windows=())
    plain = _plain(readings, reference, methods)
    keys.check(checkpoint, corpus)
    lengths = sorted({*lengths, keys.window})
    if lengths[0] < keys.window:
        raise InvalidParameterError(
            f"A length must be at least the {keys.window:,} tokens in which the key tokens were found, found "
            f"{lengths[0]:,}."
        )
    trained, longest = readings.trained_length, lengths[-1]
    # Where nothing lies beyond the trained window, there is nothing to drop.
    windows = windows_of(trained) if longest > trained else (trained,)
    unpatched = Reader(Reading(name=UNPATCHED, label=label_of(UNPATCHED)), plain, (keys.window,))
    readers = [unpatched]
    for window in windows:
        readers.append(Reader(Reading(name=window_name(window), label=label_of(window_name(window))), plain, (window,)))
    readers += [Reader(reading, readings, tuple(lengths)) for reading in _extensions(readings, methods, longest)]
    point = turning_point(checkpoint.model)

    def jobs_of(reader: Reader, length: int) -> list[LossJob]:
        start, jobs = (longest if reader.window else length) - keys.searched, []
        for document in corpus.documents:
            text = ending(document, longest if reader.window else length)
            passes: Sequence[Window] = [Window(0, length + 1, keys.searched)]
            if reader.window:
                passes = tail_windows(reader.window, start=start, positions=longest, prefix=text.prefix)
            name = f"{reader.reading.name}, {document.name}, {text.tokens - 1:,} tokens"
            jobs.append(LossJob.of(reader, text, passes, name=name, turning_point=point))
        return jobs

    texts = {(reader, length): jobs_of(reader, length) for reader in readers for length in reader.lengths}
    return LongPpl(
        "ctxext eval longppl",
        checkpoint,
        [job for jobs in texts.values() for job in jobs],
        corpus=corpus,
        journal=journal or Journal(None),
        group=group or ProcessGroup(),
        key_tokens=keys,
        texts=texts,
    )


def _plain(readings: Readings, reference: Checkpoint | None, methods: Sequence[Method]) -> Readings:
    """Return what reads the references."""
    if not readings.extended and not methods:
        raise InvalidParameterError("Nothing is extended: give at least one method, or a checkpoint saved extended.")
    if reference is None and readings.extended:
        raise InvalidParameterError(
            f"{readings.checkpoint.name} comes extended, and may have been trained since. Give the checkpoint that it "
            f"was made from as the reference, which reads the last tokens only."
        )
    if reference is None:
        return readings
    check_reference(readings.checkpoint, reference)
    return Readings(reference, trained_length=readings.trained_length, windows=())


def _extensions(readings: Readings, methods: Sequence[Method], longest: int) -> list[Reading]:
    """Try the methods, and refuse one that does not reach the greatest length; without any, the checkpoint as saved."""
    names = [name_for(method) for method in methods]
    if len(set(names)) < len(names):
        raise InvalidParameterError(f"Give each method once; found {', '.join(names)}.")
    saved, extensions = readings.extensions(methods)
    if not methods:
        extensions = [replace(saved, name=AS_SAVED, label=AS_SAVED)]
    for reading in extensions:
        if not reading.dynamic and longest > (reading.reach or 0):
            raise InvalidParameterError(
                f"{longest:,} tokens are more than the {reading.reach or 0:,} that {reading.label} reaches. Ask for "
                f"fewer, or extend further."
            )
    return extensions
