"""Successive halving: which candidates read further, and which of the last ones is chosen. Pure decisions over losses.

Where the losses come from, a model or a file, is not known here: see ``CandidateLosses``. There are three rounds.

1. **Inside.** Every candidate reads the beginning of each text, which is cheap. It is dropped only if another one that
   reaches at least as far reads better there. The most promising of the rest go on.
2. **Whole.** They read whole texts. A candidate is stopped at a chunk of a text as soon as it is beyond rescue: it
   would be worse even if it read the rest as well as the best one did.
3. **More.** The best few read more texts, and are asked for keys hidden in them.

A candidate that stretches too little reads well until the farthest distances come, and then falls apart: a mean hides
that. So the last part of the texts (``end_of``) is a separate bound, as the trained window is.

**What may be said.** Every difference is paired by token. Losses are looked at more than once, and for many candidates,
so that some differences will look real by chance. The chance of 5 percent is therefore shared out in advance, a part to
each round (``LOOKS``) and the rest to the verdict on texts that were never read. Inside a round it is divided again
among all pairs of candidates and all chunks at which one may be stopped. A candidate that is dropped as *worse* is
worse by more than that allows; for one that is not among the best few, the budget only does not last.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from ctxext.choosing.candidates import CandidateReach
from ctxext.errors import InvalidParameterError
from ctxext.measuring.forward import pass_cost
from ctxext.measuring.statistics import CHANCE, PairedDifference, block_difference, students_quantile
from ctxext.measuring.truncation import tail_windows
from ctxext.quantities import duration

INSIDE, WHOLE, MORE = "inside", "whole", "more"
STOPPED = "stopped"
# How much of the chance of 5 percent each round may spend. The remaining 0.025 are for a verdict that wrongly calls the
# choice better than another: half of the 5 percent, two-sided, that such a verdict has.
LOOKS = {INSIDE: 0.005, WHOLE: 0.01, MORE: 0.01}
# Chunks of a text, at whose ends a candidate may be stopped; and by how many standard errors at least it must be worse.
PIECES, RESCUE = 8, 4.0
# Blocks of tokens that count as independent: more than for a verdict, since chance is divided among many comparisons,
# and Student's quantile for a small chance grows fast where there are few.
BLOCKS = 64
# The end of a text, where a candidate that stretches too little falls apart: a part of it, and tokens at the least.
ENDS, LEAST_END = 32, 16
# Nats per token within which two finalists are as good: then the one that more runtimes load is chosen.
AS_GOOD = 0.01
# A key whose tokens cost less than ln 2 each is read at better than even odds; one that costs a nat more is lost.
READ, LOST = math.log(2), 1.0
# Tokens beyond the window that tell two candidates apart which differ by 0.02 nats.
ENOUGH = 4096
# Tokens at which attention costs as much as the rest where it seems to cost nothing.
ALL_LINEAR = 10**12
# From the largest sizes to the smallest: candidates that read whole texts, finalists, texts to choose on and to judge
# on (in multiples of what gives enough tokens), hidden keys. Texts of the verdict are given up last: one alone says
# nothing of others like it.
LADDER = (
    (10, 3, 3, 5, 3),
    (8, 3, 3, 5, 3),
    (8, 3, 2, 5, 2),
    (6, 3, 2, 5, 2),
    (5, 2, 2, 5, 1),
    (4, 2, 1, 5, 1),
    (3, 2, 1, 5, 1),
    (3, 2, 1, 3, 1),
    (3, 2, 1, 2, 1),
    (3, 2, 1, 1, 1),
    (2, 1, 1, 1, 0),
)


Stop = Callable[[Tensor], object]
"""Function of all losses so far, which returns something where no more are needed."""


@runtime_checkable
class CandidateLosses(Protocol):
    """Losses of candidates by their names, in nats per token."""

    def inside(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return the losses, [tokens], at the beginnings of the texts of the second round."""

    def whole(self, name: str, text: int, stop: Stop) -> Float[Tensor, " read"]:
        """Return the losses on a whole text, or until ``stop``, given all losses so far, returns something."""

    def keys(self, names: Sequence[str]) -> dict[str, tuple[float, ...]]:
        """Return the loss of each hidden key."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Amounts that are read in the rounds and for the verdict.

    Args:
        texts: texts to choose on; the second round reads the first ``first`` of them.
    """

    whole: int
    finalists: int
    texts: int
    first: int
    held_out: int
    keys: int


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs of a choice, in passes over the whole target, and the sizes that a budget lasts for.

    There are ``choosing`` texts to choose on, and ``held_out`` texts to judge on. For the verdict, the choice and the
    runner-up read the window alone too where they are ``dynamic`` candidates.
    """

    trained: int
    length: int
    judged: int
    others: int
    windows: tuple[int, ...]
    turning_point: int
    choosing: int
    held_out: int
    keys: bool
    dynamic: int = 0

    def of(self, tokens: int) -> float:
        """Return the cost of a pass over so many tokens."""
        return pass_cost(tokens, self.turning_point) / pass_cost(self.length, self.turning_point)

    @property
    def prefix(self) -> int:
        """Tokens of a text that the first round reads: a quarter of the target, inside the window."""
        return min(self.trained, self.length // 4)

    @property
    def stretches(self) -> int:
        """Number of texts that hold enough tokens beyond the window."""
        return math.ceil(ENOUGH / (self.length - self.trained))

    @property
    def end(self) -> int:
        """Start of the end of a text, at which truncation is measured: a quarter of the window, beyond it."""
        return max(self.trained, self.length - max(1, self.trained // 4))

    def timed(self, inside: float, whole: float) -> Costs:
        """Return the costs by the clock: attention may be slower than its operations say.

        A pass over the part of a text that the first round reads takes ``inside`` seconds, one over the target
        ``whole``.
        """
        # inside / whole = short (1 + short / t) / (length (1 + length / t)), solved for the turning point t.
        short, length, ratio = self.prefix, self.length, inside / whole
        linear, quadratic = short - ratio * length, ratio * length**2 - short**2
        if linear <= 0:  # dearer than a share of the tokens: all linear, and calls cost something
            return replace(self, turning_point=ALL_LINEAR)
        return replace(self, turning_point=max(1, round(quadratic / linear)))

    def most(self, sizes: Sizes) -> float:
        """Return the cost of all rounds and the verdict, at most."""
        inside = self.judged * sizes.first * self.of(self.prefix)
        whole = (min(sizes.whole, self.judged + self.others - 1) + 1) * sizes.first
        more = (sizes.finalists + 1) * (sizes.texts - sizes.first + sizes.keys)
        tails = [tail_windows(window, start=self.end, positions=self.length) for window in self.windows]
        truncations = sum(self.of(each.positions) for each in itertools.chain.from_iterable(tails))
        # A reading inside the window, one of chunks that are chosen once, and one more of dynamic methods.
        window = (2 + min(self.dynamic, 2)) * self.of(self.trained)
        return inside + whole + more + sizes.held_out * (3 + window + truncations)

    def sizes(self, allowed: float | None, seconds: float | None = None, doubt: float = 1) -> Sizes:
        """Return the largest sizes that a budget lasts for.

        Args:
            allowed: passes; None for no limit.
            seconds: time that as many passes take here, for the message; None where nothing was timed.
            doubt: Factor by which the budget may last longer than ``allowed`` says.

        Raises:
            InvalidParameterError: not even the smallest sizes fit.
        """
        ladder = self._ladder()
        if allowed is None:
            return ladder[0]
        for sizes in ladder:
            if self.most(sizes) <= allowed * doubt:
                return sizes
        least = self.most(ladder[-1])
        time = "" if seconds is None else f", some {duration(seconds * least / allowed)} here"
        raise InvalidParameterError(
            f"The budget is too small: it comes to {allowed:.1f} passes over {self.length:,} tokens. Choosing among "
            f"{self.judged + self.others} candidates takes {least:.1f} at least{time}. Allow more (--budget), or "
            f"choose for a smaller target."
        )

    def _ladder(self) -> list[Sizes]:
        """Return all sizes, from the largest to the smallest."""
        first = self.stretches
        start = min(first, self.choosing)
        return [
            Sizes(
                whole=whole,
                finalists=finalists,
                texts=min(max(start, texts * first), self.choosing),
                first=start,
                held_out=min(judged * first, self.held_out),
                keys=keys if self.keys else 0,
            )
            for whole, finalists, texts, judged, keys in LADDER
        ]


@dataclass(frozen=True, kw_only=True)
class Course:
    """Course of one candidate through the rounds.

    Args:
        round: last round of the candidate; ``rung`` in JSON.
        dropped: reason for which it came no further, in words; empty for a finalist.
        by: name of the candidate that it was compared with there.
        inside: loss inside the window minus the published YaRN's; None where it was not read there.
        beyond: the same difference beyond the window, on all tokens that the candidate has read.
        end: the same difference at the end of the texts, see ``end_of``; None where it has not read them whole.
        worse_by: loss minus the loss of ``by``, for which it was dropped; None where it is not shown to be worse.
        keys: loss of each hidden key, nats; empty for a candidate that reads none.
        trace: tokens read beyond the window, and the mean difference to the published YaRN until there.
    """

    name: str
    round: str = INSIDE
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
        """Return the course with its differences to the published YaRN.

        Losses are one tensor [tokens] per text; the candidate's ``own`` end where it was stopped.
        """
        usual = [theirs[: len(mine)] for mine, theirs in zip(own, usual, strict=False)]
        mine, theirs = (torch.cat([losses[trained:] for losses in side]) for side in (own, usual))
        running = (mine.double() - theirs.double()).cumsum(0)
        step = math.ceil(length / PIECES)
        places = [*range(step, len(running), step), len(running)]
        end = end_of(trained, length)
        whole = all(len(losses) == length for losses in own)
        return replace(
            self,
            inside=in_blocks([losses[:trained] for losses in own], [losses[:trained] for losses in usual]),
            beyond=in_blocks([mine], [theirs]),
            end=in_blocks([losses[end:] for losses in own], [losses[end:] for losses in usual]) if whole else None,
            trace=tuple((place, (running[place - 1] / place).item()) for place in places),
            tokens=sum(map(len, own)),
        )

    @property
    def fate(self) -> str:
        """The end of the course, in a word or two."""
        if not self.dropped:
            return "finalist"
        if self.worse_by is None:
            return "left behind"
        return STOPPED if self.dropped.startswith(STOPPED) else "worse on these texts"

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {"rung" if name == "round" else name: value for name, value in asdict(self).items()}


@dataclass(frozen=True, kw_only=True)
class Finish:
    """The end of the rounds.

    Args:
        runner_up: name of the candidate that would have been chosen without the choice.
    """

    choice: str
    runner_up: str
    finalists: tuple[str, ...]
    courses: tuple[Course, ...]

    def course(self, name: str) -> Course:
        """Return the course of one candidate."""
        return next(course for course in self.courses if course.name == name)


def end_of(trained: int, length: int) -> int:
    """Return where the end of a text begins, in tokens: the distances that come last."""
    return max(trained, length - max(LEAST_END, length // ENDS))


def is_worse(difference: PairedDifference, chance: float, comparisons: int, *, least: float = 0.0) -> bool:
    """Return whether a mean is above zero by more than chance allows.

    Args:
        difference: mean above zero where the first of the two is worse.
        chance: two-sided chance of one wrong finding among all comparisons.
        comparisons: number of comparisons that share the chance (Bonferroni).
        least: standard errors that the mean must exceed in any case.
    """
    needed = students_quantile(chance / max(1, comparisons), difference.units - 1)
    return difference.mean > max(least, needed) * difference.standard_error


def in_blocks(own: Sequence[Tensor], other: Sequence[Tensor]) -> PairedDifference:
    """Return the mean of ``own - other`` over the same tokens, where blocks of tokens count as independent."""
    return block_difference(own, other, most=BLOCKS)


@dataclass(eq=False, kw_only=True)
class Halving:
    """The rounds of one choice; ``run`` them once.

    Args:
        reaches: reach of each candidate, by name; the first is the published YaRN, which reads what any other reads.
    """

    reaches: Mapping[str, CandidateReach]
    losses: CandidateLosses
    sizes: Sizes
    trained: int
    length: int
    runtimes: Callable[[str], int] = lambda name: 0
    courses: dict[str, Course] = field(init=False)
    read: dict[str, list[Tensor]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.courses = {name: Course(name=name) for name in self.reaches}

    @property
    def usual(self) -> str:
        """The name of the published YaRN."""
        return next(iter(self.reaches))

    def run(self) -> Finish:
        """Run all three rounds and decide."""
        order = self._round_more(self._round_whole(self._round_inside()))
        runner_up = order[1] if len(order) > 1 else self._best_dropped(order[0])
        courses = tuple(self.courses.values())
        return Finish(choice=order[0], runner_up=runner_up, finalists=tuple(order), courses=courses)

    def _best_dropped(self, choice: str) -> str:
        """Return the best of the candidates that read whole texts and were dropped; empty for none."""
        means = {
            name: course.beyond.mean
            for name, course in self.courses.items()
            if name != choice and course.beyond is not None and name in self.read
        }
        return min(means, key=means.__getitem__, default="")

    # Round 1.

    def _round_inside(self) -> list[str]:
        """Return the candidates that go on to whole texts, the published YaRN first."""
        judged = {name: reach for name, reach in self.reaches.items() if reach.is_judged_inside}
        losses = self.losses.inside(list(judged))
        means = {name: own.double().mean().item() for name, own in losses.items()}
        pairs = math.comb(len(judged), 2)
        left: list[str] = []
        for name, reach in judged.items():
            damage = None
            if name != self.usual:
                damage = in_blocks([losses[name]], [losses[self.usual]])
                self._note(name, inside=damage)
            rivals = [other for other in judged if other != name and judged[other].covers(reach)]
            best = min(rivals, key=means.__getitem__, default="")
            gap = in_blocks([losses[name]], [losses[best]]) if best else None
            if gap is not None and is_worse(gap, LOOKS[INSIDE], pairs):
                self._drop(name, "worse inside the window than one that reaches as far", best, gap)
            elif damage is not None and is_worse(damage, LOOKS[INSIDE], pairs):
                self._drop(name, "more damage inside the window than the published YaRN", self.usual, damage)
            else:
                left.append(name)
        going = self._promising(left, means)
        for name in left:
            if name not in going and name != self.usual:
                self._drop(name, "not among the most promising inside the window that the budget lasts for")
        return going

    def _promising(self, left: Sequence[str], means: Mapping[str, float]) -> list[str]:
        """Return as many candidates as may go on, the published YaRN first.

        Candidates that were read inside are sorted by how many others with at least their reach read better there, the
        fewest first; equals by how near they are to the factor asked for. They take turns with the candidates that
        cannot be judged inside.
        """

        def place(name: str) -> tuple[int, float]:
            reach = self.reaches[name]
            beaten = [other for other in left if self.reaches[other].covers(reach) and means[other] < means[name]]
            return len(beaten), reach.far

        judged = [name for name in sorted(left, key=place) if name != self.usual]
        others = [name for name, reach in self.reaches.items() if not reach.is_judged_inside]
        queue = [name for pair in itertools.zip_longest(judged, others) for name in pair if name is not None]
        for name in queue[self.sizes.whole :]:
            if name in others:
                self._drop(name, "not read: the budget does not last for it")
        return [self.usual, *queue[: self.sizes.whole]]

    # Round 2.

    def _round_whole(self, going: Sequence[str]) -> list[str]:
        """Return the candidates that go on to more texts; the published YaRN reads them anyway."""
        pairs = math.comb(len(going), 2)
        for name in going:
            self._read_texts(name, range(self.sizes.first), WHOLE, pairs)
        left = self._without_worse(going, WHOLE, pairs * PIECES * self.sizes.first)
        others = [name for name in left if name != self.usual]
        ranked = sorted(others, key=lambda name: (self._harms(name, len(others)), _mean(self._beyond(name))))
        for name in ranked[self.sizes.finalists :]:
            self._drop(name, "not among the best few beyond the window that the budget lasts for")
        best = ranked[: self.sizes.finalists]
        return [*best, self.usual] if self.usual in left else best

    def _read_texts(self, name: str, texts: Sequence[int], at: str, pairs: int) -> None:
        """Let a candidate read whole texts, until it is beyond rescue."""
        self._note(name, round=at)
        own = self.read.setdefault(name, [])
        looks = pairs * PIECES * len(texts)
        for text in texts:
            beyond_rescue = functools.partial(self._beyond_rescue, name, text, LOOKS[at], looks)
            losses = self.losses.whole(name, text, beyond_rescue)
            leader = beyond_rescue(losses) if len(losses) < self.length else None
            own.append(losses)
            if name == self.usual:
                self._note(name, tokens=sum(map(len, own)))
            else:
                self.courses[name] = self.courses[name].beside(
                    self.read[self.usual], own, trained=self.trained, length=self.length
                )
            if leader is not None:
                place = f"{STOPPED} after {len(losses):,} of {self.length:,} tokens, beyond rescue"
                self._drop(name, place, *leader)
                return

    def _beyond_rescue(
        self, name: str, text: int, chance: float, looks: int, seen: Tensor
    ) -> tuple[str, PairedDifference] | None:
        """Return the leader that a candidate cannot reach any more, and by how much; None while it can.

        A candidate is beyond rescue if it would be worse even if it read the rest of the text as well as the best
        candidate that has read it.
        """
        if len(seen) <= self.trained + 1 or name == self.usual:  # a single token beyond has no standard error
            return None
        others = [
            other
            for other, own in self.read.items()
            if other != name and len(own) > text and all(len(losses) == self.length for losses in own[: text + 1])
        ]
        # A candidate that does harm will not be chosen, so that no other has to be as good.
        done = [other for other in others if not self._harms(other, len(others))]
        if not done:
            return None
        leader = min(done, key=lambda other: _mean(self._beyond(other)[: text + 1]))
        read = [*self._beyond(name), seen[self.trained :]]
        same = [theirs[: len(own)] for own, theirs in zip(read, self._beyond(leader), strict=False)]
        gap = in_blocks(read, same)
        rest = {other: self.read[other][text][len(seen) :].double().sum().item() for other in done}
        spared = rest[leader] - min(rest.values())
        final = replace(gap, mean=gap.mean - spared / gap.tokens)
        return (leader, gap) if is_worse(final, chance, looks, least=RESCUE) else None

    # Round 3.

    def _round_more(self, going: Sequence[str]) -> list[str]:
        """Return the finalists in the order in which they would be chosen."""
        texts = range(self.sizes.first, self.sizes.texts)
        names = list(dict.fromkeys([self.usual, *going]))
        pairs = math.comb(len(names), 2)
        for name in names:
            self._read_texts(name, texts, MORE if name in going else WHOLE, pairs)
        left = self._without_worse(going, MORE, pairs * PIECES * max(1, len(texts)))
        harmful = {name for name in left if self._harms(name, len(left))}
        if harmful == set(left):  # the published YaRN is what harm is measured by
            left = list(dict.fromkeys([*left, self.usual]))
        keys = self.losses.keys(left)
        for name in left:
            self._note(name, keys=keys[name])
        beyond = {name: self._beyond(name) for name in left}
        return chosen(beyond, keys, harmful, self.runtimes, chance=LOOKS[MORE])

    # What the rounds share.

    def _harms(self, name: str, finalists: int) -> bool:
        """Return whether the window or the end of the texts suffers more than under the published YaRN.

        This is a bound to keep and not a claim to make: a candidate that is wrongly left out has equals. So the chance
        is not divided at the end, where few tokens count.
        """
        course = self.courses[name]
        damaged = course.inside is not None and is_worse(course.inside, CHANCE, finalists)
        fallen = course.end is not None and is_worse(course.end, CHANCE, 1)
        return fallen or (damaged and not self.reaches[name].dynamic)

    def _without_worse(self, names: Sequence[str], at: str, comparisons: int) -> list[str]:
        """Drop candidates shown to damage the window more than the published YaRN, or to be worse than the best."""
        left = []
        for name in (name for name in names if not self.courses[name].dropped):
            damage = self.courses[name].inside
            if damage is None or self.reaches[name].dynamic or not is_worse(damage, LOOKS[at], comparisons):
                left.append(name)
            else:
                self._drop(name, "more damage inside the window than the published YaRN", self.usual, damage)
        harmless = [name for name in left if not self._harms(name, len(left))]
        leader = min(harmless or left, key=lambda name: _mean(self._beyond(name)), default="")
        for name in (name for name in left if name != leader):
            gap = in_blocks(self._beyond(name), self._beyond(leader))
            if is_worse(gap, LOOKS[at], comparisons):
                self._drop(name, "worse beyond the window", leader, gap)
        return [name for name in left if not self.courses[name].dropped]

    def _beyond(self, name: str) -> list[Tensor]:
        return [losses[self.trained :] for losses in self.read[name]]

    def _note(self, name: str, **noted: Any) -> None:
        self.courses[name] = replace(self.courses[name], **noted)

    def _drop(self, name: str, why: str, by: str = "", worse_by: PairedDifference | None = None) -> None:
        self._note(name, dropped=why, by=by, worse_by=worse_by)


def _mean(losses: Sequence[Tensor]) -> float:
    return torch.cat(list(losses)).double().mean().item()


def keys_lost(keys: Mapping[str, Sequence[float]]) -> dict[str, int]:
    """Count the hidden keys that each candidate has lost and that another one reads, by the losses of the keys."""
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
    """Return the finalists in the order in which they would be chosen.

    Finalists that keep the window, and hold to the end of the texts, as well as the published YaRN come first. Among
    them the fewest lost keys decide, and then the lowest loss beyond the window. Among finalists within ``AS_GOOD`` of
    that loss, and not shown to be worse, the one that most runtimes load comes first.
    """
    lost = keys_lost(keys)
    left = dict(beyond)
    order: list[str] = []
    means = {name: _mean(own) for name, own in beyond.items()}
    while left:
        fewest = min((name in harmful, lost[name]) for name in left)
        pool = [name for name in left if (name in harmful, lost[name]) == fewest]
        best = min(pool, key=means.__getitem__)
        as_good = [
            name
            for name in pool
            if means[name] - means[best] <= AS_GOOD
            and not is_worse(in_blocks(left[name], left[best]), chance, len(pool))
        ]
        order.append(max(as_good, key=lambda name: (runtimes(name), -means[name])))
        del left[order[-1]]
    return order
