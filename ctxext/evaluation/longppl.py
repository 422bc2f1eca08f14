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

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ctxext import patching
from ctxext.errors import InvalidParameterError
from ctxext.evaluation.checkpoint import Checkpoint
from ctxext.evaluation.corpus import Corpus
from ctxext.evaluation.forward import Progress, check_reach, pass_cost, ticking, turning_point
from ctxext.evaluation.key_tokens import KeyTokens, ending
from ctxext.evaluation.labels import label_of
from ctxext.evaluation.loss import loss_by_position, truncated_loss
from ctxext.evaluation.provenance import TRUNCATED_TO_ONE_WINDOW, Provenance, Report, provenance_of
from ctxext.evaluation.readings import check_reference, label_for, name_for, patched
from ctxext.evaluation.statistics import BLOCK, ENOUGH_DOCUMENTS, PairedDifference, grouped_difference
from ctxext.evaluation.truncation import (
    AS_SAVED,
    TRUNCATED,
    UNPATCHED,
    best_window,
    is_reference,
    passes_beyond,
    stride_of,
    window_name,
    windows_of,
)
from ctxext.methods import Method

__all__ = ["LongPplReading", "LongPplResult", "LongPplScore", "run", "total_cost"]


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
                "versus_truncation": _value(score.versus_truncation, "mean"),
                "versus_truncation_se": _value(score.versus_truncation, "standard_error"),
                "versus_truncation_all": _value(score.versus_truncation_all, "mean"),
                "versus_truncation_all_se": _value(score.versus_truncation_all, "standard_error"),
                "window": score.window,
                "window_all": score.window_all,
            }
            for reading in self.readings
            for score in reading.scores
        ]


def _value(difference: PairedDifference | None, name: str) -> float | None:
    return None if difference is None else getattr(difference, name)


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
        trained_length: as for ``ctxext.patch``.
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
    provenance = provenance_of(checkpoint, corpus).with_extension(UNPATCHED, plain)
    window = patching.describe(plain).trained_length or keys.window
    (unpatched,) = work.read(UNPATCHED, plain, [keys.window])
    truncations = {size: work.truncate(plain, size, lengths[-1]) for size in _windows(window, lengths)}
    readings = [
        work.reading(UNPATCHED, UNPATCHED, [unpatched], {}),
        *(
            work.reading(window_name(size), label_of(window_name(size)), [one], truncations)
            for size, one in truncations.items()
        ),
        work.best(truncations),
    ]
    for name, label, method in _named(methods):
        with patched(checkpoint.model, method, trained_length=trained_length):
            check_reach(checkpoint.model, lengths[-1], beyond=False)
            provenance = provenance.with_extension(name, checkpoint.model)
            found = work.read(name, checkpoint.model, lengths)
        readings.append(work.reading(name, label, found, truncations))
    return LongPplResult(keys=keys, readings=tuple(readings), provenance=provenance)


