"""What a race chose, why, and on what: frozen objects that are made from finished losses, and what they say."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ctxext.choosing.budget import SearchSizes, parse_budget
from ctxext.choosing.candidates import short_label
from ctxext.choosing.race import INSIDE, MORE, READ, SEARCH, WHOLE, Course, Finish, Sizes
from ctxext.choosing.search import SearchedStart
from ctxext.choosing.verdict import HeldOut
from ctxext.evaluation.labels import few_of, tokens_label
from ctxext.evaluation.readings import Reading, Refusal
from ctxext.evaluation.statistics import PairedDifference
from ctxext.methods import Method, saved_class

RUNGS = {INSIDE: "inside the window", WHOLE: "on whole texts", MORE: "on more texts", SEARCH: "after the search"}


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One candidate: what it is, and how far it came.

    Args:
        reading: its name, method and fingerprint.
        course: through the race.
        twins: names of others that read the target just as it does, and were not read themselves.
        title: it in few words, where its method has none.
        stretch: what it divides the frequencies by that are new beyond the window; None where a short text says nothing
            about it.
    """

    reading: Reading
    course: Course
    twins: tuple[str, ...] = ()
    stretch: float | None = None
    title: str = ""

    @property
    def method(self) -> Method:
        """The method object."""
        assert self.reading.method is not None, "a candidate is an extension"
        return saved_class(self.reading.method["method"]).from_dict(self.reading.method)

    @property
    def label(self) -> str:
        """It in few words."""
        return self.title or short_label(self.method)


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """What a search of frequencies found, and whether it was taken.

    Args:
        starts: where it began and what came of each, the best first.
        rival: name of the race's choice, which the best of them had to beat.
        why_not: why the best of them was not taken; empty where it was.
        gain: beyond the window, its loss minus the rival's, on texts that neither was chosen on.
        damage: inside the window, its loss minus that of the published YaRN, on the same texts.
        texts: names of those texts.
        searched_on: names of the texts that it was searched on.
        needles: whether hidden keys were a part of them.
        sizes: how much was read.
    """

    starts: tuple[SearchedStart, ...]
    rival: str
    why_not: str
    gain: PairedDifference
    damage: PairedDifference
    texts: tuple[str, ...]
    searched_on: tuple[str, ...]
    needles: bool
    sizes: SearchSizes

    @property
    def accepted(self) -> bool:
        """Whether it became the choice."""
        return not self.why_not


@dataclass(frozen=True, kw_only=True)
class RuntimeVerdict:
    """Whether a runtime can load the choice.

    Args:
        name: of the runtime.
        exact: whether it is known to compute the same.
        says: how, or why not.
    """

    name: str
    exact: bool
    says: str


