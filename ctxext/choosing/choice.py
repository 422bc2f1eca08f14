"""A choice: which extension was chosen, why, and on what; and all of it in sentences."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from ctxext.choosing.candidates import CandidateReach, short_label
from ctxext.choosing.halving import INSIDE, MORE, READ, WHOLE, Course, Finish, Sizes
from ctxext.choosing.verdict import HeldOut
from ctxext.measuring.labels import few_of, tokens_label
from ctxext.measuring.readings import Reading, Refusal
from ctxext.measuring.statistics import PairedDifference
from ctxext.methods import Method, saved_class
from ctxext.quantities import duration, parse_budget
from ctxext.spec import RopeSpec

ROUNDS = {INSIDE: "inside the window", WHOLE: "on whole texts", MORE: "on more texts"}


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One candidate and how far it came.

    Args:
        twins: names of others whose frequencies at the target are the same, and which were not read themselves.
    """

    reading: Reading
    reach: CandidateReach
    course: Course
    twins: tuple[str, ...] = ()
    title: str = ""

    @classmethod
    def of(cls, reading: Reading, rope: RopeSpec, length: int, **about: Any) -> Candidate:
        """Return a candidate, perhaps with ``twins`` and ``title``, before it is read; see ``CandidateReach.of``."""
        candidate = cls(reading=reading, reach=CandidateReach(), course=Course(name=reading.name), **about)
        return replace(candidate, reach=CandidateReach.of(candidate.method, rope, length))

    @property
    def method(self) -> Method:
        """The method object."""
        assert self.reading.method is not None, "a candidate is an extension"
        return saved_class(self.reading.method["method"]).from_dict(self.reading.method)

    @property
    def label(self) -> str:
        """A short name to show."""
        return self.title or short_label(self.method)

    @property
    def stretch(self) -> float | None:
        """The divisor of the frequencies that are new beyond the window; None where it is not judged inside."""
        return self.reach.stretch if self.reach.is_judged_inside else None

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        about = {"twins": self.twins, "stretch": self.stretch, "title": self.title, "label": self.label}
        course = {"course": self.course.to_dict()}
        return {"reading": asdict(self.reading)} | course | about | {"method": self.reading.method}


@dataclass(frozen=True, kw_only=True)
class RuntimeVerdict:
    """Answer of a runtime to whether it can load the choice."""

    name: str
    exact: bool
    says: str


@dataclass(frozen=True, kw_only=True)
class Spent:
    """The cost of a choice.

    Args:
        passes: as many passes over the whole target length.
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
        candidates: all, the published YaRN first.
        held_out: the verdict on texts that the rounds never read.
        rope_parameters: the choice as plain transformers loads it; None where only ctxext can.
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
    left_out: tuple[str, ...] = ()

    def candidate(self, name: str) -> Candidate:
        """Return a candidate by the name of its reading."""
        return next(candidate for candidate in self.candidates if candidate.reading.name == name)

    @property
    def name(self) -> str:
        """The name of the choice.

        It is the winner of the rounds, unless texts that they never read show that the published YaRN is better.
        """
        return self.usual if self.is_overruled else self.finish.choice

    @property
    def is_overruled(self) -> bool:
        """True where the held-out texts, or their ends, show the rounds' winner to be worse than the published YaRN."""
        held = self.held_out
        return "worse" in (held.verdict(held.versus_usual), held.verdict(held.end_versus_usual))

    @property
    def method(self) -> Method:
        """The method that was chosen, ready for ``ctxext.patch(model, choice.method)``."""
        return self.candidate(self.name).method

    @property
    def record(self) -> dict[str, Any]:
        """The part that a saved config keeps: on which texts it was chosen, and what that gained on others."""
        gain = None if self.is_overruled else self.held_out.versus_usual
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
            "held_out_gain": None if gain is None else -gain.mean,
            "held_out_gain_se": None if gain is None else gain.standard_error,
        }

    @property
    def sentence(self) -> str:
        """The choice and by how much it is better, in two sentences."""
        return _headline(self)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values; ``method`` is what a recipe or ``ctxext.patch`` needs."""
        values = asdict(replace(self, candidates=()))
        values["candidates"] = [candidate.to_dict() for candidate in self.candidates]
        values["finish"]["courses"] = [course.to_dict() for course in self.finish.courses]
        values["search"] = None  # files of earlier choices have it
        return {"method": self.method.to_dict(), "sentences": sentences(self), "record": self.record} | values

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per candidate, unrounded: what it is, how far it came and why, and its differences."""
        rows = []
        for candidate in self.candidates:
            course = candidate.course
            row: dict[str, Any] = {
                "candidate": candidate.reading.name,
                "label": candidate.label,
                "stretch": "" if candidate.stretch is None else candidate.stretch,
                "fingerprint": candidate.reading.fingerprint,
                "rung": course.round,
                "dropped": course.dropped,
                "by": course.by,
            }
            for name in ("inside", "beyond", "worse_by"):
                gap: PairedDifference | None = getattr(course, name)
                row |= {name: gap.mean if gap else "", f"{name}_se": gap.standard_error if gap else ""}
            rows.append(row | {"keys": " ".join(f"{loss:.3f}" for loss in course.keys), "tokens": course.tokens})
        return rows


def sentences(choice: Choice) -> list[str]:
    """Return everything that has to be said, the headline first."""
    said = [_headline(choice), *_versus_runner_up(choice), _versus_truncation(choice)]
    return [*said, *_keys(choice), _damage(choice), _dropped(choice), _spent(choice), _form(choice), *_cautions(choice)]


