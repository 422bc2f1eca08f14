"""``--search``: the frequencies themselves, by gradients on the frozen model at the full target length.

The rounds choose among formulas. A search goes on from several starts: downhill in what each frequency is divided by
and in the scale of cos and sin, on the texts to choose on. A fast frequency has many local minima, since its angle at
the end of a long text comes round again and again: the start decides which of them is found. So the frequencies as they
were trained are always one start, where every fast frequency is right.

Every step is a job of its own, kept with all that the next one needs: a kill loses one step. The result becomes the
choice only if it is better on texts that neither the rounds nor the search have read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from ctxext.choosing.budget import STEP_COST, SearchSizes
from ctxext.choosing.halving import READ, SEARCH, Course, Finish, is_worse, keys_lost
from ctxext.choosing.landscape import Example, Landscape, Vector, as_method, learns_scale
from ctxext.choosing.learned import turns
from ctxext.choosing.losses import DEPTHS, MeasuredLosses
from ctxext.choosing.texts import SplitTexts, TextStretch
from ctxext.choosing.verdict import by_document
from ctxext.core.rotary import RotarySite
from ctxext.errors import InvalidParameterError
from ctxext.evaluation.passkey import ANSWER_ROOM, build
from ctxext.files import digest
from ctxext.measuring.forward import Progress, pass_cost, ticking
from ctxext.measuring.provenance import from_json
from ctxext.measuring.readings import Reading
from ctxext.measuring.statistics import CHANCE, PairedDifference, document_difference
from ctxext.measuring.survey import Answer, Job
from ctxext.texts.haystack import Haystack

# What the digits of a hidden key add to the mean loss of all tokens, as a share of their own mean.
NEEDLE = 0.1
# Tokens between two places where a key may be hidden in a text.
BETWEEN = 32
# Adam's; how long it warms up; and which steps are averaged, from this share of them on.
BETAS, WARM, AVERAGED = (0.9, 0.95), 5, 0.75
# How far all steps together may move the logarithm of what the slowest frequency is divided by, and how far one may:
# several times the way from the trained frequencies to those divided by the factor.
TRAVEL, LONGEST = 4.0, 0.2
# The scale changes the loss as much as frequencies do that change ten times as much.
SCALE_STEP = 0.1
# Standard errors by which a result must be better than the choice of the rounds, or more where texts are few.
NEEDED = 2.0
# Name of the reading that steps are taken with.
PLAIN = "plain frequencies"


@dataclass(frozen=True, kw_only=True)
class State:
    """A place on the way down, and what Adam remembers.

    Args:
        at: distance from the start, in units of each unknown.
        loss: before the step moved, nats per token, hidden keys and penalty included.
    """

    at: tuple[float, ...]
    mean: tuple[float, ...]
    square: tuple[float, ...]
    loss: float = math.nan

    @classmethod
    def begin(cls, unknowns: int) -> State:
        """Return the state before the first step."""
        zeros = (0.0,) * unknowns
        return cls(at=zeros, mean=zeros, square=zeros)


@dataclass(frozen=True, eq=False, kw_only=True)
class Descent:
    """Adam on a vector, each unknown in units of its own: angles must not turn faster at the end of a text."""

    start: Vector
    units: Vector
    steps: int

    @classmethod
    def of(cls, start: Vector, site: RotarySite, *, length: int, steps: int, scale: bool) -> Descent:
        """Return the descent of a model's frequencies over texts of ``length`` tokens, with or without their scale."""
        last = torch.tensor([SCALE_STEP if scale else 0.0], dtype=torch.float64)
        return cls(start=start, units=torch.cat([1 / (1 + turns(site, length)), last]), steps=steps)

    def vector(self, at: Sequence[float]) -> Vector:
        """Return the vector of a place."""
        return self.start + self.units * torch.tensor(at, dtype=torch.float64)

    def rate(self, step: int) -> float:
        """Return the length of a step: it grows, and falls to zero at the end."""
        longest = min(LONGEST, 2 * TRAVEL / self.steps)
        return longest * min(1.0, (step + 1) / WARM) * 0.5 * (1 + math.cos(math.pi * step / self.steps))

    def after(self, state: State, step: int, loss: float, gradient: Vector) -> State:
        """Return the state after a step, whose number begins at 0, from the loss and the gradient before it."""
        with torch.inference_mode(False), torch.no_grad():
            at, mean, square = (
                torch.tensor(part, dtype=torch.float64) for part in (state.at, state.mean, state.square)
            )
            at.grad = gradient * self.units
            adam = torch.optim.Adam([at], lr=self.rate(step), betas=BETAS)
            adam.state[at] = {"step": torch.tensor(float(step)), "exp_avg": mean, "exp_avg_sq": square}
            adam.step()
        return State(at=tuple(at.tolist()), mean=tuple(mean.tolist()), square=tuple(square.tolist()), loss=loss)

    def result(self, states: Sequence[State]) -> Vector:
        """Return the mean of the last quarter: single steps follow single texts."""
        last = states[math.floor(AVERAGED * len(states)) :]
        return self.vector(torch.tensor([state.at for state in last], dtype=torch.float64).mean(0).tolist())


