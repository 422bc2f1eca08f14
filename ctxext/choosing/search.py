"""``--search``: the frequencies themselves, by gradients on the frozen model at the full target length.

A race chooses among formulas. From several starts this walks on: downhill in what each frequency is divided by and in
the scale of cos and sin, on the texts to choose on. A fast frequency can be wrong in many ways that are all worse than
their neighbours, since its angle at the end of a long text comes round again and again: the start decides which of them
is found. So the frequencies as they were trained are always one start, from where every fast frequency is right.

Every step is a cell of its own, kept with all that the next one needs: a kill loses one step.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from ctxext.choosing.budget import STEP_COST, SearchSizes
from ctxext.choosing.landscape import Example, Landscape, Vector, as_method, learns_scale
from ctxext.choosing.losses import DEPTHS, MeasuredLosses, RaceCell, StayingReader
from ctxext.choosing.race import READ
from ctxext.choosing.texts import TextStretch
from ctxext.errors import InvalidParameterError
from ctxext.evaluation.forward import Progress, pass_cost, ticking
from ctxext.evaluation.passkey import ANSWER_ROOM, build
from ctxext.evaluation.provenance import from_json
from ctxext.evaluation.readings import Reading
from ctxext.evaluation.survey import Answer
from ctxext.methods.longrope import LongRoPE
from ctxext.surgery.learned import turns
from ctxext.surgery.rotary import RotarySite
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


@dataclass(frozen=True, kw_only=True)
class State:
    """Where a descent is after a step, and what Adam remembers.

    Args:
        at: how far it has come from its start, in units of each unknown's step.
        mean: of gradients, running.
        square: of their squares, running.
        loss: that the step found before it moved: nats per token, needles and penalty included.
    """

    at: tuple[float, ...]
    mean: tuple[float, ...]
    square: tuple[float, ...]
    loss: float = math.nan

    @classmethod
    def begin(cls, unknowns: int) -> State:
        """Before the first step."""
        zeros = (0.0,) * unknowns
        return cls(at=zeros, mean=zeros, square=zeros)


@dataclass(frozen=True, eq=False, kw_only=True)
class Descent:
    """Adam on a vector, each unknown in units of its own: angles must not turn faster at the end of a text.

    Args:
        start: where it begins.
        units: of each unknown.
        steps: in all.
    """

    start: Vector
    units: Vector
    steps: int

    @classmethod
    def of(cls, start: Vector, site: RotarySite, *, length: int, steps: int, scale: bool) -> Descent:
        """The descent of a model's frequencies.

        Args:
            start: logarithms of divisors and of the scale.
            site: the frequencies.
            length: of the texts, tokens.
            steps: in all.
            scale: whether the scale is searched too.
        """
        last = torch.tensor([SCALE_STEP if scale else 0.0], dtype=torch.float64)
        return cls(start=start, units=torch.cat([1 / (1 + turns(site, length)), last]), steps=steps)

    def vector(self, at: Sequence[float]) -> Vector:
        """The vector of a place."""
        return self.start + self.units * torch.tensor(at, dtype=torch.float64)

    def rate(self, step: int) -> float:
        """Length of a step: it grows, and falls to zero at the end."""
        longest = min(LONGEST, 2 * TRAVEL / self.steps)
        return longest * min(1.0, (step + 1) / WARM) * 0.5 * (1 + math.cos(math.pi * step / self.steps))

    def after(self, state: State, step: int, loss: float, gradient: Vector) -> State:
        """The state after a step.

        Args:
            state: before it.
            step: its number, from 0.
            loss: there.
            gradient: there.
        """
        with torch.inference_mode(False), torch.no_grad():
            at, mean, square = (
                torch.tensor(part, dtype=torch.float64) for part in (state.at, state.mean, state.square)
            )
            at.grad = gradient * self.units
            adam = torch.optim.Adam([at], lr=self.rate(step), betas=BETAS)
            adam.state[at] = {"step": torch.tensor(float(step)), "exp_avg": mean, "exp_avg_sq": square}
            adam.step()
        return State(at=tuple(at.tolist()), mean=tuple(mean.tolist()), square=tuple(square.tolist()), loss=loss)

    def found(self, states: Sequence[State]) -> Vector:
        """The mean of the last quarter: single steps follow single texts."""
        last = states[math.floor(AVERAGED * len(states)) :]
        return self.vector(torch.tensor([state.at for state in last], dtype=torch.float64).mean(0).tolist())


def hidden_key(tokenizer: Any, text: TextStretch, *, length: int, depth: float, seed: int) -> Example:
    """A text with a key hidden in it and asked for at its end; the digits count as much as ``NEEDLE`` says.

    Args:
        tokenizer: of the model.
        text: at least as long as the target.
        length: the target, tokens.
        depth: 0 (the key at the start) to 1.
        seed: of the key.
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
    """What came of one start.

    Args:
        name: of the start.
        losses: of every step, nats per token, on the texts of that step.
        method: ``Method.to_dict()`` of what was found.
        beyond: its mean loss beyond the window, on whole texts that were chosen on.
    """

    name: str
    losses: tuple[float, ...]
    method: dict[str, Any]
    beyond: float


