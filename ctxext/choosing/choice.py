"""What a race chose, why, and on what: frozen objects that are made from finished losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ctxext.choosing.budget import SearchSizes
from ctxext.choosing.candidates import short_label
from ctxext.choosing.race import Course, Finish, Sizes, end_of
from ctxext.choosing.search import SearchedStart
from ctxext.evaluation.readings import Reading, Refusal
from ctxext.evaluation.statistics import PairedDifference, document_difference
from ctxext.evaluation.truncation import best_window
from ctxext.methods import METHODS, Method

__all__ = [
    "Candidate",
    "Choice",
    "HeldOut",
    "RuntimeVerdict",
    "SearchResult",
    "Spent",
    "by_document",
    "judge_held_out",
]

# The choice is held against two: the published YaRN and the runner-up.
COMPARED = 2


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """The choice on texts that the race never read; differences are its loss minus that of another.

    Args:
        versus_usual: beyond the window, the published YaRN's; None where that is the choice.
        end_versus_usual: the same at the end of the texts, where one that stretches too little falls apart.
        versus_runner_up: beyond the window, the runner-up's.
        versus_truncation: at the end of the texts, the best truncation's.
        window: of that truncation, in tokens.
        damage: inside the window, the unpatched model's.
        usual_damage: of the published YaRN inside the window, likewise.
        loss: of the choice beyond the window.
        texts: how many were read.
        names: of the documents.
        same_documents: whether they are other parts of the documents that were chosen on.
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

    def verdict(self, difference: PairedDifference | None) -> str:
        """``better``, ``worse`` or ``no difference``; the chance of 5 percent is shared by both comparisons."""
        if difference is None:
            return "no difference"
        return difference.verdict_of_best(COMPARED) if difference.mean <= 0 else _mirrored(difference)

    @property
    def declares_winner(self) -> bool:
        """Whether the choice is called better than the published YaRN or than the runner-up."""
        return "better" in (self.verdict(self.versus_usual), self.verdict(self.versus_runner_up))


def _mirrored(difference: PairedDifference) -> str:
    """The verdict on a loss that is higher, held to what a lower one is held to."""
    needed = difference.errors_needed(COMPARED) * difference.standard_error
    return "worse" if difference.mean > needed else "no difference"


def by_document(texts: Sequence[Tensor], documents: Sequence[str]) -> list[Tensor]:
    """Losses of texts, those of one document together.

    Args:
        texts: nats per token.
        documents: which each text is of.
    """
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
    truncations: Mapping[int, Sequence[Tensor]],
    documents: Sequence[str],
    trained: int,
    same_documents: bool,
) -> HeldOut:
    """Hold the choice against the others on texts that it was not chosen on.

    Args:
        losses: of whole texts, nats per token, one tensor per text, of the three readings.
        choice: name of the choice.
        usual: of the published YaRN.
        runner_up: of the runner-up; empty where there is none.
        unpatched: of the unextended model inside the window, one tensor per text.
        truncations: at the end of the texts, one tensor per text, by window.
        documents: which each text is of; the texts of one document count as one.
        trained: tokens of the window.
        same_documents: see ``HeldOut``.
    """

    def together(texts: Sequence[Tensor]) -> list[Tensor]:
        return by_document(texts, documents)

    def beyond(name: str) -> list[Tensor]:
        return together([text[trained:] for text in losses[name]])

    def inside(name: str) -> list[Tensor]:
        return together([text[:trained] for text in losses[name]])

    window = best_window(truncations)
    ends = together(truncations[window])
    tails = together(
        [text[-len(end) :] for text, end in zip(losses[choice], truncations[window], strict=True)],
    )
    start = end_of(trained, len(losses[choice][0]))
    last = {name: together([text[start:] for text in losses[name]]) for name in (choice, usual)}
    own, plain = beyond(choice), together(unpatched)
    return HeldOut(
        versus_usual=None if choice == usual else document_difference(own, beyond(usual)),
        end_versus_usual=None if choice == usual else document_difference(last[choice], last[usual]),
        versus_runner_up=document_difference(own, beyond(runner_up)) if runner_up else None,
        versus_truncation=document_difference(tails, ends, baselines=len(truncations)),
        window=window,
        damage=document_difference(inside(choice), plain),
        usual_damage=document_difference(inside(usual), plain),
        loss=torch.cat(own).double().mean().item(),
        texts=len(documents),
        names=tuple(dict.fromkeys(documents)),
        same_documents=same_documents,
    )


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
        return METHODS[self.reading.method["method"]].from_dict(self.reading.method)

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
        from ctxext.choosing.sentences import headline

        return headline(self)

    @property
    def table(self) -> list[dict[str, Any]]:
        """One row per candidate; see ``rows``."""
        return self.rows()

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; ``method`` is what a recipe or ``ctxext.patch`` needs."""
        from ctxext.choosing.sentences import sentences

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
