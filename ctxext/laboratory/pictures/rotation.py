"""What a rotation tells about distance: the score of equal vectors, and how far each pair of dimensions turns."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ctxext.evaluation.report.style import INK, NOTE
from ctxext.laboratory.pictures.picture import (
    AFTER,
    BEFORE,
    Picture,
    distances_to,
    mark_trained,
    quiet,
    tokens_axis,
)
from ctxext.methods import RopeMethod
from ctxext.methods.formulas import plain_inv_freq
from ctxext.spec import RopeSpec

NEARLY = 1.25  # ratio of distances that the thick line averages over
CAPTION = (
    "Left: the score of a query and a key that are equal, every pair of dimensions as long as any other, relative to "
    "plain rotation at distance 0; the thick lines are its running mean. Right: how often each pair of dimensions "
    "turns in a text; of pairs below one turn, training has seen no angle beyond the black dots."
)


@dataclass(frozen=True, eq=False)
class Rotation:
    """A rotation in numbers, with the plain one beside it.

    Args:
        trained_length: tokens that the weights were trained for.
        target_length: tokens that the method is for.
        attention_scale: what multiplies cos and sin.
        distances: tokens between query and key.
        plain_score: of equal vectors at these distances, with the trained frequencies.
        score: likewise, with the method's.
        trained_turns: full turns of each pair in a text of the trained length, fastest first, as in training.
        plain_turns: likewise in a text of the target length, with the trained frequencies.
        turns: likewise, with the method's.
    """

    trained_length: int
    target_length: int
    attention_scale: float
    distances: Int[Tensor, " distances"]
    plain_score: Float[Tensor, " distances"]
    score: Float[Tensor, " distances"]
    trained_turns: Float[Tensor, " half"]
    plain_turns: Float[Tensor, " half"]
    turns: Float[Tensor, " half"]

    @property
    def beyond(self) -> int:
        """Pairs that reach angles which they did not reach in training: less than a turn there, and more here."""
        return _new_angles(self.turns, self.trained_turns)

    @property
    def plain_beyond(self) -> int:
        """Likewise without the method."""
        return _new_angles(self.plain_turns, self.trained_turns)


def _new_angles(turns: Float[Tensor, " half"], trained: Float[Tensor, " half"]) -> int:
    return int(((trained < 1) & (turns > trained * (1 + 1e-6))).sum())


def rotation_of(method: RopeMethod, rope: RopeSpec) -> Rotation:
    """A method's rotation in numbers, in a text of its target length."""
    target = method.target_length(rope.trained_length)
    plain, frequencies = plain_inv_freq(rope), method.frequencies(rope, target)
    apart = distances_to(target)
    return Rotation(
        trained_length=rope.trained_length,
        target_length=target,
        attention_scale=frequencies.attention_scale,
        distances=apart,
        plain_score=score_of_equals(plain, apart),
        score=frequencies.attention_scale**2 * score_of_equals(frequencies.inv_freq, apart),
        trained_turns=plain * rope.trained_length / (2 * math.pi),
        plain_turns=plain * target / (2 * math.pi),
        turns=frequencies.inv_freq * target / (2 * math.pi),
    )


