"""The choice, the verdict on it by texts that no round has read, and its reasons as rows of one table."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ctxext.choosing.candidates import Candidate
from ctxext.choosing.halving import INSIDE, MORE, READ, WHOLE, Finish, Sizes, end_of
from ctxext.files import JsonObject
from ctxext.measuring.labels import few_of, tokens_label
from ctxext.measuring.readings import Refusal
from ctxext.measuring.statistics import PairedDifference, document_difference, mean_loss
from ctxext.measuring.truncation import SELECTED, best_short, window_of
from ctxext.methods import Method
from ctxext.quantities import duration

# The choice is compared with two: the published YaRN and the runner-up.
COMPARED = 2
# The rounds, from the last to the first.
ROUNDS = {MORE: "on more texts", WHOLE: "on whole texts", INSIDE: "inside the window"}
USUAL = "YaRN as published"


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """The winner of the rounds on texts that were never read before; differences are its loss minus another's.

    Args:
        versus_usual: difference beyond the window to the published YaRN; None where that is the winner.
        end_versus_usual: the same at the end of the texts, where a candidate that stretches too little falls apart.
        versus_runner_up: difference beyond the window to the runner-up.
        versus_truncation: difference at the end of the texts to the best of the truncations and the selection.
        window: tokens that this one sees.
        selected: True where this one is the selection.
        damage: difference inside the window to the unpatched model.
        usual_damage: the published YaRN's damage.
        same_documents: True for other parts of the documents that were chosen on.
    """

    versus_usual: PairedDifference | None
    end_versus_usual: PairedDifference | None
    versus_runner_up: PairedDifference | None
    versus_truncation: PairedDifference
    window: int
    damage: PairedDifference
    usual_damage: PairedDifference
    loss: float
    texts: int
    names: tuple[str, ...]
    same_documents: bool
    selected: bool = False

    def verdict(self, difference: PairedDifference | None) -> str:
        """Return ``better``, ``worse`` or ``no difference``; both comparisons share the chance of 5 percent."""
        if difference is None:
            return "no difference"
        return replace(difference, baselines=COMPARED).verdict_of_best(COMPARED)

    def compared(self, runner_up: str = "the runner-up") -> Iterator[tuple[str, PairedDifference, str]]:
        """Yield each comparison: its name, the difference, and a verdict where one may be given."""
        at_end, kind = self.versus_truncation, "selected" if self.selected else "the last"
        cut = f"{kind} {tokens_label(self.window)} tokens alone"
        rows = (
            (f"beyond the window, minus {USUAL}", self.versus_usual, self.verdict(self.versus_usual)),
            (f"at the end, minus {USUAL}", self.end_versus_usual, self.verdict(self.end_versus_usual)),
            (f"beyond the window, minus {runner_up}", self.versus_runner_up, self.verdict(self.versus_runner_up)),
            (f"at the end, minus {cut}", at_end, at_end.verdict + at_end.scope(self.texts)),
            ("inside the window, minus the unextended model", self.damage, ""),
            (f"inside the window, {USUAL} minus the unextended model", self.usual_damage, ""),
        )
        return ((name, gap, verdict) for name, gap, verdict in rows if gap is not None)


def by_document(texts: Sequence[Tensor], documents: Sequence[str]) -> list[Tensor]:
    """Join the losses of texts, [tokens] each, that are of one document."""
    return [
        torch.cat([text for text, own in zip(texts, documents, strict=True) if own == name])
        for name in dict.fromkeys(documents)
    ]


def judge_held_out(
    losses: Mapping[str, Sequence[Tensor]],
    *,
    choice: str,
    usual: str,
    runner_up: str,
    unpatched: Sequence[Tensor],
    truncations: Mapping[str, Sequence[Tensor]],
    documents: Sequence[str],
    trained: int,
    same_documents: bool,
) -> HeldOut:
    """Compare the winner of the rounds with others on texts that it was not chosen on.

    Losses are in nats per token, one tensor per text: of whole texts by the names of readings, of the unpatched model
    inside the window, and of truncations and the selection at the end of the texts by their names. The texts of one
    document count as one. An empty ``runner_up`` is none.
    """
    best = best_short({name: by_document(texts, documents) for name, texts in truncations.items()})
    end = len(truncations[best][0])

    def difference(name: str, other: Sequence[Tensor], part: slice, *, baselines: int = 1) -> PairedDifference:
        own = by_document([text[part] for text in losses[name]], documents)
        return document_difference(own, by_document(other, documents), baselines=baselines)

    def versus(name: str, start: int) -> PairedDifference | None:
        if name in ("", choice):
            return None
        return difference(choice, [text[start:] for text in losses[name]], slice(start, None))

    return HeldOut(
        versus_usual=versus(usual, trained),
        end_versus_usual=versus(usual, end_of(trained, len(losses[choice][0]))),
        versus_runner_up=versus(runner_up, trained),
        versus_truncation=difference(choice, truncations[best], slice(-end, None), baselines=len(truncations)),
        window=window_of(best) or trained,
        selected=best == SELECTED,
        damage=difference(choice, unpatched, slice(trained)),
        usual_damage=difference(usual, unpatched, slice(trained)),
        loss=mean_loss(by_document([text[trained:] for text in losses[choice]], documents)),
        texts=len(documents),
        names=tuple(dict.fromkeys(documents)),
        same_documents=same_documents,
    )


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
        passes: cost in passes over the whole target length.
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
        candidates: all candidates, the published YaRN first.
        held_out: verdict on texts that the rounds never read.
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

    def label(self, name: str) -> str:
        """Return the short name of a candidate."""
        return self.candidate(name).label

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
    def record(self) -> JsonObject:
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
        chosen = f"Chosen for {tokens_label(self.target_length)} tokens: {self.label(self.name)}."
        held, gap = self.held_out, self.held_out.versus_usual
        if gap is None:
            count = len(self.candidates)
            return f"{chosen} It is {USUAL}: no other of {count} candidates was chosen over it."
        verdict = held.verdict(gap)
        if self.is_overruled:
            end = held.end_versus_usual
            where, worse = ("on", gap) if verdict == "worse" or end is None else ("at the end of", end)
            winner = self.label(self.finish.choice)
            return f"{chosen} {winner} had been chosen, which {where} {self.judged_on} is worse, by {_size(worse)}."
        if verdict == "better":
            return f"{chosen} On {self.judged_on} it is better than {USUAL}, by {_size(gap)}."
        return f"{chosen} On {self.judged_on} no difference to {USUAL} can be shown: {gap} nats per token."

    @property
    def judged_on(self) -> str:
        """The texts of the verdict, in words."""
        held, documents = self.held_out, len(self.held_out.names)
        if held.same_documents:
            count = f"{held.texts} other stretches" if held.texts > 1 else "another stretch"
            return f"{count} of the text that it was chosen on"
        stretches = f"{held.texts} stretches of " if held.texts > documents else ""
        return f"{stretches}{f'{documents} texts' if documents > 1 else 'a text'} that it was not chosen on"

    def reasons(self) -> list[tuple[str, str]]:
        """Return everything else that has to be said: what was measured or holds, and its value."""
        second = self.finish.runner_up and f"the runner-up, {self.label(self.finish.runner_up)}"
        compared = self.held_out.compared(second)
        measured = [(name, f"{gap} nats per token{verdict and f': {verdict}'}") for name, gap, verdict in compared]
        keys, spent = self.finish.course(self.name).keys, self.spent
        values = ", ".join(f"{loss:.2f}" for loss in keys)
        read = f"{sum(loss < READ for loss in keys)} of {len(keys)}, the first at the very start (loss {values} nats)"
        limit = f", of the budget of {spent.budget}" if spent.budget else ""
        passes = f"{spent.passes:.1f} passes over {tokens_label(self.target_length)} tokens"
        able = ", ".join(runtime.name for runtime in self.runtimes if runtime.exact) or "ctxext alone"
        form = "" if self.rope_parameters is None else f", as {json.dumps(self.rope_parameters)}"
        gap = self.held_out.versus_usual or self.held_out.versus_truncation
        about = f"{few_of(self.held_out.names)} alone; five documents or more would say something about others"
        surer = bool(self.finish.course(self.finish.choice).tokens) and self.sizes.texts == 1
        held = [
            ("keys read at better than even odds", read if keys else ""),
            ("candidates dropped", self._dropped()),
            ("cost", f"{passes}: {duration(spent.seconds)} of computing{limit}"),
            ("loaded by", able + form),
            ("the verdict is about", "" if gap.over == "documents" else about),
            ("left out, copies of other texts", few_of(self.left_out) if self.left_out else ""),
            ("chosen on", "one text; with more, the choice among near equals is surer" if surer else ""),
        ]
        return measured + [(name, value) for name, value in held if value]

    def _dropped(self) -> str:
        """Count the candidates that each round dropped, by how sure it was."""
        kinds = Counter(
            f"{ROUNDS[course.round]} ({'worse on these texts' if course.worse_by else 'not shown to be worse'})"
            for course in self.finish.courses
            if course.dropped
        )
        twins = sum(len(candidate.twins) for candidate in self.candidates)
        same = f"; {twins} more have the frequencies of one of them" if twins else ""
        dropped = ", ".join(f"{count} {where}" for where, count in kinds.items()) or "none"
        return f"{dropped}, of {len(self.candidates)}{same}"

    def to_dict(self) -> JsonObject:
        """Return plain JSON values; ``method`` is what a recipe or ``ctxext.patch`` needs."""
        values = asdict(replace(self, candidates=()))
        finish = self.finish
        values["candidates"] = [each.to_dict(finish.course(each.reading.name).to_dict()) for each in self.candidates]
        values["finish"]["courses"] = [course.to_dict() for course in finish.courses]
        sentences = [self.sentence, *(f"{name[0].upper()}{name[1:]}: {value}." for name, value in self.reasons())]
        return {"method": self.method.to_dict(), "sentences": sentences, "record": self.record} | values

    def rows(self) -> list[JsonObject]:
        """Return a row per candidate, the furthest first: its unrounded differences, its fate and why."""
        places = {name: place for place, name in enumerate(self.finish.finalists)}

        def place(candidate: Candidate) -> tuple[int, int, bool, float]:
            course = self.finish.course(candidate.reading.name)
            gap = course.beyond or course.inside
            finalist = places.get(course.name, len(places))
            return finalist, list(ROUNDS).index(course.round), bool(course.worse_by), 0.0 if gap is None else gap.mean

        rows = []
        for candidate in sorted(self.candidates, key=place):
            course = self.finish.course(candidate.reading.name)
            row: JsonObject = {
                "candidate": course.name,
                "label": candidate.label,
                "stretch": "" if candidate.stretch is None else candidate.stretch,
                "fingerprint": candidate.reading.fingerprint,
                "rung": course.round,
                "fate": "chosen" if course.name == self.name else course.fate,
                "dropped": course.dropped,
                "by": course.by,
            }
            for name in ("inside", "beyond", "end", "worse_by"):
                gap: PairedDifference | None = getattr(course, name)
                row |= {name: gap.mean if gap else "", f"{name}_se": gap.standard_error if gap else ""}
            rows.append(row | {"keys": " ".join(f"{loss:.3f}" for loss in course.keys), "tokens": course.tokens})
        return rows


def _size(gap: PairedDifference) -> str:
    return f"{abs(gap.mean):.3f} ± {gap.standard_error:.3f} nats per token"
