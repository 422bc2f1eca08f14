"""What is added to a score for its distance, head by head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ctxext.evaluation.report.style import INK, NOTE
from ctxext.laboratory.pictures.picture import GRADED, Picture, distances_to, mark_trained, quiet, tokens_axis
from ctxext.methods import BiasMethod
from ctxext.methods.encoding import Encoding
from ctxext.spec import AlibiSpec, EncodingSpec, Pairs

OUT_OF_SIGHT = -12.0  # a score that is lower by so much weighs less than 1/100,000 of what it was
TURNS = 32  # of a learned bias, at most: T5 has so many buckets
CAPTION = (
    "Left: what is added to the score of a key so many tokens back, compared with what the query's own token gets; a "
    "score that is lower by 12 weighs 1/160,000. Where it ripples, the thick line is its mean. Right: the part of it "
    "that each token adds, on average over the trained length."
)


@dataclass(frozen=True, eq=False)
class Bias:
    """A bias in numbers.

    Args:
        trained_length: tokens that the model was trained for.
        target_length: tokens that it is meant to read.
        distances: tokens between query and key.
        bias: of each head, less that of the query's own token.
        slopes: what each head's bias loses per token, on average from distance 0 to the trained length.
    """

    trained_length: int
    target_length: int
    distances: Int[Tensor, " distances"]
    bias: Float[Tensor, "head distances"]
    slopes: Float[Tensor, " head"]


def bias_of_slopes(method: BiasMethod, alibi: AlibiSpec) -> Bias:
    """Of a method whose heads have a slope each."""
    target = method.target_length(alibi.trained_length)
    slopes, distances = method.slopes(alibi, target), distances_to(target)
    return Bias(alibi.trained_length, target, distances, -slopes[:, None] * distances.double(), slopes)


def pairs_at(spec: EncodingSpec, query: int, distances: Int[Tensor, " distances"], *, seed: int | None = None) -> Pairs:
    """One query and a key at each of these distances; all zero, or drawn at random."""
    shapes = (1, spec.num_heads, 1, spec.head_dim), (1, spec.num_kv_heads, len(distances), spec.head_dim)
    generator = torch.Generator().manual_seed(seed or 0)
    q, k = (torch.zeros(s) if seed is None else torch.randn(s, generator=generator) for s in shapes)
    return Pairs(
        q.double(),
        k.double(),
        torch.tensor([[query]]),
        query - distances[None],
        spec.head_dim**-0.5,
        lambda queries: torch.ones(1, 1, len(distances), dtype=torch.bool),
    )


@torch.no_grad()
def bias_of_encoding(encoding: Encoding, spec: EncodingSpec, target: int) -> Bias:
    """Of an encoding whose score depends on positions alone, for the last query of a text of the target length."""

    def of(distances: Int[Tensor, " distances"]) -> Float[Tensor, "head distances"]:
        score = encoding.score(pairs_at(spec, target - 1, distances))
        assert score is not None
        return score.rows(slice(0, 1))[0, :, 0].double().cpu()

    distances = distances_to(target)
    ends = of(torch.tensor([0, min(spec.trained_length, target - 1)]))
    slopes = (ends[:, 0] - ends[:, 1]) / min(spec.trained_length, target - 1)
    return Bias(spec.trained_length, target, distances, of(distances) - ends[:, :1], slopes)


def picture_of_bias(found: Bias, *, label: str, saved: dict[str, Any], name: str = "", state: str = "") -> Picture:
    """The bias of each head against distance, and the heads' slopes as bars.

    Args:
        found: the numbers.
        label: what the method is called.
        saved: its saved form.
        name: of the model, for the title.
        state: what to know of its weights, such as that they are as they begin.
    """
    size = (9.6, 4.1)
    said = _said(found, label, name, state)
    return Picture.of(
        found,
        "bias",
        saved=saved,
        said=said,
        caption=CAPTION,
        size=size,
        draw=lambda figure: _draw(figure, found),
        weights=state or None,
    )


def _said(found: Bias, label: str, name: str, state: str) -> str:
    of, how = (f"{name}: " if name else ""), (f", {state}" if state else "")
    blind = int((found.bias.min(1).values < OUT_OF_SIGHT).sum())
    heads = len(found.bias)
    if float(found.bias.max()) > 1e-6:
        return f"{of}{'what' if name else 'What'} {label} adds to the scores of its {heads} heads for distance{how}"
    if blind == 0:
        return f"{of}{label} lets all {heads} heads see {found.target_length:,} tokens back{how}"
    return f"{of}{label} lets {heads - blind or 'none'} of {heads} heads see {found.target_length:,} tokens back{how}"


def _draw(figure: Any, found: Bias) -> None:
    from matplotlib import colormaps

    left, right = figure.subplots(1, 2, width_ratios=(1.6, 1))
    heads = len(found.bias)
    colours = [colormaps[GRADED](0.92 * head / max(heads - 1, 1)) for head in range(heads)]
    shown = found.distances >= 1
    left.axhline(0, color="#BBBBBB", lw=0.8)
    distances, bias = found.distances[shown].double(), found.bias[:, shown].double()
    for row, colour in zip(bias, colours, strict=True):
        rippled = _rippled(row)
        left.plot(
            distances.tolist(), row.tolist(), color=colour, lw=0.6 if rippled else 1.5, alpha=0.3 if rippled else 1
        )
        if rippled:
            left.plot(*(part.tolist() for part in _trend(distances, row)), color=colour, lw=1.8)
    if float(found.bias.min()) < OUT_OF_SIGHT:
        left.set_ylim(OUT_OF_SIGHT, 0.4)
    tokens_axis(left, found.target_length)
    quiet(left, "Added to the score", x="tokens between query and key", y="bias, relative to distance 0")
    mark_trained(left, found.trained_length, above=False)
    right.bar(range(heads), found.slopes.tolist(), color=colours, width=0.8)
    if bool((found.slopes > 0).all()) and float(found.slopes.max() / found.slopes.min()) > 8:
        right.set_yscale("log", base=2)
        right.yaxis.set_major_formatter(lambda value, _: f"1/{1 / value:,.0f}" if value < 1 else f"{value:g}")
    else:
        right.axhline(0, color="#BBBBBB", lw=0.8)
    right.set_xticks(range(heads), [str(head) for head in range(heads)]) if heads <= 16 else None
    quiet(right, "Slope of each head", x="head", y="lost per token, mean over the trained length")
    right.tick_params(axis="x", colors=INK if heads <= 16 else NOTE)


def _rippled(bias: Float[Tensor, " distances"]) -> bool:
    """Whether a bias goes up and down so often that a line a head would hide those behind it."""
    turns = bias.diff().sign()
    return int((turns[1:] * turns[:-1] < 0).sum()) > TURNS


def _trend(distances: Float[Tensor, " distances"], bias: Float[Tensor, " distances"]) -> tuple[Tensor, Tensor]:
    """Distances and bias, each the mean over a quarter of an octave."""
    quarter = (4 * distances.log2()).floor().long()
    count = quarter.bincount()
    means = [quarter.bincount(values)[count > 0] / count[count > 0] for values in (distances, bias)]
    return means[0], means[1]