def _headline(choice: Choice) -> str:
    name, usual = choice.candidate(choice.name).label, choice.candidate(choice.usual).label
    held, gap = choice.held_out, choice.held_out.versus_usual
    chosen = f"Chosen for {tokens_label(choice.target_length)} tokens: {name}."
    if gap is None:
        return f"{chosen} It is YaRN as published: no other of {len(choice.candidates)} candidates was chosen over it."
    texts, verdict = _texts(choice), held.verdict(gap)
    if choice.is_overruled:
        end = held.end_versus_usual
        where, worse = ("on", gap) if verdict == "worse" or end is None else ("at the end of", end)
        winner = choice.candidate(choice.finish.choice).label
        return f"{chosen} {winner} had been chosen, which {where} {texts} is worse, by {_size(worse)}."
    if verdict == "better":
        return f"{chosen} On {texts} it is better than {usual} as published, by {_size(gap)}."
    return f"{chosen} On {texts} no difference to {usual} as published can be shown: {gap} nats per token."


def _texts(choice: Choice) -> str:
    held, documents = choice.held_out, len(choice.held_out.names)
    if held.same_documents:
        count = f"{held.texts} other stretches" if held.texts > 1 else "another stretch"
        return f"{count} of the text that it was chosen on"
    stretches = f"{held.texts} stretches of " if held.texts > documents else ""
    texts = f"{documents} texts" if documents > 1 else "a text"
    return f"{stretches}{texts} that it was not chosen on"


def _size(gap: PairedDifference) -> str:
    return f"{abs(gap.mean):.3f} ± {gap.standard_error:.3f} nats per token"


def _versus_runner_up(choice: Choice) -> list[str]:
    gap = choice.held_out.versus_runner_up
    if gap is None or choice.is_overruled:
        return []
    verdict, name = choice.held_out.verdict(gap), choice.candidate(choice.finish.runner_up).label
    size = f"not shown to differ: {gap} nats per token" if verdict == "no difference" else f"{verdict}, by {_size(gap)}"
    return [f"Against the runner-up, {name}, it is {size}."]


def _versus_truncation(choice: Choice) -> str:
    gap = choice.held_out.versus_truncation
    kept = f"dropping all but the last {tokens_label(choice.held_out.window)} tokens"
    whose = choice.candidate(choice.finish.choice).label if choice.is_overruled else "it"
    where = gap.scope(choice.held_out.texts)
    if gap.verdict == "better":
        return f"At the end of the texts {whose} predicts better{where} than {kept}, by {_size(gap)}."
    if gap.verdict == "worse":
        return (
            f"For plain prediction at the end of the texts, {kept} is better{where}, by {_size(gap)}: the longer "
            f"context pays where something far back is asked for."
        )
    return f"At the end of the texts no difference to {kept} can be shown: {gap} nats per token."


def _keys(choice: Choice) -> list[str]:
    losses = choice.finish.course(choice.name).keys
    if not losses:
        return []
    read = sum(loss < READ for loss in losses)
    values = ", ".join(f"{loss:.2f}" for loss in losses)
    where = f"hidden in {tokens_label(choice.target_length)} tokens"
    if len(losses) == 1:
        verb = "reads" if read else "does not read"
        return [f"A key {where}, at the very start, it {verb} at better than even odds (loss {values} nats)."]
    first = f"Of {len(losses)} keys {where}, the first at the very start"
    return [f"{first}, it reads {read} at better than even odds (loss {values} nats)."]


def _damage(choice: Choice) -> str:
    held, is_usual = choice.held_out, choice.name == choice.usual
    own = held.usual_damage if is_usual else held.damage
    beside = "" if is_usual else f" YaRN as published costs {held.usual_damage}."
    return f"Inside the window it costs {own} nats per token against the unextended model.{beside}"


def _dropped(choice: Choice) -> str:
    kinds: Counter[str] = Counter()
    for course in choice.finish.courses:
        if course.dropped:
            shown = "shown to be worse on these texts" if course.worse_by else "left behind, not shown to be worse"
            kinds[f"{ROUNDS[course.round]} ({shown})"] += 1
    twins = sum(len(candidate.twins) for candidate in choice.candidates)
    same = f" ({twins} more have the frequencies of one of them)" if twins else ""
    dropped = "; ".join(f"{count} {where}" for where, count in kinds.items())
    return f"Of {len(choice.candidates)} candidates{same} these were dropped: {dropped or 'none'}."


def _spent(choice: Choice) -> str:
    spent = choice.spent
    limit = f", of the budget of {spent.budget}" if spent.budget else ""
    passes = f"{spent.passes:.1f} passes over {tokens_label(choice.target_length)} tokens"
    took = f"{duration(spent.seconds)} of computing"
    if parse_budget(spent.budget or None).seconds is None:
        return f"It took as much as {passes}{limit}, and {took}."
    return f"It took {took}{limit}: as much as {passes}."


def _form(choice: Choice) -> str:
    able = ", ".join(runtime.name for runtime in choice.runtimes if runtime.exact) or "only ctxext"
    if choice.rope_parameters is None:
        return f"Plain transformers cannot express it: {able} loads it."
    return f"Plain transformers has it as {json.dumps(choice.rope_parameters)}; known to load it: {able}."


def _cautions(choice: Choice) -> list[str]:
    held, said = choice.held_out, []
    gap = held.versus_usual or held.versus_truncation
    if gap.over != "documents":
        these = "this text" if len(held.names) == 1 else "these texts"
        about = f"The verdict is about {these} ({few_of(held.names)})"
        said.append(f"{about}: five documents or more would say something about others.")
    if choice.left_out:
        copies = f"Left out as copies of other texts, or parts of them: {few_of(choice.left_out)}"
        said.append(f"{copies}. What is chosen on is not judged on.")
    if choice.finish.course(choice.finish.choice).tokens and choice.sizes.texts == 1:
        said.append("It was chosen on one text; with more, the choice among near equals is surer.")
    return said
