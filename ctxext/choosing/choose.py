"""The verb ``choose``: successive halving over measured losses, and a verdict on texts that were never read."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from ctxext.checkpoints.carried import already_extended
from ctxext.checkpoints.export import exports_of
from ctxext.choosing.candidates import Candidate, candidates, distinct
from ctxext.choosing.halving import Costs, Halving
from ctxext.choosing.losses import DEPTHS, MeasuredLosses
from ctxext.choosing.verdict import Choice, RuntimeVerdict, Spent
from ctxext.core.patching import patched_state
from ctxext.core.subject import Subject
from ctxext.errors import IncompatibleError, InvalidParameterError, PatchStateError
from ctxext.evaluation.passkey import make_prompts
from ctxext.measuring.checkpoint import Checkpoint
from ctxext.measuring.forward import Progress, require_evaluation, turning_point
from ctxext.measuring.journal import Journal
from ctxext.measuring.provenance import provenance_of
from ctxext.measuring.readings import Readings, Refusal
from ctxext.measuring.survey import Job, ProcessGroup, Survey
from ctxext.methods.parameters import checked_tokens, require
from ctxext.mistakes import text_tokenizer
from ctxext.models import architecture_of
from ctxext.models.rope import Rope
from ctxext.quantities import parse_budget
from ctxext.recommended import fits_unextended
from ctxext.rotary.sites import find_sites
from ctxext.texts.corpus import Corpus
from ctxext.texts.documents import Document
from ctxext.texts.stretches import corpus_from, split_texts

# Which runtimes can load a candidate, and what plain transformers calls it.
LoadedBy = tuple[tuple[RuntimeVerdict, ...], dict[str, Any] | None]
# Positions beyond the window that a target must add, so that there is something to measure.
LEAST_BEYOND = 16


@dataclass(frozen=True, kw_only=True)
class ChoiceSettings:
    """Settings of a choice; see ``choose``."""

    target_length: int
    budget: str | float | None = None
    seed: int = 0
    keys: bool = True
    stock: bool = False
    trained_length: int | None = None
    sliding_window: str | None = None


class PlannedChoice:
    """A choice before anything is read; ``run`` it once.

    Args:
        folder: folder that keeps finished jobs; None keeps them in memory.

    Attributes:
        candidates: all candidates that apply, by name, the published YaRN first.
        costs: cost of its parts, before anything is timed.
        progress: function of the present job's name and the cost done since the last call.

    Raises:
        CtxextError: a request that cannot be right, before anything is computed.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        corpus: Corpus,
        settings: ChoiceSettings,
        *,
        folder: Path | None = None,
        group: ProcessGroup | None = None,
        trying: Callable[[int, int], None] = lambda *_: None,
    ) -> None:
        self.checkpoint, self.corpus, self.settings = checkpoint, corpus, settings
        self.budget = parse_budget(settings.budget)
        self.group = group or ProcessGroup()
        self.progress: Progress = lambda *_: None
        subject = _choosable(checkpoint)
        own_length, window = settings.trained_length, settings.sliding_window
        self.readings = Readings(checkpoint, trained_length=own_length, sliding_window=window)
        self.trained = trained = self.readings.trained_length
        self.length = length = checked_tokens("target_length", settings.target_length)
        if length < trained + LEAST_BEYOND:
            raise InvalidParameterError(
                f"A target of {length:,} tokens needs no extension: the checkpoint was trained for {trained:,}. "
                f"{fits_unextended(trained)} Give a longer target (--target), at least {trained + LEAST_BEYOND:,}."
            )
        tokenizer = checkpoint.tokenizer
        self.split = split_texts(corpus.documents, tokens=length + 1, seed=settings.seed, tokenizer=tokenizer)
        if settings.keys:  # raises the error for a length too short for a key
            make_prompts(tokenizer, [length], DEPTHS[:1], seed=settings.seed)
        self.rope = find_sites(subject, trained, scaled=own_length is not None)[0].spec
        self.candidates, self.refusals = self._tried(trying)
        assert self.readings.setting, "asked for before any method brings an attention of its own"
        cells = None if folder is None else folder / "cells.jsonl"
        self.journal = Journal(cells, self.group.process, identity="choosing.json")
        self._runtimes: dict[str, LoadedBy] = {}
        judged = sum(candidate.reach.is_judged_inside for candidate in self.candidates.values())
        self.costs = Costs(
            trained=trained,
            length=length,
            judged=judged,
            others=len(self.candidates) - judged,
            windows=self.readings.windows,
            turning_point=turning_point(subject),
            choosing=len(self.split.choosing),
            held_out=len(self.split.held_out),
            keys=settings.keys,
            dynamic=sum(candidate.reach.dynamic for candidate in self.candidates.values()),
        )
        self.costs.sizes(self.budget.passes)  # refuses a budget that is too small before anything is read

    def _tried(self, trying: Callable[[int, int], None]) -> tuple[dict[str, Candidate], tuple[Refusal, ...]]:
        """Return the candidates that apply to the model, each set of frequencies once, and what does not apply."""
        rope = self.rope
        methods = candidates(self.length / self.trained, rope)
        if self.settings.stock:
            # Readings refuse what does not fit, with its reason.
            methods = tuple(each for each in methods if not each.fits(rope) or each.rope_parameters(rope) is not None)
        applicable, refusals = self.readings.find(methods, progress=trying)
        entered, twins = distinct(reading for reading in applicable if not reading.is_reference)
        if not entered or entered[0].method != methods[0].to_dict():
            reasons = "; ".join(f"{refusal.label}: {refusal.reason}" for refusal in refusals)
            raise IncompatibleError(
                f"YaRN as published does not apply to this model, and every candidate is compared with it. {reasons}"
            )
        found = {reading.name: Candidate.of(reading, rope, self.length, twins) for reading in entered}
        return found, refusals

    @property
    def done(self) -> str:
        """Finished work, in words; the number of jobs left depends on the losses read so far."""
        return f"{len(self.journal.finished())} jobs"

    @property
    def passes(self) -> float:
        """Passes over the target that all of it takes, at most; by a budget in time, before anything is timed."""
        return self.costs.most(self.costs.sizes(self.budget.passes))

    def run(self) -> Choice:
        """Run the rounds and the verdict; the model is afterwards as it was.

        Raises:
            InvalidParameterError: a budget in time that does not last for the smallest sizes.
            ResultsError: the journal is of another measurement, or cannot be written.
            CtxextError: as the measurement does; everything finished is kept.
        """
        survey: Survey[Job] = Survey(
            "ctxext choose", self.checkpoint, (), corpus=self.corpus, journal=self.journal, group=self.group
        )
        survey.begin()
        losses = MeasuredLosses(
            survey=survey,
            readings=self.readings,
            entered=tuple(candidate.reading for candidate in self.candidates.values()),
            costs=self.costs,
            split=self.split,
            seed=self.settings.seed,
            progress=self.progress,
        )
        # A budget in seconds becomes passes only when a few jobs have been timed. So the sizes, and the number of texts
        # to choose on, are set here and not before.
        allowed, costs = self.budget.passes, self.costs
        if self.budget.seconds is not None:
            judged = [name for name, each in self.candidates.items() if each.reach.is_judged_inside]
            allowed, costs = losses.timed(self.budget.seconds, judged)
        sizes = costs.sizes(allowed, self.budget.seconds)
        losses.sizes = sizes
        losses.split = replace(self.split, choosing=self.split.choosing[: sizes.texts])
        halving = Halving(
            reaches={name: candidate.reach for name, candidate in self.candidates.items()},
            losses=losses,
            sizes=sizes,
            trained=self.trained,
            length=self.length,
            runtimes=lambda name: sum(runtime.exact for runtime in self._loaded_by(self.candidates[name])[0]),
        )
        finish = halving.run()
        about = provenance_of(self.checkpoint, self.corpus, seed=self.settings.seed).to_dict()
        del about["extensions"]  # empty: each candidate's record holds its extension
        choice = Choice(
            candidates=tuple(self.candidates.values()),
            finish=finish,
            held_out=losses.held_out(finish, self.split.held_out[: sizes.held_out]),
            usual=halving.usual,
            trained_length=self.trained,
            target_length=self.length,
            sizes=sizes,
            rope_parameters=None,
            runtimes=(),
            refusals=self.refusals,
            texts=tuple(stretch.text.name for stretch in losses.split.choosing),
            left_out=self.split.left_out,
            spent=Spent(
                passes=sum(losses.passes.values()),
                seconds=losses.seconds,
                budget="" if self.settings.budget is None else str(self.settings.budget),
                allowed=allowed,
            ),
            provenance=about | {"trained_length": self.trained, "sliding_window": self.settings.sliding_window},
        )
        runtimes, rope = self._loaded_by(choice.candidate(choice.name))
        return replace(choice, runtimes=runtimes, rope_parameters=rope)

    def _loaded_by(self, candidate: Candidate) -> LoadedBy:
        """Return which runtimes can load a candidate, and what plain transformers calls it."""
        name = candidate.reading.name
        if name not in self._runtimes:
            with self.readings.applied(candidate.reading):
                subject = self.checkpoint.subject
                config = subject.config
                is_plain = bool(config.ctxext["stock"])
                rope = dict(subject.text.rope_parameters) if is_plain else None
                says = config.ctxext["stored_as"] if is_plain else "only with ctxext"
                runtimes = [RuntimeVerdict(name="transformers", exact=is_plain, says=says)]
                for runtime, made in exports_of(config, self.checkpoint.name).items():
                    exact, says = (False, made) if isinstance(made, str) else (made.exact, made.told)
                    runtimes.append(RuntimeVerdict(name=runtime, exact=exact, says=says))
            self._runtimes[name] = tuple(runtimes), rope
        return self._runtimes[name]


