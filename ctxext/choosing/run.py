"""The verb ``choose``: a race over real losses, kept cell by cell, and a verdict on texts that it never read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ctxext.architectures import architecture_of
from ctxext.architectures.rope import Rope
from ctxext.checkpoints.export import export_config
from ctxext.choosing.accepting import accept
from ctxext.choosing.budget import (
    Budget,
    Costs,
    SearchSizes,
    parse_budget,
    prefix_of,
    search_sizes_for,
    sizes_for,
)
from ctxext.choosing.candidates import Entrant, candidates, distinct, entrant
from ctxext.choosing.choice import Candidate, Choice, RuntimeVerdict, SearchResult, Spent
from ctxext.choosing.landscape import Vector, as_method, require_searchable, vector_of
from ctxext.choosing.losses import DEPTHS, MeasuredLosses, ModelInUse, RaceCell
from ctxext.choosing.race import Course, Finish, Race, Sizes
from ctxext.choosing.search import Search
from ctxext.choosing.texts import SplitTexts, split_texts
from ctxext.choosing.verdict import judge_held_out
from ctxext.errors import CtxextError, IncompatibleError, InvalidParameterError, PatchStateError
from ctxext.evaluation.checkpoint import Checkpoint
from ctxext.evaluation.forward import Progress, turning_point
from ctxext.evaluation.journal import Journal
from ctxext.evaluation.passkey import make_prompts
from ctxext.evaluation.provenance import provenance_of
from ctxext.evaluation.readings import Reading, Readings, Refusal
from ctxext.evaluation.survey import Survey
from ctxext.methods import RopeMethod
from ctxext.methods.parameters import checked_tokens
from ctxext.patching import patched_state
from ctxext.runtimes import RUNTIMES
from ctxext.saved import already_extended
from ctxext.surgery.rotary import RotarySite, find_sites
from ctxext.surgery.subject import Subject, base_model, text_of
from ctxext.texts.corpus import Corpus, prefix_label, special_prefix, tokenise
from ctxext.texts.documents import Document, read_documents

# Who can load a candidate, and its stock dictionary.
LoadedBy = tuple[tuple[RuntimeVerdict, ...], dict[str, Any] | None]
# Positions beyond the window that a target must add, so that there is something to measure.
LEAST_BEYOND = 16
# Candidates whose first reading says how long a pass takes.
TIMED = 3


@dataclass(eq=False, kw_only=True)
class Contest:
    """A race that is planned; ``run`` it once.

    Args:
        checkpoint: whose model is read with.
        corpus: all texts, whole.
        readings: of the checkpoint.
        entered: readings of the candidates, the published YaRN first.
        twins: names of those that a reading stands for.
        refusals: methods that do not apply.
        sites: frequencies of the model, not extended.
        length: the target, tokens.
        split: which stretches are chosen on and judged on.
        budget: what may be spent.
        seed: of texts and keys.
        keys: whether hidden keys are asked for.
        journal: where finished cells are kept.
        plain: the model patched for the target with its frequencies as they were trained, where they are to be
            searched; None where not.
    """

    checkpoint: Checkpoint
    corpus: Corpus
    readings: Readings
    entered: tuple[Reading, ...]
    twins: dict[str, list[str]]
    refusals: tuple[Refusal, ...]
    sites: tuple[RotarySite, ...]
    length: int
    split: SplitTexts
    budget: Budget
    seed: int
    keys: bool
    journal: Journal
    plain: Reading | None = None
    progress: Progress = field(default=lambda *_: None)
    loaded_by: dict[str, LoadedBy] = field(init=False, default_factory=dict)
    found: Reading | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.budget.seconds is None:
            self.sizes_of(self.budget.passes)  # what is too small is said before anything is read

    @property
    def trained(self) -> int:
        """Tokens of the window."""
        return self.readings.trained_length

    @property
    def done(self) -> str:
        """How much is finished, in words: what is left depends on what was read."""
        return f"{len(self.journal.finished())} jobs"

    @cached_property
    def stage(self) -> ModelInUse:
        """The model and who reads with it now."""
        return ModelInUse(self.readings)

    @cached_property
    def costs(self) -> Costs:
        """What the parts of the race cost."""
        judged = sum(one.is_judged_inside for one in self.entrants)
        return Costs(
            trained=self.trained,
            length=self.length,
            judged=judged,
            others=len(self.entered) - judged,
            windows=self.readings.windows,
            turning_point=turning_point(self.readings.model),
        )

    @cached_property
    def entrants(self) -> list[Entrant]:
        """The candidates as the race sees them."""
        return [entrant(one.reading.name, one.method, self.sites[0].spec, self.length) for one in self.candidates]

    @cached_property
    def candidates(self) -> list[Candidate]:
        """The candidates before anything is known of them."""
        return [
            Candidate(reading=one, course=Course(name=one.name), twins=tuple(self.twins.get(one.name, ())))
            for one in self.entered
        ]

    def sizes_of(self, allowed: float | None, costs: Costs | None = None) -> tuple[Sizes, SearchSizes | None]:
        """The race that so many passes last for, and the search after it where one is asked for."""
        choosing, held_out = len(self.split.choosing), len(self.split.held_out)
        costs = costs or self.costs
        if self.plain is None:
            return sizes_for(allowed, costs, choosing=choosing, held_out=held_out, keys=self.keys), None
        accepting = len(self.split.accepting)
        return search_sizes_for(
            allowed, costs, choosing=choosing, accepting=accepting, held_out=held_out, keys=self.keys
        )

    def passes_of(self, allowed: float | None) -> float:
        """What all of it takes at the most."""
        race, search = self.sizes_of(allowed)
        return self.costs.race(race) + (0.0 if search is None else self.costs.search(search, race))

    def begin(self) -> Survey[RaceCell]:
        """Claim the journal.

        Raises:
            ResultsError: it is of another measurement, or cannot be written.
        """
        survey: Survey[RaceCell] = Survey(
            "ctxext choose", self.checkpoint, (), corpus=self.corpus, journal=self.journal
        )
        survey.begin()
        assert self.readings.setting, "asked for before any method brings an attention of its own"
        return survey

    def run(self) -> Choice:
        """The race, the verdict and what came of them; the model is at the end what it was.

        Raises:
            InvalidParameterError: a budget in time that does not last for the smallest race.
            ResultsError: the journal cannot be used.
            CtxextError: as the measurement does; everything finished is kept.
        """
        losses = MeasuredLosses(
            survey=self.begin(),
            stage=self.stage,
            entered=self.entered,
            costs=self.costs,
            split=self.split,
            seed=self.seed,
            progress=self.progress,
        )
        try:
            return self._run(losses)
        finally:
            self.stage.show(None)

    def _run(self, losses: MeasuredLosses) -> Choice:
        allowed, costs = self.allowed(losses)
        sizes, searching = self.sizes_of(allowed, costs)
        losses.sizes = sizes
        split = losses.split = self.split.first(sizes.texts, sizes.held_out)
        race = Race(
            entrants=self.entrants,
            losses=losses,
            sizes=sizes,
            trained=self.trained,
            length=self.length,
            runtimes=lambda name: sum(one.exact for one in self.runtimes(name)[0]),
        )
        finish = race.run()
        found: SearchResult | None = None
        if searching is not None:
            found, finish = self._searched(losses, finish, searching, race.usual)
        held_out = judge_held_out(
            {name: losses.texts(name, split.held_out) for name in {finish.choice, finish.runner_up, race.usual} - {""}},
            choice=finish.choice,
            usual=race.usual,
            runner_up=finish.runner_up,
            unpatched=[losses.plain(stretch) for stretch in split.held_out],
            truncations={
                window: [losses.truncated(window, stretch) for stretch in split.held_out]
                for window in self.readings.windows
            },
            documents=[stretch.document for stretch in split.held_out],
            trained=self.trained,
            same_documents=split.same_documents,
        )
        choice = Choice(
            candidates=tuple(self._finished(one, finish) for one in self._tried),
            finish=finish,
            held_out=held_out,
            usual=race.usual,
            trained_length=self.trained,
            target_length=self.length,
            sizes=sizes,
            rope_parameters=None,
            runtimes=(),
            refusals=self.refusals,
            texts=tuple(stretch.text.name for stretch in split.choosing),
            left_out=split.left_out,
            spent=self.spent(allowed, losses),
            provenance=self.provenance(),
            search=found,
        )
        runtimes, rope = self.runtimes(choice.name)
        return replace(choice, runtimes=runtimes, rope_parameters=rope)

    def _searched(
        self, losses: MeasuredLosses, finish: Finish, sizes: SearchSizes, usual: str
    ) -> tuple[SearchResult, Finish]:
        """What a search from the race's choice and from the trained frequencies finds, and whether it is taken."""
        assert self.plain is not None
        search = Search(
            losses=losses,
            sites=self.sites,
            plain=self.plain,
            texts=self.split.choosing,
            sizes=sizes,
            keys=self.keys,
        )
        starts = search.run(self._starts(finish, usual))
        self.found = search.reading_of(starts[0])
        kept_back = self.split.accepting[: sizes.accepting]
        return accept(search, starts, finish, usual=usual, texts=kept_back, label=self._candidate(finish.choice).label)

    def _starts(self, finish: Finish, usual: str) -> dict[str, Vector]:
        """The trained frequencies, and the best of the race that is one set of frequencies."""
        rope = self.sites[0].spec
        plain = torch.zeros(rope.rotary_dim // 2 + 1, dtype=torch.float64)
        for name in (*finish.finalists, usual):
            one = self._candidate(name)
            if isinstance(one.method, RopeMethod) and one.method.is_table:
                return {"the trained frequencies": plain, one.label: vector_of(one.method, rope, self.length)}
        raise AssertionError("the published YaRN is a set of frequencies")

    @property
    def _tried(self) -> list[Candidate]:
        """The candidates of the race, and what a search found."""
        if self.found is None:
            return self.candidates
        course = Course(name=self.found.name)
        return [*self.candidates, Candidate(reading=self.found, course=course, title=self.found.label)]

    def _candidate(self, name: str) -> Candidate:
        return next(one for one in self._tried if one.reading.name == name)

    def _finished(self, one: Candidate, finish: Finish) -> Candidate:
        found = entrant(one.reading.name, one.method, self.sites[0].spec, self.length)
        stretch = found.stretch if found.is_judged_inside else None
        return replace(one, course=finish.course(one.reading.name), stretch=stretch)

    def allowed(self, losses: MeasuredLosses) -> tuple[float | None, Costs]:
        """The budget in passes, and what parts of a race cost; by the clock where the budget is time."""
        if self.budget.seconds is None:
            return self.budget.passes, self.costs
        judged = [one.name for one in self.entrants if one.is_judged_inside]
        inside = losses.seconds_of_inside(judged[:TIMED])
        # What is far too small is said before a whole text is read.
        self.sizes_of(self.budget.seconds / inside * self.costs.of(prefix_of(self.trained, self.length)))
        whole = losses.seconds_of_whole()
        return self.budget.seconds / whole, self.costs.timed(inside, whole)

    def spent(self, allowed: float | None, losses: MeasuredLosses) -> Spent:
        """What was read, whether now or in an earlier run of the same race."""
        lines = self.journal.finished()
        seconds = sum(lines[key]["seconds"] for key in losses.asked)
        return Spent(passes=sum(losses.asked.values()), seconds=seconds, budget=self.budget.text, allowed=allowed)

    def provenance(self) -> dict[str, Any]:
        """What it was measured on and with, as JSON values."""
        self.stage.show(None)
        found = provenance_of(self.checkpoint, self.corpus, seed=self.seed).to_dict()
        del found["extensions"]
        return found | {"trained_length": self.trained}

    def runtimes(self, name: str) -> LoadedBy:
        """Who can load a candidate, and its stock dictionary."""
        if name not in self.loaded_by:
            self.loaded_by[name] = self._runtimes(name)
        return self.loaded_by[name]

    def _runtimes(self, name: str) -> LoadedBy:
        self.stage.show(None)
        with self.readings.applied(self._candidate(name).reading):
            config = base_model(self.readings.model).config
            stock = bool(config.ctxext["stock"])
            rope = dict(text_of(config).rope_parameters) if stock else None
            says = config.ctxext["stored_as"] if stock else "only with ctxext"
            found = [RuntimeVerdict(name="transformers", exact=stock, says=says)]
            for target in RUNTIMES:
                try:
                    made = export_config(config, to=target)
                    found.append(RuntimeVerdict(name=target, exact=made.exact, says=made.told))
                except CtxextError as error:
                    found.append(RuntimeVerdict(name=target, exact=False, says=str(error)))
        return tuple(found), rope


def prepare(
    checkpoint: Checkpoint,
    corpus: Corpus,
    *,
    target_length: int,
    budget: str | float | None = None,
    seed: int = 0,
    keys: bool = True,
    stock: bool = False,
    search: bool = False,
    trained_length: int | None = None,
    sliding_window: str | None = None,
    folder: Path | None = None,
    progress: Progress = lambda *_: None,
    trying: Callable[[int, int], None] = lambda *_: None,
) -> Contest:
    """Plan a race, before anything is read.

    Args:
        checkpoint: not extended.
        corpus: texts, whole, of any length.
        target_length: tokens to extend to, above the trained length.
        budget: see ``parse_budget``; None for no limit.
        seed: decides which texts are chosen on, and the hidden keys.
        keys: whether to ask for hidden keys.
        stock: enter only what stock transformers loads.
        search: whether to search the frequencies themselves after the race.
        trained_length: tokens that the checkpoint was trained for; None where its config says so.
        sliding_window: see ``ctxext.patch``.
        folder: that keeps finished cells; None keeps them in memory.
        progress: called with what is being done and the cost done since the last call.
        trying: called with methods tried and methods in all.

    Raises:
        CtxextError: whatever cannot be right, before anything is computed.
    """
    spent = parse_budget(budget)
    subject = Subject.of(checkpoint.model)
    base = subject.model
    if patched_state(base) is not None or already_extended(base.config):
        raise PatchStateError(
            f"{checkpoint.name} is extended already; what is chosen is how to extend the original. Call "
            f"ctxext.unpatch(model) first, or give the original checkpoint."
        )
    if not isinstance(architecture_of(subject), Rope):
        raise IncompatibleError(
            f"What is chosen among are rotary positions, and this {base.config.model_type} has others. Compare its "
            f"methods with `ctxext eval compare`."
        )
    readings = Readings(checkpoint, trained_length=trained_length, sliding_window=sliding_window)
    trained, target_length = readings.trained_length, checked_tokens("target_length", target_length)
    if target_length < trained + LEAST_BEYOND:
        raise InvalidParameterError(
            f"A target of {target_length:,} tokens needs no extension: the checkpoint was trained for {trained:,}. "
            f"Give a longer target (--target), at least {trained + LEAST_BEYOND:,}."
        )
    if search:
        require_searchable(checkpoint.model)
    split = split_texts(
        corpus.documents, tokens=target_length + 1, seed=seed, search=search, tokenizer=checkpoint.tokenizer
    )
    if keys:
        make_prompts(checkpoint.tokenizer, [target_length], DEPTHS[:1], seed=seed)  # it says what is too short for one
    sites = tuple(find_sites(subject, trained, scaled=trained_length is not None))
    rope, factor = sites[0].spec, target_length / trained
    methods = [one for one in candidates(factor, rope) if not stock or one.rope_parameters(rope) is not None]
    found, refusals = readings.find(methods, progress=trying)
    entered, twins = distinct(one for one in found if not one.is_reference)
    if not entered or entered[0].method != methods[0].to_dict():
        reasons = "; ".join(f"{refusal.label}: {refusal.reason}" for refusal in refusals)
        raise IncompatibleError(f"Others are held against YaRN as published, which does not apply here. {reasons}")
    plain = _plain_for(readings, rope.rotary_dim // 2, factor) if search else None
    cells, identity = (None, None) if folder is None else (folder / "cells.jsonl", folder / "choosing.json")
    journal = Journal(cells, identity=identity)
    return Contest(
        checkpoint=checkpoint,
        corpus=corpus,
        readings=readings,
        entered=tuple(entered),
        twins=twins,
        refusals=refusals,
        sites=sites,
        length=target_length,
        split=split,
        budget=spent,
        seed=seed,
        keys=keys,
        journal=journal,
        plain=plain,
        progress=progress,
    )


def _plain_for(readings: Readings, pairs: int, factor: float) -> Reading:
    """The model ready for the target with its frequencies as they were trained, in the form of what a search finds.

    Raises:
        IncompatibleError: the model's config cannot hold a number for each frequency.
    """
    found, refused = readings.find([as_method(torch.zeros(pairs + 1, dtype=torch.float64), factor)])
    if refused:
        raise IncompatibleError(
            f"What a search finds is a number for each frequency, which this model does not take. Choose without "
            f"--search. {refused[0].reason}"
        )
    return found[-1]


def choose(
    model: nn.Module,
    tokenizer: Any,
    *,
    texts: Sequence[str | Path | Document],
    target_length: int,
    budget: str | float | None = None,
    seed: int = 0,
    keys: bool = True,
    stock: bool = False,
    search: bool = False,
    trained_length: int | None = None,
    sliding_window: str | None = None,
    folder: str | Path | None = None,
    progress: Progress = lambda *_: None,
) -> Choice:
    """Find the extension that suits a model and your texts by measuring, and judge it on texts it was not chosen on.

    Pick it before you extend a model for good. A formula does not look at the model; this reads your texts with every
    method, at several factors, and with YaRN at many thresholds, divisors and temperatures, and drops what falls
    behind. What is lost is time: some forty passes over texts of the target length (``budget`` says how many). The
    model is at the end what it was: ``ctxext.patch(model, choice.method)`` extends it.

    Args:
        model: a causal language model with rotary positions, not extended, in eval mode.
        tokenizer: its tokenizer.
        texts: the texts themselves, or paths of files. Of at least two texts of the target length, some are chosen on
            and the others judged on; one text serves if it is at least twice as long.
        target_length: tokens to extend to, above the trained length.
        budget: ``"30min"`` of computing, or ``"25 passes"`` over the target length, which is the same on every machine;
            None for as much as the race takes.
        seed: decides which texts are chosen on, and the hidden keys: the same seed makes the same choice.
        keys: whether to hide keys in a text and ask for them.
        stock: choose only among what stock transformers loads, and other runtimes therefore may.
        search: after the race, search the frequencies themselves by gradients from its choice and from the trained
            frequencies, on the frozen model; what is found is taken only if it is better on texts kept back for that.
            It needs a third part of the texts and, without a budget, some ten times the passes.
        trained_length: tokens that the checkpoint was trained for; None where its config says so.
        sliding_window: see ``ctxext.patch``.
        folder: that keeps what is finished: the same call goes on where a killed one ended.
        progress: called with what is being done and the cost done since the last call.

    Returns:
        What was chosen, with ``method``, ``table`` and ``sentence``.

    Raises:
        InvalidParameterError: texts that are too short or too few, a target inside the trained window, or a budget that
            does not last for the smallest race.
        PatchStateError: the model is extended already.
        IncompatibleError: the model has no rotary positions.
        ResultsError: ``folder`` holds another measurement, or cannot be written.
    """
    name = Path(getattr(base_model(model), "name_or_path", "") or type(base_model(model)).__name__).name
    checkpoint = Checkpoint(name, model, tokenizer)
    contest = prepare(
        checkpoint,
        corpus_from(texts, tokenizer),
        target_length=target_length,
        budget=budget,
        seed=seed,
        keys=keys,
        stock=stock,
        search=search,
        trained_length=trained_length,
        sliding_window=sliding_window,
        folder=None if folder is None else Path(folder),
        progress=progress,
    )
    return contest.run()


def corpus_from(texts: Sequence[str | Path | Document], tokenizer: Any) -> Corpus:
    """Texts, paths of files and documents as a corpus of whole documents.

    Raises:
        InvalidParameterError: no text, or one string in the place of a list.
    """
    if isinstance(texts, str) or not texts:
        raise InvalidParameterError(
            "texts must be a list of texts, of paths (pathlib.Path) or of documents, with at least one in it."
        )
    documents: list[Document] = []
    for number, one in enumerate(texts, start=1):
        if isinstance(one, Path):
            documents += read_documents([one])
        else:
            documents.append(Document(f"text {number}", one) if isinstance(one, str) else one)
    prefix = special_prefix(tokenizer)
    found = tuple(tokenise(document, tokenizer, prefix=prefix) for document in documents)
    return Corpus(found, prefix_label(tokenizer, prefix), len(found))
