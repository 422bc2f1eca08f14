"""The race: which candidates are read further, and which of the last ones is chosen. Pure decisions over losses.

Where the losses come from, a model or a file, the race does not know: see ``CandidateLosses``. It has three rungs.

1. **Inside.** Every candidate reads the beginning of each text, which is cheap. It is left behind only if another one,
   which reaches at least as far, reads better there; of those that are left, the most promising go on.
2. **Whole.** They read whole texts. One of them is stopped at a chunk of the text as soon as it is beyond rescue: even
   if it read the rest as well as the best one did, it would be worse.
3. **More.** The best few read more texts, and are asked for keys hidden in them.

Who stretches too little reads well until the farthest distances come, and then falls apart: a mean hides that. So the
last part of the texts (``end_of``) is a bound of its own, as the trained window is.

**What may be said.** Every difference is paired by token. A race looks at its losses more than once, and at many
candidates: chance has more occasions than one. So the chance of 5 percent is shared out in advance, a part to each rung
(``LOOKS``) and the rest to the verdict on texts that the race never saw; inside a rung it is divided again among all
pairs of candidates and all chunks at which one may be stopped. A candidate that is dropped as *worse* is worse by more
than that allows; one that only is not among the best few that the budget lasts for is said to be just that.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from ctxext.choosing.candidates import Entrant
from ctxext.evaluation.statistics import CHANCE, PairedDifference, block_difference, students_quantile

INSIDE, WHOLE, MORE = "inside", "whole", "more"
# Where a candidate comes in that no race was run with: found by a search from there on.
SEARCH = "search"
# How much of the chance of 5 percent each rung may spend. What is left, 0.025, is that of a verdict that calls the
# choice better than another where it is not: half of the 5 percent, two-sided, that such a verdict has.
LOOKS = {INSIDE: 0.005, WHOLE: 0.01, MORE: 0.01}
# Chunks of a text, at whose ends a candidate may be stopped; and by how many standard errors at least it must be worse.
PIECES, RESCUE = 8, 4.0
# Blocks of tokens that count as independent: more than for a verdict, since chance is divided among many comparisons,
# and Student's quantile for a small chance grows fast where there are few.
BLOCKS = 64
# The end of a text, where one that stretches too little falls apart: a part of it, and tokens at the least.
ENDS, LEAST_END = 32, 16
# Nats per token within which two finalists are as good: then the one that more runtimes read is chosen.
AS_GOOD = 0.01
# A key whose tokens cost less than ln 2 each is read at better than even odds; one that costs a nat more is lost.
READ, LOST = math.log(2), 1.0


@runtime_checkable
class CandidateLosses(Protocol):
    """Where the losses of candidates come from, all in nats per token."""

    def inside(self, name: str) -> Float[Tensor, " tokens"]:
        """Of a candidate, at the beginnings of the texts of the second rung."""

    def whole(self, name: str, text: int, go_on: Callable[[Tensor], bool]) -> Float[Tensor, " read"]:
        """Of a candidate on a whole text, or on as much of it as ``go_on``, told all losses so far, wants."""

    def keys(self, name: str) -> tuple[float, ...]:
        """Of the tokens of each hidden key."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much a race reads.

    Args:
        whole: candidates that read whole texts, beside the published YaRN.
        finalists: of those, how many read more texts.
        texts: that are chosen on; the second rung reads the first ``first`` of them.
        first: see ``texts``.
        held_out: texts for the verdict.
        keys: hidden keys that every finalist is asked for.
    """

    whole: int
    finalists: int
    texts: int
    first: int
    held_out: int
    keys: int


@dataclass(frozen=True, kw_only=True)
class Course:
    """How far one candidate came.

    Args:
        name: of its reading.
        rung: the last one that it took part in.
        dropped: why it came no further, in words; empty for a finalist.
        by: the candidate that it was held against there.
        inside: its loss inside the window minus that of the published YaRN; None where it was not read there.
        beyond: the same beyond the window, on as much as it has read.
        end: the same at the end of the texts, see ``end_of``; None where it has not read them whole.
        worse_by: what it was dropped for: its loss minus that of ``by``; None where it is not shown to be worse.
        keys: loss of each hidden key, nats; empty where it was not asked.
        trace: what it has read beyond the window, in tokens, and its mean difference to the published YaRN until there.
        tokens: read of whole texts.
    """

    name: str
    rung: str = INSIDE
    dropped: str = ""
    by: str = ""
    inside: PairedDifference | None = None
    beyond: PairedDifference | None = None
    end: PairedDifference | None = None
    worse_by: PairedDifference | None = None
    keys: tuple[float, ...] = ()
    trace: tuple[tuple[int, float], ...] = ()
    tokens: int = 0

    def beside(self, usual: Sequence[Tensor], own: Sequence[Tensor], *, trained: int, length: int) -> Course:
        """With how it stands beside the published YaRN.

        Args:
            usual: losses of the published YaRN on the same texts, nats per token.
            own: its own, as far as it has read.
            trained: tokens of the window.
            length: of a whole text.
        """
        usual = [theirs[: len(mine)] for mine, theirs in zip(own, usual, strict=False)]
        mine, theirs = (torch.cat([one[trained:] for one in side]) for side in (own, usual))
        running = (mine.double() - theirs.double()).cumsum(0)
        step = math.ceil(length / PIECES)
        places = [*range(step, len(running), step), len(running)]
        end = end_of(trained, length)
        whole = all(len(one) == length for one in own)
        return replace(
            self,
            inside=in_blocks([one[:trained] for one in own], [one[:trained] for one in usual]),
            beyond=in_blocks([mine], [theirs]),
            end=in_blocks([one[end:] for one in own], [one[end:] for one in usual]) if whole else None,
            trace=tuple((place, (running[place - 1] / place).item()) for place in places),
            tokens=sum(map(len, own)),
        )


@dataclass(frozen=True, kw_only=True)
class Finish:
    """What a race ends in.

    Args:
        choice: name of the winner.
        runner_up: of the one that would have been chosen without it.
        finalists: names, best first.
        courses: of all candidates, in the order in which they were entered.
    """

    choice: str
    runner_up: str
    finalists: tuple[str, ...]
    courses: tuple[Course, ...]

    def course(self, name: str) -> Course:
        """Of one candidate."""
        return next(one for one in self.courses if one.name == name)


def end_of(trained: int, length: int) -> int:
    """Where the end of a text begins, in tokens: the distances that come last.

    Args:
        trained: tokens of the window.
        length: of a whole text.
    """
    return max(trained, length - max(LEAST_END, length // ENDS))


def is_worse(difference: PairedDifference, chance: float, comparisons: int, *, least: float = 0.0) -> bool:
    """Whether a mean is above zero by more than chance allows.

    Args:
        difference: what is above zero where the first of the two is worse.
        chance: two-sided, of one wrong finding among all comparisons.
        comparisons: among which the chance is divided (Bonferroni).
        least: standard errors that it must exceed in any case.
    """
    needed = students_quantile(chance / max(1, comparisons), difference.units - 1)
    return difference.mean > max(least, needed) * difference.standard_error


def in_blocks(own: Sequence[Tensor], other: Sequence[Tensor]) -> PairedDifference:
    """The mean of ``own - other`` over the same tokens, where blocks of tokens count as independent."""
    return block_difference(own, other, most=BLOCKS)


@dataclass(eq=False, kw_only=True)
class Race:
    """One race; ``run`` it once.

    Args:
        entrants: the candidates; the first is the published YaRN, which reads whatever any other reads.
        losses: where they come from.
        sizes: how much is read.
        trained: tokens of the window.
        length: tokens of a whole text.
        runtimes: how many runtimes read a candidate, by its name.
    """

    entrants: Sequence[Entrant]
    losses: CandidateLosses
    sizes: Sizes
    trained: int
    length: int
    runtimes: Callable[[str], int] = lambda name: 0
    courses: dict[str, Course] = field(init=False)
    read: dict[str, list[Tensor]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.courses = {one.name: Course(name=one.name) for one in self.entrants}

    @property
    def usual(self) -> str:
        """The name of the published YaRN."""
        return self.entrants[0].name

    def run(self) -> Finish:
        """All three rungs and the decision."""
        going = self._rung_inside()
        going = self._rung_whole(going)
        order = self._rung_more(going)
        courses = tuple(self.courses.values())
        runner_up = order[1] if len(order) > 1 else self._best_dropped(order[0])
        return Finish(choice=order[0], runner_up=runner_up, finalists=tuple(order), courses=courses)

    def _best_dropped(self, choice: str) -> str:
        """Of those that read whole texts and were dropped, the one that came nearest."""
        others = {
            name: one.beyond.mean
            for name, one in self.courses.items()
            if name != choice and one.beyond is not None and name in self.read
        }
        return min(others, key=lambda name: others[name]) if others else ""

    # The first rung.

    def _rung_inside(self) -> list[str]:
        """Who goes on to whole texts, the published YaRN first."""
        judged = [one for one in self.entrants if one.is_judged_inside]
        found = {one.name: self.losses.inside(one.name) for one in judged}
        means = {name: own.double().mean().item() for name, own in found.items()}
        pairs = _pairs(len(judged))
        left: list[Entrant] = []
        for one in judged:
            if one.name != self.usual:
                self._note(one.name, inside=in_blocks([found[one.name]], [found[self.usual]]))
            rivals = [other for other in judged if other is not one and other.reaches(one)]
            best = min(rivals, key=lambda other: means[other.name], default=None)
            gap = None if best is None else in_blocks([found[one.name]], [found[best.name]])
            damage = self.courses[one.name].inside
            if best is not None and gap is not None and is_worse(gap, LOOKS[INSIDE], pairs):
                self._drop(one.name, "worse inside the window than one that reaches as far", best.name, gap)
            elif damage is not None and is_worse(damage, LOOKS[INSIDE], pairs):
                self._drop(one.name, "more damage inside the window than the published YaRN", self.usual, damage)
            else:
                left.append(one)
        going = self._promising(left, means)
        for one in left:
            if one.name not in going and one.name != self.usual:
                self._drop(one.name, "not among the most promising inside the window that the budget lasts for")
        return going

    def _promising(self, left: Sequence[Entrant], means: Mapping[str, float]) -> list[str]:
        """As many as may go on: those that few others beat inside with at least their reach, and what was not judged.

        Of equals, those nearest to the factor that was asked for come first. The two kinds take turns.
        """

        def place(one: Entrant) -> tuple[int, float]:
            beaten = [other for other in left if other.reaches(one) and means[other.name] < means[one.name]]
            return len(beaten), one.far

        judged = [one.name for one in sorted(left, key=place) if one.name != self.usual]
        others = [one.name for one in self.entrants if not one.is_judged_inside]
        turns = [name for pair in zip(judged, others, strict=False) for name in pair]
        rest = [*judged[len(others) :], *others[len(judged) :]]
        queue = [*turns, *rest]
        for name in queue[self.sizes.whole :]:
            if name in others:
                self._drop(name, "not read: the budget does not last for it")
        return [self.usual, *queue[: self.sizes.whole]]

    # The second rung.

    def _rung_whole(self, going: Sequence[str]) -> list[str]:
        """Who goes on to more texts; the published YaRN reads them anyway."""
        pairs = _pairs(len(going))
        for name in going:
            self._read_texts(name, range(self.sizes.first), WHOLE, pairs)
        done = [name for name in going if not self.courses[name].dropped]
        left = self._without_worse(done, WHOLE, pairs * PIECES * self.sizes.first)
        others = [name for name in left if name != self.usual]
        ranked = sorted(others, key=lambda name: (self._harms(name, len(others)), self._mean_beyond(name)))
        for name in ranked[self.sizes.finalists :]:
            self._drop(name, "not among the best few beyond the window that the budget lasts for")
        best = ranked[: self.sizes.finalists]
        return [*best, self.usual] if self.usual in left else best

    def _read_texts(self, name: str, texts: Sequence[int], rung: str, pairs: int) -> None:
        """Let a candidate read whole texts, until it is beyond rescue."""
        self._note(name, rung=rung)
        own = self.read.setdefault(name, [])
        looks = pairs * PIECES * len(texts)
        for text in texts:
            rival = functools.partial(self._out_of_reach, name, text, LOOKS[rung], looks)
            found = self.losses.whole(name, text, functools.partial(_is_none, rival))
            beyond_rescue = rival(found) if len(found) < self.length else None
            own.append(found)
            self._compare(name)
            if beyond_rescue is not None:
                place = f"stopped after {len(found):,} of {self.length:,} tokens, beyond rescue"
                self._drop(name, place, *beyond_rescue)
                return

    def _out_of_reach(
        self, name: str, text: int, chance: float, looks: int, seen: Tensor
    ) -> tuple[str, PairedDifference] | None:
        """The leader that a candidate cannot reach any more, and by how much; None while it can.

        It would be worse even if it read what is left of the text as well as the best of those that have read it.
        """
        if len(seen) <= self.trained or name == self.usual:
            return None
        others = [other for other, own in self.read.items() if other != name and self._has_read(own, text)]
        # Whoever does harm will not be chosen, so that nobody has to be as good.
        done = [other for other in others if not self._harms(other, len(others))]
        if not done:
            return None
        leader = min(done, key=lambda other: self._mean_until(other, text))
        read = [*self._beyond(name), seen[self.trained :]]
        same = [theirs[: len(own)] for own, theirs in zip(read, self._beyond(leader), strict=False)]
        gap = in_blocks(read, same)
        rest = [self.read[other][text][len(seen) :].double().sum().item() for other in done]
        spared = self.read[leader][text][len(seen) :].double().sum().item() - min(rest)
        final = replace(gap, mean=gap.mean - spared / gap.tokens)
        return (leader, gap) if is_worse(final, chance, looks, least=RESCUE) else None

    def _has_read(self, own: Sequence[Tensor], text: int) -> bool:
        return len(own) > text and all(len(losses) == self.length for losses in own[: text + 1])

    def _mean_until(self, name: str, text: int) -> float:
        return torch.cat([losses[self.trained :] for losses in self.read[name][: text + 1]]).double().mean().item()

    # The third rung.

    def _rung_more(self, going: Sequence[str]) -> list[str]:
        """The finalists in the order in which they would be chosen."""
        texts = range(self.sizes.first, self.sizes.texts)
        pairs = _pairs(len({self.usual, *going}))
        for name in dict.fromkeys([self.usual, *going]):
            self._read_texts(name, texts, MORE if name in going else WHOLE, pairs)
        done = [name for name in going if not self.courses[name].dropped]
        left = self._without_worse(done, MORE, pairs * PIECES * max(1, len(texts)))
        harmful = {name for name in left if self._harms(name, len(left))}
        if harmful == set(left):  # the published YaRN is what harm is measured by
            left = list(dict.fromkeys([*left, self.usual]))
        for name in left:
            self._note(name, keys=self.losses.keys(name))
        return chosen(
            {name: self._beyond(name) for name in left},
            {name: self.courses[name].keys for name in left},
            harmful,
            self.runtimes,
            chance=LOOKS[MORE],
        )

    def _harms(self, name: str, finalists: int) -> bool:
        """Whether the window or the end of the texts suffers more than under the published YaRN.

        A bound to keep, not a claim to make: whoever is wrongly left out has equals. So the chance is not divided where
        few tokens tell, at the end.
        """
        course = self.courses[name]
        damaged = course.inside is not None and is_worse(course.inside, CHANCE, finalists)
        fallen = course.end is not None and is_worse(course.end, CHANCE, 1)
        return fallen or (damaged and self._shows_damage(name))

    def _shows_damage(self, name: str) -> bool:
        return not next(one.dynamic for one in self.entrants if one.name == name)

    # What the rungs share.

    def _without_worse(self, names: Sequence[str], rung: str, comparisons: int) -> list[str]:
        """Those that are not shown to damage the window more than the published YaRN, or to be worse than the best."""
        left = []
        for name in names:
            damage = self.courses[name].inside
            if damage is not None and self._shows_damage(name) and is_worse(damage, LOOKS[rung], comparisons):
                self._drop(name, "more damage inside the window than the published YaRN", self.usual, damage)
            else:
                left.append(name)
        if not left:
            return []
        harmless = [name for name in left if not self._harms(name, len(left))]
        leader = min(harmless or left, key=self._mean_beyond)
        for name in [name for name in left if name != leader]:
            gap = in_blocks(self._beyond(name), self._beyond(leader))
            if is_worse(gap, LOOKS[rung], comparisons):
                self._drop(name, "worse beyond the window", leader, gap)
        return [name for name in left if not self.courses[name].dropped]

    def _beyond(self, name: str) -> list[Tensor]:
        return [losses[self.trained :] for losses in self.read[name]]

    def _mean_beyond(self, name: str) -> float:
        return torch.cat(self._beyond(name)).double().mean().item()

    def _compare(self, name: str) -> None:
        """Note how a candidate stands beside the published YaRN on all that it has read, chunk by chunk."""
        own, course = self.read[name], self.courses[name]
        if name == self.usual:
            self._note(name, tokens=sum(map(len, own)))
        else:
            self.courses[name] = course.beside(self.read[self.usual], own, trained=self.trained, length=self.length)

    def _note(self, name: str, **found: object) -> None:
        self.courses[name] = replace(self.courses[name], **found)  # type: ignore[arg-type]

    def _drop(self, name: str, why: str, by: str = "", worse_by: PairedDifference | None = None) -> None:
        self._note(name, dropped=why, by=by, worse_by=worse_by)


def _pairs(of: int) -> int:
    return of * (of - 1) // 2


def _is_none(rival: Callable[[Tensor], object], seen: Tensor) -> bool:
    return rival(seen) is None


def keys_lost(keys: Mapping[str, Sequence[float]]) -> dict[str, int]:
    """How many hidden keys each candidate has lost that another one reads.

    Args:
        keys: loss of each key, nats, by candidate; the same keys for all.
    """
    best = [min(column) for column in zip(*keys.values(), strict=True)]
    return {
        name: sum(least < READ < own and own - least > LOST for own, least in zip(losses, best, strict=True))
        for name, losses in keys.items()
    }


def chosen(
    beyond: Mapping[str, Sequence[Tensor]],
    keys: Mapping[str, Sequence[float]],
    harmful: Collection[str],
    runtimes: Callable[[str], int],
    *,
    chance: float,
) -> list[str]:
    """The finalists in the order in which they would be chosen.

    First those that keep the window, and hold to the end of the texts, as well as the published YaRN does; among them
    those that lose the fewest keys; among them the lowest loss beyond the window; among those as good as that, by less
    than ``AS_GOOD`` and not shown to be worse, the one that most runtimes read.

    Args:
        beyond: losses beyond the window, one tensor per text, by name.
        keys: loss of each hidden key, by name.
        harmful: names of those that do not.
        runtimes: how many read a candidate, by its name.
        chance: of calling one worse that is not.
    """
    lost = keys_lost(keys)
    left = dict(beyond)
    order: list[str] = []
    means = {name: torch.cat(list(own)).double().mean().item() for name, own in beyond.items()}
    while left:
        fewest = min((name in harmful, lost[name]) for name in left)
        pool = [name for name in left if (name in harmful, lost[name]) == fewest]
        best = min(pool, key=lambda name: means[name])
        as_good = [
            name
            for name in pool
            if means[name] - means[best] <= AS_GOOD
            and not is_worse(in_blocks(left[name], left[best]), chance, len(pool))
        ]
        order.append(max(as_good, key=lambda name: (runtimes(name), -means[name])))
        del left[order[-1]]
    return order