def _choosable(checkpoint: Checkpoint) -> Subject:
    """Return the model of a checkpoint.

    Raises:
        PatchStateError: it is extended already.
        IncompatibleError: it has no rotary positions.
    """
    subject = checkpoint.subject
    is_live, how = patched_state(subject.model) is not None, already_extended(subject.config)
    if is_live or how:
        way = "Call ctxext.unpatch(model) first, or give the original."
        raise PatchStateError(
            f"{checkpoint.name} is extended already ({how}); choose needs plain positions. "
            f"{way if is_live else 'Give the original, or compare methods for this one with `ctxext eval compare`.'}"
        )
    if not isinstance(architecture_of(subject), Rope):
        raise IncompatibleError(
            f"{checkpoint.name} is a {subject.kind} without rotary positions, and all candidates change those. Compare "
            f"its methods with `ctxext eval compare`."
        )
    return subject


def choose(
    model: Any,
    tokenizer: Any,
    *,
    texts: Iterable[str | Path | Document],
    target_length: int,
    budget: str | float | None = None,
    seed: int = 0,
    keys: bool = True,
    stock: bool = False,
    trained_length: int | None = None,
    sliding_window: str | None = None,
    folder: str | Path | None = None,
    progress: Progress = lambda *_: None,
) -> Choice:
    """Choose an extension for a model and your texts by measuring, and judge it on other texts.

    Call it before you extend a model for good. A formula ignores the model; this function measures your texts with
    every method at several factors, and with YaRN at many thresholds, divisors and temperatures, and drops the losing
    candidates. The cost is about forty passes over texts of the target length (set ``budget`` to change it). The model
    is left unchanged: ``ctxext.patch(model, choice.method)`` extends it.

    Args:
        model: a causal language model with rotary positions, not extended, in eval mode.
        tokenizer: the model's tokenizer, or a processor with one.
        texts: texts, or paths of files: at least two of the target length, some for the choice and the others for the
            verdict. One text is enough if it is at least twice as long.
        target_length: tokens to extend to, above the trained length.
        budget: ``"30min"`` of computing, or ``"25 passes"`` over the target length, which is the same on every machine;
            None for all rounds.
        seed: seed of the split of the texts, and of the hidden keys: the same seed makes the same choice.
        keys: True to test passkeys hidden in a text.
        stock: True for only the candidates that plain transformers loads, as other runtimes may.
        trained_length: tokens that the checkpoint was trained for; None to read them from the config.
        sliding_window: see ``ctxext.patch``.
        folder: folder that keeps finished jobs: the same call resumes after an interruption.
        progress: function of the present job's name and the cost done since the last call.

    Returns:
        The choice, with ``method``, ``rows()`` and ``sentence``.

    Raises:
        InvalidParameterError: texts that are too short or too few, a target inside the trained window, or a budget
            below the smallest sizes.
        PatchStateError: the model is extended already.
        IncompatibleError: the model has no rotary positions, or is in training mode.
        ResultsError: ``folder`` holds another measurement, or cannot be written.
    """
    require(isinstance(seed, numbers.Integral), "seed", seed, "a whole number")
    subject = Subject.of(model)
    require_evaluation(base := subject.model)  # before a hundred candidates are tried
    name = Path(getattr(base, "name_or_path", "") or type(base).__name__).name
    settings = ChoiceSettings(
        target_length=target_length,
        budget=budget,
        seed=int(seed),
        keys=keys,
        stock=stock,
        trained_length=trained_length,
        sliding_window=sliding_window,
    )
    place = None if folder is None else Path(folder)
    tokenizer = text_tokenizer(tokenizer)
    corpus = corpus_from(texts, tokenizer)
    outermost = next(part for part in subject.chain if isinstance(part, nn.Module))  # inside of a pipeline
    planned = PlannedChoice(Checkpoint(name, outermost, tokenizer), corpus, settings, folder=place)
    planned.progress = progress
    return planned.run()
