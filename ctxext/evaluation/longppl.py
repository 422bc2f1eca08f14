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

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ctxext import patching
from ctxext.errors import InvalidParameterError
from ctxext.evaluation.checkpoint import Checkpoint
from ctxext.evaluation.forward import Progress, check_reach, pass_cost, ticking, turning_point
from ctxext.evaluation.key_tokens import KeyTokens, ending
from ctxext.evaluation.labels import label_of
from ctxext.evaluation.loss import loss_by_position
from ctxext.evaluation.provenance import TRUNCATED_TO_ONE_WINDOW, ExtensionRecord, Provenance, Report, provenance_of
from ctxext.evaluation.readings import check_reference, label_for, name_for
from ctxext.evaluation.statistics import (
    PairedDifference,
    check_finite,
    difference_columns,
    document_difference,
)
from ctxext.evaluation.truncation import (
    AS_SAVED,
    TRUNCATED,
    UNPATCHED,
    best_window,
    is_reference,
    tail_losses,
    tails_cost,
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
        key_loss: mean over the key tokens, nats.
        all_loss: mean over all tokens that could have been key tokens, nats.
        versus_truncation: over the key tokens, the loss minus that of the truncation that is best on them.
        versus_truncation_all: the same over all tokens, with the truncation that is best on those.
        window: of the best truncation: the tokens that it sees on the key tokens.
        window_all: the same on all tokens.
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


@dataclass(frozen=True, kw_only=True)
class LongPplReading:
    """One way to read the texts.

    Args:
        name: of a reference: ``unpatched``, ``truncated 2048`` for the last 2,048 tokens, ``truncated`` for the best of
            such; ``as saved``; or the method with its factor.
        label: the same, as a reader wants it.
        scores: one per length.
        seconds: of all lengths.
    """

    name: str
    label: str
    scores: tuple[LongPplScore, ...]
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class LongPplResult(Report):
    """A whole measurement.

    Args:
        keys: the key tokens, and how they were found.
        readings: the references, then the extensions.
        provenance: what was measured, on what, with what.
    """

    TITLE, KIND, FORMAT, OLDER = "a LongPPL result", "longppl", 2, TRUNCATED_TO_ONE_WINDOW

    keys: KeyTokens
    readings: tuple[LongPplReading, ...]
    provenance: Provenance

    def find(self, name: str) -> LongPplReading:
        """The reading of one name."""
        return next(reading for reading in self.readings if reading.name == name)

    @property
    def extensions(self) -> tuple[LongPplReading, ...]:
        """The readings without the references."""
        return tuple(reading for reading in self.readings if not is_reference(reading.name))

    def rows(self) -> list[dict[str, Any]]:
        """One flat row per reading and length, for CSV."""
        return [
            {
                "checkpoint": self.provenance.checkpoint,
                "reading": reading.name,
                "length": score.length,
                "key_tokens": self.keys.tokens,
                "key_loss": score.key_loss,
                "longppl": score.longppl,
                "perplexity": score.perplexity,
                **difference_columns("versus_truncation", score.versus_truncation),
                **difference_columns("versus_truncation_all", score.versus_truncation_all),
                "window": score.window,
                "window_all": score.window_all,
            }
            for reading in self.readings
            for score in reading.scores
        ]


def run(
    checkpoint: Checkpoint,
    corpus: Corpus,
    keys: KeyTokens,
    *,
    lengths: Sequence[int],
    methods: Sequence[Method] = (),
    reference: Checkpoint | None = None,
    trained_length: int | None = None,
    progress: Progress = lambda *_: None,
) -> LongPplResult:
    """Measure the references, then the checkpoint extended by each method; it is at the end what it was.

    Args:
        checkpoint: what to measure.
        corpus: the texts of ``keys``, each longer than the greatest length.
        keys: from ``find_key_tokens`` with the same tokenizer.
        lengths: tokens, each at least ``keys.window``, which is added to them.
        methods: to extend by; none measures the checkpoint as it was saved, extended.
        reference: the unextended original, which reads the references of a checkpoint that comes extended.
        trained_length: as for ``ctxext.patch``; also the longest truncation.
        progress: called with what is being done and the cost done since the last call (``total_cost`` in all).

    Raises:
        InvalidParameterError: key tokens of other texts, a length out of range, a method twice, or no unextended model
            for the references.
        CtxextError: as ``ctxext.patch`` and the evaluations do.
    """
    plain = _plain(checkpoint, reference, methods)
    keys.check(checkpoint, corpus)
    lengths = _lengths(lengths, keys)
    work = _Work(corpus, keys, progress, turning_point(checkpoint.model))
    records = {UNPATCHED: ExtensionRecord.of(plain)}
    unpatched = work.read(plain, UNPATCHED, keys.window)
    windows = _windows(_trained(plain, trained_length, keys), lengths)
    truncations = {size: work.truncate(plain, size, lengths[-1]) for size in windows}
    readings = [
        work.reading(UNPATCHED, UNPATCHED, [unpatched], {}),
        *(
            work.reading(name := window_name(size), label_of(name), [one], truncations)
            for size, one in truncations.items()
        ),
        work.best(truncations),
    ]
    for name, label, method in _named(methods):
        given = {"trained_length": trained_length}
        with patching.patched(checkpoint.model, method, **given) if method is not None else contextlib.nullcontext():
            check_reach(checkpoint.model, lengths[-1], beyond=False)
            records[name] = ExtensionRecord.of(checkpoint.model)
            found = [work.read(checkpoint.model, name, length) for length in lengths]
        readings.append(work.reading(name, label, found, truncations))
    provenance = provenance_of(checkpoint, corpus, trained_length=trained_length)
    return LongPplResult(keys=keys, readings=tuple(readings), provenance=replace(provenance, extensions=records))


def total_cost(
    checkpoint: Checkpoint,
    corpus: Corpus,
    keys: KeyTokens,
    *,
    lengths: Sequence[int],
    methods: int,
    trained_length: int | None = None,
) -> float:
    """About what ``run`` reports to ``progress`` in all; ``methods`` is how many extensions are measured."""
    point = turning_point(checkpoint.model)
    lengths = _lengths(lengths, keys)
    truncated = tails_cost(
        _windows(_trained(checkpoint.model, trained_length, keys), lengths),
        start=lengths[-1] - keys.searched,
        positions=lengths[-1],
        prefix=corpus.documents[0].prefix,
        turning_point=point,
    )
    whole = pass_cost(keys.window, point) + methods * sum(pass_cost(n, point) for n in lengths)
    return len(corpus.documents) * (whole + truncated)


def _trained(model: nn.Module, given: int | None, keys: KeyTokens) -> int:
    """Tokens that the model was trained for: as given, as its config says, or those in which key tokens were found."""
    return given or patching.describe(model).trained_length or keys.window


def _windows(trained_length: int, lengths: Sequence[int]) -> tuple[int, ...]:
    """The truncations to try; where nothing lies beyond the trained window, there is nothing to drop."""
    return windows_of(trained_length) if lengths[-1] > trained_length else (trained_length,)


@dataclass(frozen=True, eq=False)
class _Losses:
    """The losses of one reading at one length: all tokens that could have been key tokens, [tokens] per text."""

    length: int
    losses: list[Tensor]
    seconds: float


@dataclass(frozen=True, eq=False)
class _Counted:
    """The tokens that a number is of: the key tokens, or all that could have been key tokens.

    Args:
        places: where they are among the losses of each text, increasing.
    """

    places: list[Tensor]

    def losses(self, found: _Losses) -> list[Tensor]:
        """Return the losses of these tokens, [tokens] per text."""
        return [own[places] for own, places in zip(found.losses, self.places, strict=True)]

    def mean(self, found: _Losses) -> float:
        """Their mean loss, nats."""
        return torch.cat(self.losses(found)).double().mean().item()

    def best(self, truncations: Mapping[int, _Losses]) -> int:
        """The window of the truncation that is best on them."""
        return best_window({window: self.losses(one) for window, one in truncations.items()})

    def versus(self, found: _Losses, truncations: Mapping[int, _Losses]) -> PairedDifference | None:
        """Return the loss minus that of the truncation that is best on them; None where a single token counts."""
        if sum(map(len, self.places)) < 2:
            return None
        best = truncations[self.best(truncations)]
        return document_difference(self.losses(found), self.losses(best), baselines=len(truncations))


@dataclass(frozen=True, eq=False)
class _Work:
    """The passes of a measurement, and what their losses add up to."""

    corpus: Corpus
    keys: KeyTokens
    progress: Progress
    turning_point: int

    def read(self, model: nn.Module, name: str, length: int) -> _Losses:
        """The end of every text after what comes before it, at one length."""
        start = length - self.keys.searched
        return self._pass_over(model, name, length, length, lambda ids, _: loss_by_position(model, ids, start=start))

    def truncate(self, model: nn.Module, window: int, length: int) -> _Losses:
        """The same tokens when the model sees the last ``window`` tokens before each."""

        def losses(ids: Tensor, prefix: int) -> Tensor:
            return tail_losses(model, ids, window=window, start=length - self.keys.searched, prefix=prefix)

        return self._pass_over(model, window_name(window), window, length, losses)

    def _pass_over(
        self, model: nn.Module, name: str, seen: int, length: int, losses: Callable[[Tensor, int], Tensor]
    ) -> _Losses:
        began = time.perf_counter()
        with ticking(model, name, pass_cost(seen, self.turning_point), self.progress):
            found = [losses(ending(one, length), one.prefix)[0] for one in self.corpus.documents]
        for document, own in zip(self.corpus.documents, found, strict=True):
            check_finite(own, f"{name}, {document.name}, {length:,} tokens")
        return _Losses(seen, found, time.perf_counter() - began)

    @cached_property
    def on_keys(self) -> _Counted:
        """The key tokens."""
        last = self.keys.searched - 1
        return _Counted([torch.tensor([last - n for n in one.from_end]).sort().values for one in self.keys.passages])

    @cached_property
    def on_all(self) -> _Counted:
        """All tokens that could have been key tokens."""
        return _Counted([torch.arange(self.keys.searched) for _ in self.keys.passages])

    def reading(
        self, name: str, label: str, found: Sequence[_Losses], truncations: Mapping[int, _Losses]
    ) -> LongPplReading:
        """What the losses of all lengths add up to; with no truncations, nothing is held against them."""
        scores = tuple(
            LongPplScore(
                length=one.length,
                key_loss=self.on_keys.mean(one),
                all_loss=self.on_all.mean(one),
                versus_truncation=self.on_keys.versus(one, truncations) if truncations else None,
                versus_truncation_all=self.on_all.versus(one, truncations) if truncations else None,
            )
            for one in found
        )
        return LongPplReading(name=name, label=label, scores=scores, seconds=sum(one.seconds for one in found))

    def best(self, truncations: Mapping[int, _Losses]) -> LongPplReading:
        """The truncation that is best on the key tokens, and the one that is best on all."""
        window, window_all = self.on_keys.best(truncations), self.on_all.best(truncations)
        score = LongPplScore(
            length=max(truncations),
            key_loss=self.on_keys.mean(truncations[window]),
            all_loss=self.on_all.mean(truncations[window_all]),
            window=window,
            window_all=window_all,
        )
        return LongPplReading(name=TRUNCATED, label=label_of(TRUNCATED), scores=(score,))


def _plain(checkpoint: Checkpoint, reference: Checkpoint | None, methods: Sequence[Method]) -> nn.Module:
    """The model that reads the references."""
    extended = patching.describe(checkpoint.model).method is not None
    if not extended and not methods:
        raise InvalidParameterError("Nothing is extended: give at least one method, or a checkpoint saved extended.")
    if reference is None and extended:
        raise InvalidParameterError(
            f"{checkpoint.name} comes extended, and may have been trained since. Give the checkpoint that it was made "
            f"from as the reference, which reads the last tokens only."
        )
    if reference is None:
        return checkpoint.model
    check_reference(checkpoint, reference)
    return reference.model


def _named(methods: Sequence[Method]) -> list[tuple[str, str, Method | None]]:
    """Each extension with a name of its own and a label."""
    if not methods:
        return [(AS_SAVED, AS_SAVED, None)]
    names = [name_for(method) for method in methods]
    if len(set(names)) < len(names):
        raise InvalidParameterError(f"Give each method once; found {', '.join(names)}.")
    return [(name, label_for(method), method) for name, method in zip(names, methods, strict=True)]


def _lengths(lengths: Sequence[int], keys: KeyTokens) -> list[int]:
    found = sorted({*lengths, keys.window})
    if found[0] < keys.window:
        raise InvalidParameterError(
            f"A length must be at least the {keys.window:,} tokens in which the key tokens were found, found "
            f"{found[0]:,}."
        )
    return found