@dataclass(eq=False, kw_only=True)
class Search:
    """A search of frequencies; ``run`` it once.

    Args:
        losses: where cells are kept; it measures what was found, too.
        sites: frequencies of the model, before it is patched.
        plain: the model patched for the target with its frequencies as they were trained.
        texts: to search on.
        sizes: how much.
        keys: whether hidden keys are a part of the texts, where the model can read one at all.
    """

    losses: MeasuredLosses
    sites: tuple[RotarySite, ...]
    plain: Reading
    texts: tuple[TextStretch, ...]
    sizes: SearchSizes
    keys: bool

    @cached_property
    def needles(self) -> bool:
        """Whether keys are hidden: what a model cannot read inside its window, no rotation lets it read beyond."""
        loss = self.losses.key_inside() if self.keys else None
        return loss is not None and loss < READ

    @property
    def factor(self) -> float:
        """Target length over trained length."""
        return self.losses.length / self.losses.trained

    def run(self, starts: Mapping[str, Vector]) -> list[SearchedStart]:
        """What comes of each start, the best first.

        Args:
            starts: vectors by name.

        Raises:
            CtxextError: as the passes do; every finished step is kept.
        """
        found = []
        for name, start in starts.items():
            states, descent = self._descend(name, start)
            method = as_method(descent.found(states), self.factor)
            reading = self._reading(name, method)
            beyond = self.losses.beyond(reading.name)
            one = SearchedStart(
                name=name, losses=tuple(state.loss for state in states), method=method.to_dict(), beyond=beyond
            )
            found.append(one)
        return sorted(found, key=lambda one: one.beyond)

    def reading_of(self, start: SearchedStart) -> Reading:
        """Of what was found."""
        return self.losses.readings[f"searched from {start.name}"]

    def _reading(self, start: str, method: LongRoPE) -> Reading:
        self.losses.stage.show(None)
        found, refused = self.losses.stage.readings.find([method])
        if refused:
            raise InvalidParameterError(f"What the search found cannot be stored: {refused[0].reason}")
        label = f"searched from {start}"
        return self.losses.add(replace(found[-1], name=label, label=label))

    def _descend(self, name: str, start: Vector) -> tuple[list[State], Descent]:
        scale = learns_scale(self.losses.stage.readings.model)
        descent = Descent.of(start, self.sites[0], length=self.losses.length, steps=self.sizes.steps, scale=scale)
        told = [
            *(start.tolist(), descent.units.tolist(), self.sizes.steps, self.sizes.rows, self.needles),
            [one.text.sha256 for one in self.texts],
            *(self.losses.seed, self.factor, TRAVEL, LONGEST, NEEDLE),
        ]
        plan = hashlib.sha256(json.dumps(told).encode()).hexdigest()[:12]
        states = [State.begin(len(start))]
        for step in range(self.sizes.steps):
            values = self.losses.values(self._cell(name, descent, plan, states[-1], step))
            states.append(from_json(State, values["state"]))
        return states[1:], descent

    def _cell(self, start: str, descent: Descent, plan: str, before: State, step: int) -> RaceCell:
        losses, length, rows = self.losses, self.losses.length, self.sizes.rows
        shown = f"searching from {start}, step {step + 1} of {descent.steps}"
        cost = STEP_COST * pass_cost(length, losses.costs.turning_point)

        def ask(model: nn.Module, progress: Progress) -> Answer:
            examples = self._examples(step)
            watched = ticking(model, shown, rows * cost / len(examples), progress)
            with watched, Landscape(model, self.sites, self.factor) as landscape:
                found = landscape.gradient(descent.vector(before.at), examples)
            after = descent.after(before, step, *found)
            about = {"kind": "step", "length": length, "item": start, "passes": STEP_COST * rows}
            return Answer(about | {"state": vars(after)})

        return RaceCell(
            key=losses.stage.readings.key(["search", plan], task=["step", step]),
            cost=rows * cost,
            reader=StayingReader(self.plain, losses.stage.readings, (length,), losses.stage),
            name=shown,
            read=ask,
            heard=losses.heard,
        )

    def _examples(self, step: int) -> list[Example]:
        """The texts of a step: they take turns, and are few enough to be read together."""
        turns_taken = range(step * self.sizes.rows, (step + 1) * self.sizes.rows)
        texts = [(turn, self.texts[turn % len(self.texts)]) for turn in turns_taken]
        if self.needles:
            return [self._with_key(text, turn) for turn, text in texts]
        return [Example.mean(torch.cat([text.text.input_ids for _, text in texts]))]

    def _with_key(self, text: TextStretch, turn: int) -> Example:
        tokenizer = self.losses.survey.checkpoint.tokenizer
        # Not the seed of the keys that candidates are judged by.
        seed = 10_000 + 1_000 * self.losses.seed + turn
        return hidden_key(tokenizer, text, length=self.losses.length, depth=DEPTHS[turn % len(DEPTHS)], seed=seed)