@dataclass(frozen=True, kw_only=True)
class Spent:
    """What a choice cost.

    Args:
        passes: as many passes over the whole target length.
        seconds: of computing.
        budget: as it was given; empty for none.
        allowed: passes that the budget came to; None for no limit.
    """

    passes: float
    seconds: float
    budget: str
    allowed: float | None


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The extension that suits a model and texts, and how it was found.

    Args:
        candidates: all, in the order in which they were entered.
        finish: of the race.
        held_out: on texts that the race never read.
        usual: name of the published YaRN's reading.
        trained_length: tokens that the checkpoint was trained for.
        target_length: tokens.
        sizes: how much was read.
        rope_parameters: the stock dictionary of the choice; None where it has none.
        runtimes: who can load it.
        refusals: methods that do not apply to this model.
        texts: names of the texts that were chosen on.
        spent: what it cost.
        provenance: what it was measured on and with, as JSON values.
        search: what a search of frequencies found; None where none was asked for.
        left_out: names of texts that are copies of others, or are in them, and were not used.
    """

    candidates: tuple[Candidate, ...]
    finish: Finish
    held_out: HeldOut
    usual: str
    trained_length: int
    target_length: int
    sizes: Sizes
    rope_parameters: Mapping[str, Any] | None
    runtimes: tuple[RuntimeVerdict, ...]
    refusals: tuple[Refusal, ...]
    texts: tuple[str, ...]
    spent: Spent
    provenance: Mapping[str, Any]
    search: SearchResult | None = None
    left_out: tuple[str, ...] = ()

    def candidate(self, name: str) -> Candidate:
        """One of them by the name of its reading."""
        return next(one for one in self.candidates if one.reading.name == name)

    @property
    def name(self) -> str:
        """The name of what was chosen.

        It is what the race chose, unless texts that the race never saw show that the published YaRN is better.
        """
        return self.usual if self.is_overruled else self.finish.choice

    @property
    def is_overruled(self) -> bool:
        """Whether the held-out texts show the race's choice to be worse than the published YaRN, or so at their end."""
        held = self.held_out
        return "worse" in (held.verdict(held.versus_usual), held.verdict(held.end_versus_usual))

    @property
    def method(self) -> Method:
        """What was chosen, ready for ``ctxext.patch(model, choice.method)``."""
        return self.candidate(self.name).method

    @property
    def record(self) -> dict[str, Any]:
        """What a saved config keeps of it: on which texts it was chosen, and what that gained on others."""
        gain = self.held_out.versus_usual
        return {
            "by": "ctxext choose",
            "target_length": self.target_length,
            "texts_sha256": self.provenance["corpus_sha256"],
            "texts": list(self.provenance["documents"]),
            "budget": self.spent.budget,
            "passes": round(self.spent.passes, 1),
            "seed": self.provenance["seed"],
            "candidates": len(self.candidates),
            "held_out_texts": self.held_out.texts,
            "held_out_gain": None if gain is None or self.is_overruled else -gain.mean,
            "held_out_gain_se": None if gain is None or self.is_overruled else gain.standard_error,
        } | ({} if self.search is None else {"search": self._search_record})

    @property
    def _search_record(self) -> dict[str, Any]:
        found = self.search
        assert found is not None
        return {
            "accepted": found.accepted,
            "why_not": found.why_not,
            "starts": [one.name for one in found.starts],
            "steps": found.sizes.steps,
            "texts_per_step": found.sizes.rows,
            "keys_hidden": found.needles,
            "gain": -found.gain.mean,
            "gain_se": found.gain.standard_error,
        }

    @property
    def sentence(self) -> str:
        """What was chosen and by how much it is better, in two sentences."""
        return headline(self)

    @property
    def table(self) -> list[dict[str, Any]]:
        """One row per candidate; see ``rows``."""
        return self.rows()

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; ``method`` is what a recipe or ``ctxext.patch`` needs."""
        found = asdict(self)
        found["candidates"] = [
            asdict(one) | {"label": one.label, "method": one.reading.method} for one in self.candidates
        ]
        method = self.method.to_dict()
        return {"method": method, "sentences": sentences(self), "record": self.record} | found

    def rows(self) -> list[dict[str, Any]]:
        """One row per candidate, unrounded: what it is, how far it came and why, and its differences."""
        found = []
        for one in self.candidates:
            course = one.course
            row: dict[str, Any] = {
                "candidate": one.reading.name,
                "label": one.label,
                "stretch": "" if one.stretch is None else one.stretch,
                "fingerprint": one.reading.fingerprint,
                "rung": course.rung,
                "dropped": course.dropped,
                "by": course.by,
            }
            for name in ("inside", "beyond", "worse_by"):
                gap: PairedDifference | None = getattr(course, name)
                row |= {name: gap.mean if gap else "", f"{name}_se": gap.standard_error if gap else ""}
            found.append(row | {"keys": " ".join(f"{loss:.3f}" for loss in course.keys), "tokens": course.tokens})
        return found


def headline(choice: Choice) -> str:
    """What was chosen, and by how much it beats YaRN as published."""
    name, usual = choice.candidate(choice.name).label, choice.candidate(choice.usual).label
    held, gap = choice.held_out, choice.held_out.versus_usual
    chosen = f"Chosen for {tokens_label(choice.target_length)} tokens: {name}."
    if gap is None:
        return f"{chosen} It is YaRN as published: no other of {len(choice.candidates)} candidates was chosen over it."
    texts = _texts(choice)
    if choice.is_overruled:
        other = choice.candidate(choice.finish.choice).label
        end = held.end_versus_usual
        if held.verdict(gap) == "worse" or end is None:
            return f"{chosen} The race had chosen {other}, which on {texts} is worse, by {_size(gap)}."
        return f"{chosen} The race had chosen {other}, which at the end of {texts} is worse, by {_size(end)}."
    verdict = held.verdict(gap)
    if verdict == "better":
        return f"{chosen} On {texts} it is better than {usual} as published, by {_size(gap)}."
    return f"{chosen} On {texts} no difference to {usual} as published can be shown: {_signed(gap)}."


def sentences(choice: Choice) -> list[str]:
    """Everything that has to be said, the headline first."""
    said = [headline(choice), *_search(choice), *_versus_runner_up(choice), _versus_truncation(choice)]
    said += _keys(choice)
    said += [_damage(choice), _dropped(choice), _spent(choice), _form(choice), *_cautions(choice)]
    return said


def _texts(choice: Choice) -> str:
    held, documents = choice.held_out, len(choice.held_out.names)
    if held.same_documents:
        count = f"{held.texts} other stretches" if held.texts > 1 else "another stretch"
        return f"{count} of the text that it was chosen on"
    if documents == 1 and held.texts == 1:
        return "a text that it was not chosen on"
    stretches = f"{held.texts} stretches of " if held.texts > documents else ""
    texts = f"{documents} texts" if documents > 1 else "a text"
    return f"{stretches}{texts} that it was not chosen on"


def _size(gap: PairedDifference) -> str:
    return f"{abs(gap.mean):.3f} ± {gap.standard_error:.3f} nats per token"


def _signed(gap: PairedDifference) -> str:
    return f"{gap} nats per token"


def _versus_runner_up(choice: Choice) -> list[str]:
    gap, name = choice.held_out.versus_runner_up, choice.finish.runner_up
    if gap is None or choice.is_overruled:
        return []
    told = {"better": "better, by", "worse": "worse, by"}.get(choice.held_out.verdict(gap), "not shown to differ:")
    size = _size(gap) if told.endswith("by") else _signed(gap)
    return [f"Against the runner-up, {choice.candidate(name).label}, it is {told} {size}."]


def _search(choice: Choice) -> list[str]:
    """What a search did, and whether it was taken."""
    found = choice.search
    if found is None:
        return []
    sizes, best, rival = found.sizes, found.starts[0], choice.candidate(found.rival).label
    where = " and ".join(one.name for one in found.starts)
    on = f"{sizes.rows} texts at a time" if sizes.rows > 1 else "one text at a time"
    keys = ", keys hidden in them" if found.needles else ""
    kept = f"{len(found.texts)} texts" if len(found.texts) > 1 else "a text"
    did = f"A search of the frequencies took {sizes.steps} steps from each of {where}, {on}{keys}."
    if found.accepted:
        return [
            f"{did} What it found from {best.name} was taken: on {kept} kept back for that it is better than {rival}, "
            f"which won the race, by {_size(found.gain)}."
        ]
    best_of = f"The best, from {best.name}, was judged on {kept} kept back for that"
    return [f"{did} Nothing of it was taken. {best_of}: {found.why_not}."]


def _versus_truncation(choice: Choice) -> str:
    gap = choice.held_out.versus_truncation
    kept = f"dropping all but the last {tokens_label(choice.held_out.window)} tokens"
    whose = choice.candidate(choice.finish.choice).label if choice.is_overruled else "it"
    verdict = gap.verdict
    where = gap.scope(choice.held_out.texts)
    if verdict == "better":
        return f"At the end of the texts {whose} predicts better{where} than {kept}, by {_size(gap)}."
    if verdict == "worse":
        return (
            f"For plain prediction at the end of the texts, {kept} is better{where}, by {_size(gap)}: the longer "
            f"context pays where something far back is asked for."
        )
    return f"At the end of the texts no difference to {kept} can be shown: {_signed(gap)}."


def _keys(choice: Choice) -> list[str]:
    losses = choice.finish.course(choice.name).keys
    if not losses:
        return []
    found = sum(loss < READ for loss in losses)
    told = ", ".join(f"{loss:.2f}" for loss in losses)
    where = f"hidden in {tokens_label(choice.target_length)} tokens"
    if len(losses) == 1:
        verb = "reads" if found else "does not read"
        return [f"A key {where}, at the very start, it {verb} at better than even odds (loss {told} nats)."]
    return [
        f"Of {len(losses)} keys {where}, the first at the very start, it reads {found} at better than even odds (loss "
        f"{told} nats)."
    ]


def _damage(choice: Choice) -> str:
    held = choice.held_out
    own = held.usual_damage if choice.is_overruled or choice.name == choice.usual else held.damage
    beside = "" if choice.name == choice.usual else f" YaRN as published costs {held.usual_damage}."
    return f"Inside the window it costs {_signed(own)} against the unextended model.{beside}"


def _dropped(choice: Choice) -> str:
    kinds: Counter[str] = Counter()
    for course in choice.finish.courses:
        if course.dropped:
            shown = "shown to be worse on these texts" if course.worse_by else "left behind, not shown to be worse"
            kinds[f"{RUNGS[course.rung]} ({shown})"] += 1
    twins = sum(len(one.twins) for one in choice.candidates)
    same = f" ({twins} more have the frequencies of one of them)" if twins else ""
    told = "; ".join(f"{count} {where}" for where, count in kinds.items())
    return f"Of {len(choice.candidates)} candidates{same} these were dropped: {told or 'none'}."


def duration(seconds: float) -> str:
    """Seconds as a reader wants them."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _spent(choice: Choice) -> str:
    spent = choice.spent
    limit = f", of the budget of {spent.budget}" if spent.budget else ""
    passes = f"{spent.passes:.1f} passes over {tokens_label(choice.target_length)} tokens"
    took = f"{duration(spent.seconds)} of computing"
    if parse_budget(spent.budget or None).seconds is None:
        return f"It took as much as {passes}{limit}, and {took}."
    return f"It took {took}{limit}: as much as {passes}."


def _who_loads(choice: Choice) -> str:
    """Which runtimes are known to compute the same, in a few words."""
    able = [one.name for one in choice.runtimes if one.exact]
    return ", ".join(able) if able else "only ctxext"


def _form(choice: Choice) -> str:
    if choice.rope_parameters is None:
        return f"It has no stock form: {_who_loads(choice)} loads it."
    return f"It is the stock dictionary {json.dumps(choice.rope_parameters)}; known to load it: {_who_loads(choice)}."


def _cautions(choice: Choice) -> list[str]:
    held, said = choice.held_out, []
    gap = held.versus_usual or held.versus_truncation
    if gap.over != "documents":
        these = "this text" if len(held.names) == 1 else "these texts"
        said.append(
            f"The verdict is about {these} ({few_of(held.names)}): five documents or more would say something about "
            f"others."
        )
    if choice.left_out:
        said.append(
            f"Left out as copies of other texts, or parts of them: {few_of(choice.left_out)}. What is chosen on is not "
            f"judged on."
        )
    if choice.finish.course(choice.finish.choice).tokens and choice.sizes.texts == 1:
        said.append("It was chosen on one text; with more, the choice among near equals is surer.")
    return said