def score_of_equals(inv_freq: Float[Tensor, " half"], distances: Int[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """The score of a query and a key that are equal and as long in each pair of dimensions: 1 at distance 0."""
    return (distances.double()[..., None] * inv_freq).cos().mean(-1)


def picture_of_rotation(method: RopeMethod, rope: RopeSpec, *, label: str, name: str = "") -> Picture:
    """The score against distance, and the turns of each pair.

    Args:
        method: a method that rotates.
        rope: the model's rotation.
        label: what the method is called.
        name: of the model, for the title.
    """
    found, size = rotation_of(method, rope), (9.6, 4.1)
    said = _said(found, label, name)
    counts = {"pairs_at_new_angles": found.beyond, "pairs_at_new_angles_without": found.plain_beyond}
    return Picture.of(
        found,
        "rotation",
        saved=method.to_dict(),
        said=said,
        caption=CAPTION,
        size=size,
        draw=lambda figure: _draw(figure, found, label),
        **counts,
    )


def _said(found: Rotation, label: str, name: str) -> str:
    pairs = len(found.turns)
    if torch.equal(found.turns, found.plain_turns) and found.attention_scale == 1:
        slow = int((found.trained_turns < 1).sum())
        said = f"plain rotation in {found.trained_length:,} tokens: {slow} of {pairs} pairs never make a full turn"
    elif not found.turns.any():
        said = f"with {label} nothing turns: a key scores the same wherever it stands"
    else:
        said = (
            f"at {found.target_length:,} tokens {label} turns {found.beyond or 'none'} of {pairs} pairs to unseen "
            f"angles; plain rotation {found.plain_beyond or 'none'}"
        )
    return f"{name}: {said}" if name else said[0].upper() + said[1:]


def _draw(figure: Any, found: Rotation, label: str) -> None:
    left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
    is_plain = torch.equal(found.turns, found.plain_turns) and found.attention_scale == 1
    shown = found.distances >= 1
    apart = found.distances[shown].tolist()
    left.axhline(0, color="#BBBBBB", lw=0.8)
    _draw_score(left, apart, found.plain_score[shown], BEFORE, "plain rotation")
    if not is_plain:
        _draw_score(left, apart, found.score[shown], AFTER, label)
    low, high = left.get_ylim()
    left.set_ylim(low, high + 0.1 * (high - low))  # room for the words above the highest line
    tokens_axis(left, found.target_length)
    quiet(left, "Score of equal vectors", x="tokens between query and key", y="score")
    mark_trained(left, found.trained_length)
    left.legend(fontsize=8.5, frameon=False, loc="lower left")
    _draw_turns(right, found, label, is_plain)


def _draw_score(axes: Any, apart: list[int], score: Float[Tensor, " distances"], colour: str, label: str) -> None:
    """Its waves as a thin line, and what they swing around as a thick one."""
    axes.plot(apart, score.tolist(), color=colour, lw=0.7, alpha=0.45)
    axes.plot(apart, _around(score, torch.tensor(apart)).tolist(), color=colour, lw=2, label=label)


def _around(score: Float[Tensor, " distances"], apart: Int[Tensor, " distances"]) -> Float[Tensor, " distances"]:
    """The mean over distances that are nearly the same."""
    ratio = apart[:, None].double() / apart
    near = ((ratio < NEARLY) & (ratio > 1 / NEARLY)).double()
    return (near @ score) / near.sum(1)


def _draw_turns(axes: Any, found: Rotation, label: str, is_plain: bool) -> None:
    pairs = range(len(found.turns))
    axes.set_yscale("log")
    axes.axhline(1, color=NOTE, lw=0.9)
    in_training = f"in training ({found.trained_length:,} tokens)"
    axes.plot(pairs, found.trained_turns.tolist(), "o", ms=2.6, color=INK, label=in_training, zorder=4)
    if found.target_length != found.trained_length:
        axes.plot(pairs, found.plain_turns.tolist(), color=BEFORE, lw=1.6, label=f"plain at {found.target_length:,}")
    if not is_plain:
        turns = torch.where(found.turns > 0, found.turns, torch.nan)  # a logarithmic axis has no place for 0
        said = f"{label} at {found.target_length:,}" if found.turns.any() else f"{label}: no pair turns"
        axes.plot(pairs, turns.tolist(), color=AFTER, lw=1.8, label=said)
    axes.annotate("one turn", (len(found.turns) - 0.5, 1), ha="right", va="bottom", fontsize=8, color=NOTE)
    axes.margins(x=0.02)
    quiet(axes, "Turns of each pair of dimensions", x="pair, fast to slow", y="turns in the text")
    axes.legend(fontsize=8.5, frameon=False, loc="best")