def hidden_key(tokenizer: Any, text: TextStretch, *, length: int, depth: float, seed: int) -> Example:
    """Return a text with a key hidden at a depth from 0 to 1 and asked for at its end.

    The text has at least ``length`` tokens, the example as many; its digits count as ``NEEDLE`` says.
    """
    own = text.text.input_ids[0, text.text.prefix :].tolist()
    pieces = tuple(tuple(own[at : at + BETWEEN]) for at in range(0, len(own), BETWEEN))
    haystack = Haystack(text.text.name, pieces, repeated=False)
    passkey = build(tokenizer, length=length - ANSWER_ROOM, depth=depth, seed=seed, haystack=haystack)
    example = Example.mean(torch.cat([passkey.prompt, passkey.answer])[None])
    weights = example.weights.clone()
    weights[:, -len(passkey.answer) :] += NEEDLE / len(passkey.answer)
    return replace(example, weights=weights)


@dataclass(frozen=True, kw_only=True)
class SearchedStart:
    """The result of one start.

    Args:
        losses: of every step, nats per token, on the texts of that step.
        beyond: mean loss of the result beyond the window, on whole texts that were chosen on.
    """

    name: str
    losses: tuple[float, ...]
    method: dict[str, Any]
    beyond: float


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The result of a search, and whether it was taken.

    Args:
        rival: Name of the rounds' choice, which the result of the best start had to beat.
        gain: beyond the window, its loss minus the rival's, on texts that neither was chosen on.
        damage: inside the window, its loss minus that of the published YaRN, on the same texts.
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
        """True where the result became the choice."""
        return not self.why_not

    @property
    def record(self) -> dict[str, Any]:
        """The search as a saved config keeps it."""
        return {
            "accepted": self.accepted,
            "why_not": self.why_not,
            "starts": [start.name for start in self.starts],
            "steps": self.sizes.steps,
            "texts_per_step": self.sizes.rows,
            "keys_hidden": self.needles,
            "gain": -self.gain.mean,
            "gain_se": self.gain.standard_error,
        }


@dataclass(frozen=True, eq=False, kw_only=True)
class StepJob(Job):
    """One step of a descent, whose number begins at 0."""

    search: Search
    descent: Descent
    before: State
    step: int

    def ask(self, model: nn.Module, progress: Progress) -> Answer:
        """Return the state after the step."""
        examples = self._examples()
        watched = ticking(model, self.name, self.cost / len(examples), progress)
        with watched, Landscape(model, self.search.sites, self.search.factor) as landscape:
            loss, gradient = landscape.gradient(self.descent.vector(self.before.at), examples)
        return Answer({"state": vars(self.descent.after(self.before, self.step, loss, gradient))})

    def _examples(self) -> list[Example]:
        """Return the texts of the step: they take turns, and are few enough to be read together."""
        losses, texts, rows = self.search.losses, self.search.split.choosing, self.search.sizes.rows
        taken = [(turn, texts[turn % len(texts)]) for turn in range(self.step * rows, (self.step + 1) * rows)]
        if not self.search.needles:
            return [Example.mean(torch.cat([text.text.input_ids for _, text in taken]))]
        return [
            hidden_key(
                losses.survey.checkpoint.tokenizer,
                text,
                length=losses.costs.length,
                depth=DEPTHS[turn % len(DEPTHS)],
                seed=10_000 + 1_000 * losses.seed + turn,  # not the seed of the keys that candidates are judged by
            )
            for turn, text in taken
        ]