def total_cost(
    checkpoint: Checkpoint, corpus: Corpus, keys: KeyTokens, *, lengths: Sequence[int], methods: int
) -> float:
    """About what ``run`` reports to ``progress`` in all; ``methods`` is how many extensions are measured."""
    point = turning_point(checkpoint.model)
    lengths = _lengths(lengths, keys)
    prefix = corpus.documents[0].prefix
    start, positions = lengths[-1] - keys.searched, lengths[-1]
    truncated = 0.0
    for window in _windows(keys.window, lengths):
        within = pass_cost(window, point) if start < window else 0.0
        passes = passes_beyond(window, start=max(start, window), positions=positions, prefix=prefix)
        truncated += within + passes * pass_cost(window, point)
    whole = pass_cost(keys.window, point) + methods * sum(pass_cost(n, point) for n in lengths)
    return len(corpus.documents) * (whole + truncated)


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
class _Work:
    """The passes of a measurement."""

    corpus: Corpus
    keys: KeyTokens
    progress: Progress
    turning_point: int

    def read(self, name: str, model: nn.Module, lengths: Sequence[int]) -> list[_Losses]:
        """The end of every text after what comes before it, at every length."""

        def losses(length: int) -> list[Tensor]:
            start = length - self.keys.searched
            with ticking(model, name, pass_cost(length, self.turning_point), self.progress):
                return [loss_by_position(model, ending(one, length), start=start)[0] for one in self.corpus.documents]

        return [_timed(length, functools.partial(losses, length)) for length in lengths]

    def truncate(self, model: nn.Module, window: int, length: int) -> _Losses:
        """The same tokens when the model sees the last ``window`` tokens before each."""

        def losses() -> list[Tensor]:
            start, name = length - self.keys.searched, window_name(window)
            with ticking(model, name, pass_cost(window, self.turning_point), self.progress):
                return [
                    truncated_loss(
                        model,
                        ending(one, length),
                        window=window,
                        stride=stride_of(window, one.prefix),
                        start=start,
                        prefix=one.prefix,
                    )[0]
                    for one in self.corpus.documents
                ]

        return _timed(window, losses)

    def reading(
        self, name: str, label: str, found: Sequence[_Losses], truncations: Mapping[int, _Losses]
    ) -> LongPplReading:
        """What the losses of all lengths add up to."""
        scores = tuple(self._score(one, one, truncations) for one in found)
        return LongPplReading(name=name, label=label, scores=scores, seconds=sum(one.seconds for one in found))

    def best(self, truncations: Mapping[int, _Losses]) -> LongPplReading:
        """The truncation that is best on the key tokens, and the one that is best on all."""
        on_keys, on_all = (self._best(truncations, keys_only=only) for only in (True, False))
        score = replace(
            self._score(truncations[on_keys], truncations[on_all], {}),
            length=max(truncations),
            window=on_keys,
            window_all=on_all,
        )
        return LongPplReading(name=TRUNCATED, label=label_of(TRUNCATED), scores=(score,))

    def _best(self, truncations: Mapping[int, _Losses], *, keys_only: bool) -> int:
        return best_window(
            {window: self._on_keys(one.losses) if keys_only else one.losses for window, one in truncations.items()}
        )

    def _on_keys(self, losses: Sequence[Tensor]) -> list[Tensor]:
        return [own[places] for own, places in zip(losses, self._places(), strict=True)]

    def _score(self, on_keys: _Losses, on_all: _Losses, truncations: Mapping[int, _Losses]) -> LongPplScore:
        def versus(*, keys_only: bool) -> PairedDifference | None:
            if not truncations:
                return None
            best = truncations[self._best(truncations, keys_only=keys_only)]
            return self._difference(on_keys, best, keys_only=keys_only, baselines=len(truncations))

        return LongPplScore(
            length=on_keys.length,
            key_loss=torch.cat(self._on_keys(on_keys.losses)).double().mean().item(),
            all_loss=torch.cat(on_all.losses).double().mean().item(),
            versus_truncation=versus(keys_only=True),
            versus_truncation_all=versus(keys_only=False),
        )

    def _difference(
        self, found: _Losses, baseline: _Losses, *, keys_only: bool, baselines: int
    ) -> PairedDifference | None:
        """Over documents, or over blocks of text where they are few; None where a single group is left."""
        sides: tuple[list[Tensor], list[Tensor]] = ([], [])
        documents = len(found.losses) >= ENOUGH_DOCUMENTS
        for own, other, places in zip(found.losses, baseline.losses, self._places(), strict=True):
            wanted = places if keys_only else torch.arange(len(own))
            groups = torch.zeros_like(wanted) if documents else wanted // BLOCK
            for group in sorted(set(groups.tolist())):
                for side, losses in zip(sides, (own, other), strict=True):
                    side.append(losses[wanted[groups == group]])
        if len(sides[0]) < 2:
            return None
        return grouped_difference(*sides, over="documents" if documents else "blocks", baselines=baselines)

    def _places(self) -> list[Tensor]:
        """Where the key tokens of each text are among its losses."""
        last = self.keys.searched - 1
        return [torch.tensor([last - n for n in one.from_end]).sort().values for one in self.keys.passages]


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


def _timed(length: int, losses: Callable[[], list[Tensor]]) -> _Losses:
    began = time.perf_counter()
    found = losses()
    return _Losses(length, found, time.perf_counter() - began)
