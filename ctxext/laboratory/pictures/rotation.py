"""A rotation and distance: the score of equal vectors, and how far each pair of dimensions turns."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ctxext.evaluation.report.figures import INK, NOTE, Panel
from ctxext.laboratory.pictures.picture import AFTER, BEFORE, Curve, Numbers, Picture, distances_to, lines
from ctxext.laboratory.pictures.request import PictureRequest
from ctxext.measuring.readings import name_for
from ctxext.methods import Method, RopeMethod
from ctxext.methods.formulas import plain_inv_freq
from ctxext.methods.pi import PI
from ctxext.spec import LLAMA, PerPair, RopeSpec

NEARLY = 1.25  # ratio of distances that the thick line averages over
CAPTION = (
    "Left: how a score falls with distance, for a query and a key that are equal, as a share of the score at "
    "distance 0; thick lines are running means. Right: how often each pair of dimensions turns in a text. Below a "
    "turn, training has seen no angle beyond the black dots."
)


def rotation_asked(method: Method | None, request: PictureRequest) -> Picture | None:
    """Return the picture of a rotation, by default of the plain one; None for a method that does not rotate."""
    if method is not None and not isinstance(method, RopeMethod):
        return None
    return rotation_picture(method or PI(factor=1.0), request.rope(LLAMA.trained_length), request.model)


def rotation_picture(method: RopeMethod, rope: RopeSpec, model: str = "") -> Picture:
    """Compute a rotation in a text of the method's target length, with the plain one to compare.

    Full turns are counted for each pair of dimensions, fastest first. Pairs at new angles make less than a turn in
    training and go farther in the text.
    """
    target = method.target_length(rope.trained_length)
    plain, frequencies = plain_inv_freq(rope), method.frequencies(rope, target)
    apart = distances_to(target)
    trained, without, turns = (
        inv_freq * length / (2 * math.pi)
        for inv_freq, length in ((plain, rope.trained_length), (plain, target), (frequencies.inv_freq, target))
    )
    values: Numbers = {
        "method": method.to_dict(),
        "trained_length": rope.trained_length,
        "target_length": target,
        "attention_scale": frequencies.attention_scale,
        "temperature": frequencies.temperature,
        "inv_freq": frequencies.inv_freq.tolist(),  # all digits, as in docs/evidence/golden.json
        "distances": apart,
        "plain_score": score_of_equals(plain, apart),
        "score": frequencies.attention_scale**2 * score_of_equals(frequencies.inv_freq, apart),
        "trained_turns": trained,
        "plain_turns": without,
        "turns": turns,
        "pairs_at_new_angles": _new_angles(turns, trained),
        "pairs_at_new_angles_without": _new_angles(without, trained),
    }
    label = "" if torch.equal(turns, without) and frequencies.attention_scale == 1 else name_for(method)
    sentence = _sentence(values, label)
    return Picture(
        kind="rotation",
        sentence=f"{model}: {sentence}" if model else sentence[0].upper() + sentence[1:],
        caption=CAPTION,
        values=values,
        panels=[_scores(values, label), _turns(values, label)],
    )


def _sentence(values: Numbers, label: str) -> str:
    """Say what the rotation does; without a label it is as it was trained."""
    turns, new, without = (values[name] for name in ("turns", "pairs_at_new_angles", "pairs_at_new_angles_without"))
    if not label:
        slow = int((values["trained_turns"] < 1).sum())
        length = f"{values['trained_length']:,}"
        return f"plain rotation in {length} tokens: {slow} of {len(turns)} pairs never make a full turn"
    if not turns.any():
        return f"with {label} nothing turns: a key scores the same wherever it stands"
    return (
        f"at {values['target_length']:,} tokens with {label}, {new or 'none'} of {len(turns)} pairs meet angles that "
        f"training has not seen; without, {without or 'none'}"
    )


def _scores(values: Numbers, label: str) -> Panel:
    shown = values["distances"] >= 1
    apart = values["distances"][shown]
    curves = _waves(apart, values["plain_score"][shown], BEFORE, "plain rotation")
    curves += _waves(apart, values["score"][shown], AFTER, label) if label else []

    def then(axes: Any) -> None:
        axes.axhline(0, color="#BBBBBB", lw=0.8)
        low, high = axes.get_ylim()
        axes.set_ylim(low, high + 0.1 * (high - low))  # room for the words above the highest line

    return lines(
        "Score of equal vectors",
        curves,
        size=(5.3, 3.8),
        y="score",
        longest=values["target_length"],
        trained=values["trained_length"],
        legend="lower left",
        then=then,
    )


def _waves(
    apart: Int[Tensor, " distances"], score: Float[Tensor, " distances"], colour: str, label: str
) -> list[Curve]:
    """Return the waves of a score as a thin line, and its mean over nearly the same distances as a thick one."""
    ratio = apart[:, None].double() / apart
    near = ((ratio < NEARLY) & (ratio > 1 / NEARLY)).double()
    return [
        Curve(apart, score, colour, {"lw": 0.7, "alpha": 0.45}),
        Curve(apart, (near @ score) / near.sum(1), colour, {"lw": 2, "label": label}),
    ]


def _turns(values: Numbers, label: str) -> Panel:
    turns, target, trained = values["turns"], f"{values['target_length']:,}", f"{values['trained_length']:,}"
    pairs = range(len(turns))
    dots = {"ls": "", "marker": "o", "ms": 2.6, "zorder": 4, "label": f"in training ({trained} tokens)"}
    curves = [Curve(pairs, values["trained_turns"], INK, dots)]
    if target != trained:
        curves.append(Curve(pairs, values["plain_turns"], BEFORE, {"lw": 1.6, "label": f"plain at {target}"}))
    if label:
        drawn = torch.where(turns > 0, turns, torch.nan)  # a logarithmic axis has no place for 0
        label += f" at {target}" if turns.any() else ": no pair turns"
        curves.append(Curve(pairs, drawn, AFTER, {"lw": 1.8, "label": label}))

    def then(axes: Any) -> None:
        axes.set_yscale("log")
        axes.axhline(1, color=NOTE, lw=0.9)
        axes.annotate("one turn", (len(turns) - 0.5, 1), ha="right", va="bottom", fontsize=8, color=NOTE)
        axes.margins(x=0.02)

    return lines(
        "Turns of each pair of dimensions",
        curves,
        size=(4.3, 3.8),
        x="pair, fast to slow",
        y="turns in the text",
        legend="best",
        then=then,
    )


def _new_angles(turns: PerPair, trained: PerPair) -> int:
    return int(((trained < 1) & (turns > trained * (1 + 1e-6))).sum())


def score_of_equals(inv_freq: PerPair, distances: Int[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """Return the score of a query and a key that are equal and as long in each pair of dimensions: 1 at distance 0."""
    return (distances.double()[..., None] * inv_freq).cos().mean(-1)