@dataclass(eq=False, kw_only=True)
class Search:
    """A search of frequencies; ``run`` it once.

    The ``sites`` are the model's frequencies as they were trained, and ``plain`` reads with them as extended to the
    target. With ``keys``, keys are hidden in the texts, where the model can read one at all.
    """

    losses: MeasuredLosses
    sites: tuple[RotarySite, ...]
    plain: Reading
    split: SplitTexts
    sizes: SearchSizes
    keys: bool

    def __post_init__(self) -> None:
        self.losses.add(replace(self.plain, name=PLAIN))

    @cached_property
    def needles(self) -> bool:
        """True where keys are hidden: what a model cannot read inside its window, no rotation lets it read beyond."""
        loss = self.losses.key_inside() if self.keys else None
        return loss is not None and loss < READ

    @property
    def factor(self) -> float:
        """Target length over trained length."""
        return self.losses.costs.length / self.losses.costs.trained

    def run(self, starts: Mapping[str, Vector], finish: Finish, *, label: str) -> tuple[SearchResult, Finish, Reading]:
        """Search from each start, and compare the best result with the choice of the rounds, which ``label`` names.

        Returns:
            The result; the finish with it, as its choice where it was taken; and its reading.

        Raises:
            CtxextError: as the passes do; every finished step is kept.
        """
        descents = sorted((self._descend(*start) for start in starts.items()), key=lambda start: start[0].beyond)
        results, readings = zip(*descents, strict=True)
        result, finish = self._judged(results, finish, name=readings[0].name, label=label)
        return result, finish, readings[0]

    def _descend(self, name: str, start: Vector) -> tuple[SearchedStart, Reading]:
        """Return the result of one start, and its reading."""
        losses, steps = self.losses, self.sizes.steps
        scale = learns_scale(losses.readings.model)
        descent = Descent.of(start, self.sites[0], length=losses.costs.length, steps=steps, scale=scale)
        plan = [
            *(start.tolist(), descent.units.tolist(), steps, self.sizes.rows, self.needles),
            [text.text.sha256 for text in self.split.choosing],
            *(losses.seed, self.factor, TRAVEL, LONGEST, NEEDLE),
        ]
        plan_digest = digest(json.dumps(plan))
        states = [State.begin(len(start))]
        for step in range(steps):
            job = StepJob(
                key=losses.readings.key([PLAIN, plan_digest], step=step),
                cost=self.sizes.rows * STEP_COST * pass_cost(losses.costs.length, losses.costs.turning_point),
                reader=losses.readers[PLAIN],
                name=f"searching from {name}, step {step + 1} of {steps}",
                search=self,
                descent=descent,
                before=states[-1],
                step=step,
            )
            states.append(from_json(State, losses.answers([job])[0]["state"]))
        method = as_method(descent.result(states[1:]), self.factor)
        readings, refusals = losses.readings.find([method])
        if refusals:
            raise InvalidParameterError(f"The result of the search cannot be stored: {refusals[0].reason}")
        label = f"searched from {name}"
        reading = replace(readings[-1], name=label, label=label)
        losses.add(reading)
        values = tuple(state.loss for state in states[1:])
        beyond = losses.beyond(label)
        return SearchedStart(name=name, losses=values, method=method.to_dict(), beyond=beyond), reading

    def _judged(
        self, starts: tuple[SearchedStart, ...], finish: Finish, *, name: str, label: str
    ) -> tuple[SearchResult, Finish]:
        """Compare the best result, called ``name``, with the choice of the rounds on texts kept back for that."""
        losses, rival, texts = self.losses, finish.choice, self.split.accepting[: self.sizes.accepting]
        usual, trained = losses.entered[0].name, losses.costs.trained
        read = losses.texts(list(dict.fromkeys([name, rival, usual])), texts)
        sides = [[text[trained:] for text in read[side]] for side in (name, rival)]
        gain = document_difference(*(by_document(side, [text.document for text in texts]) for side in sides))
        keys = losses.keys(list(dict.fromkeys([name, rival])))
        course = Course(name=name, round=SEARCH, keys=keys[name])
        course = course.beside(read[usual], read[name], trained=trained, length=losses.costs.length)
        damage, end = course.inside, course.end
        assert damage is not None
        assert end is not None
        reason = why_not(gain, damage, end, keys, name=name, label=label)
        if reason:
            course = replace(course, dropped=reason, by=rival)
        result = SearchResult(
            starts=starts,
            rival=rival,
            why_not=reason,
            gain=gain,
            damage=damage,
            texts=tuple(text.text.name for text in texts),
            searched_on=tuple(text.text.name for text in self.split.choosing),
            needles=self.needles,
            sizes=self.sizes,
        )
        finish = replace(finish, courses=(*finish.courses, course))
        if result.accepted:
            finish = replace(finish, choice=name, runner_up=rival, finalists=(name, *finish.finalists))
        return result, finish


def why_not(
    gain: PairedDifference,
    damage: PairedDifference,
    end: PairedDifference,
    keys: Mapping[str, Sequence[float]],
    *,
    name: str,
    label: str,
) -> str:
    """Return why the result ``name`` of a search is not taken; empty where it is.

    Its loss is compared beyond the window with the rounds' choice, ``label``; inside it and at the end of the texts
    with the published YaRN. The losses of hidden keys are of both.
    """
    if not gain.mean < -max(NEEDED, gain.errors_needed()) * gain.standard_error:
        return f"not better than {label} by two standard errors: {gain}"
    if is_worse(damage, CHANCE, 1):
        return f"more damage inside the window than YaRN as published: {damage}"
    if is_worse(end, CHANCE, 1):
        return f"worse at the end of the texts than YaRN as published: {end}"
    lost = keys_lost(keys)[name]
    if lost:
        return f"{lost} of {len(keys[name])} hidden keys lost that {label} reads"
    return ""
