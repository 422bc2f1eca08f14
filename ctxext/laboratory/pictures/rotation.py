"""A rotation and distance: the score of equal vectors, and how far each pair of dimensions turns."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ctxext.evaluation.report.figures import INK, NOTE
from ctxext.laboratory.pictures.picture import (
    AFTER,
    BEFORE,
    Picture,
    distances_to,
    mark_trained,
    quiet,
    tokens_axis,
)
from ctxext.measuring.readings import name_for
from ctxext.methods import RopeMethod
from ctxext.methods.formulas import plain_inv_freq
from ctxext.spec import RopeSpec

NEARLY = 1.25  # ratio of distances that the thick line averages over


@dataclass(frozen=True, eq=False, kw_only=True)
class RotationPicture(Picture):
    """A rotation in a text of the method's target length, with the plain one beside it.

    Args:
        plain_score: score of equal vectors at these distances, with the trained frequencies.
        score: likewise, with the method's.
        trained_turns: full turns of each pair in a text of the trained length, fastest first, as in training.
        plain_turns: likewise in a text of the target length, with the trained frequencies.
        turns: likewise, with the method's.
        pairs_at_new_angles: pairs that make less than a turn in training and go farther with the method.
        pairs_at_new_angles_without: likewise, with the trained frequencies.
    """

    kind = "rotation"
    caption = (
        "Left: how a score falls with distance, for a query and a key that are equal, as a share of the score at "
        "distance 0; thick lines are running means. Right: how often each pair of dimensions turns in a text. Below a "
        "turn, training has seen no angle beyond the black dots."
    )

    trained_length: int
    target_length: int
    attention_scale: float
    distances: Int[Tensor, " distances"]
    plain_score: Float[Tensor, " distances"]
    score: Float[Tensor, " distances"]
    trained_turns: Float[Tensor, " half"]
    plain_turns: Float[Tensor, " half"]
    turns: Float[Tensor, " half"]
    pairs_at_new_angles: int
    pairs_at_new_angles_without: int

    @classmethod
    def of(cls, method: RopeMethod, rope: RopeSpec, model: str = "") -> RotationPicture:
        """Compute the picture of a method on a model's rotation."""
        target = method.target_length(rope.trained_length)
        plain, frequencies = plain_inv_freq(rope), method.frequencies(rope, target)
        apart = distances_to(target)
        trained, without, turns = (
            inv_freq * length / (2 * math.pi)
            for inv_freq, length in ((plain, rope.trained_length), (plain, target), (frequencies.inv_freq, target))
        )
        return cls(
            method=method,
            model=model,
            trained_length=rope.trained_length,
            target_length=target,
            attention_scale=frequencies.attention_scale,
            distances=apart,
            plain_score=score_of_equals(plain, apart),
            score=frequencies.attention_scale**2 * score_of_equals(frequencies.inv_freq, apart),
            trained_turns=trained,
            plain_turns=without,
            turns=turns,
            pairs_at_new_angles=_new_angles(turns, trained),
            pairs_at_new_angles_without=_new_angles(without, trained),
        )

    @property
    def is_plain(self) -> bool:
        """True if the method leaves rotation as it was trained."""
        return torch.equal(self.turns, self.plain_turns) and self.attention_scale == 1

    @property
    def sentence(self) -> str:
        pairs, label = len(self.turns), name_for(self.method)
        if self.is_plain:
            slow = int((self.trained_turns < 1).sum())
            text = f"plain rotation in {self.trained_length:,} tokens: {slow} of {pairs} pairs never make a full turn"
        elif not self.turns.any():
            text = f"with {label} nothing turns: a key scores the same wherever it stands"
        else:
            text = (
                f"at {self.target_length:,} tokens with {label}, {self.pairs_at_new_angles or 'none'} of {pairs} pairs "
                f"meet angles that training has not seen; without, {self.pairs_at_new_angles_without or 'none'}"
            )
        return f"{self.model}: {text}" if self.model else text[0].upper() + text[1:]

    def draw(self, figure: Any) -> None:
        left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
        shown = self.distances >= 1
        apart = self.distances[shown]
        left.axhline(0, color="#BBBBBB", lw=0.8)
        _draw_score(left, apart, self.plain_score[shown], BEFORE, "plain rotation")
        if not self.is_plain:
            _draw_score(left, apart, self.score[shown], AFTER, name_for(self.method))
        low, high = left.get_ylim()
        left.set_ylim(low, high + 0.1 * (high - low))  # room for the words above the highest line
        tokens_axis(left, self.target_length)
        quiet(left, "Score of equal vectors", x="tokens between query and key", y="score")
        mark_trained(left, self.trained_length)
        left.legend(fontsize=8.5, frameon=False, loc="lower left")
        self._draw_turns(right)

    def _draw_turns(self, axes: Any) -> None:
        pairs, target = range(len(self.turns)), f"{self.target_length:,}"
        axes.set_yscale("log")
        axes.axhline(1, color=NOTE, lw=0.9)
        in_training = f"in training ({self.trained_length:,} tokens)"
        axes.plot(pairs, self.trained_turns.tolist(), "o", ms=2.6, color=INK, label=in_training, zorder=4)
        if self.target_length != self.trained_length:
            axes.plot(pairs, self.plain_turns.tolist(), color=BEFORE, lw=1.6, label=f"plain at {target}")
        if not self.is_plain:
            turns = torch.where(self.turns > 0, self.turns, torch.nan)  # a logarithmic axis has no place for 0
            label = name_for(self.method) + (f" at {target}" if self.turns.any() else ": no pair turns")
            axes.plot(pairs, turns.tolist(), color=AFTER, lw=1.8, label=label)
        axes.annotate("one turn", (len(self.turns) - 0.5, 1), ha="right", va="bottom", fontsize=8, color=NOTE)
        axes.margins(x=0.02)
        quiet(axes, "Turns of each pair of dimensions", x="pair, fast to slow", y="turns in the text")
        axes.legend(fontsize=8.5, frameon=False, loc="best")


def _new_angles(turns: Float[Tensor, " half"], trained: Float[Tensor, " half"]) -> int:
    return int(((trained < 1) & (turns > trained * (1 + 1e-6))).sum())


def score_of_equals(inv_freq: Float[Tensor, " half"], distances: Int[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """Return the score of a query and a key that are equal and as long in each pair of dimensions: 1 at distance 0."""
    return (distances.double()[..., None] * inv_freq).cos().mean(-1)


def _draw_score(
    axes: Any, apart: Int[Tensor, " distances"], score: Float[Tensor, " distances"], colour: str, label: str
) -> None:
    """Draw the waves of a score as a thin line, and its mean over distances that are nearly the same as a thick one."""
    ratio = apart[:, None].double() / apart
    near = ((ratio < NEARLY) & (ratio > 1 / NEARLY)).double()
    axes.plot(apart.tolist(), score.tolist(), color=colour, lw=0.7, alpha=0.45)
    axes.plot(apart.tolist(), ((near @ score) / near.sum(1)).tolist(), color=colour, lw=2, label=label)
