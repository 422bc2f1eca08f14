"""The bias that is added to a score for its distance, head by head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ctxext.core.subject import text_of
from ctxext.evaluation.report.figures import INK, NOTE
from ctxext.laboratory.pictures.picture import GRADED, Picture, distances_to, mark_trained, quiet, tokens_axis
from ctxext.laboratory.pictures.request import SMALL, PictureRequest
from ctxext.measuring.readings import known_trained_length
from ctxext.methods import BiasMethod, EncodingMethod
from ctxext.methods.encoding import Encoding
from ctxext.spec import AlibiSpec, EncodingSpec, Pairs

OUT_OF_SIGHT = -12.0  # a score that is lower by so much weighs less than 1/100,000 of what it was
TURNS = 32  # of a learned bias, at most: T5 has so many buckets


@dataclass(frozen=True, eq=False, kw_only=True)
class BiasPicture(Picture):
    """The bias of each head against distance, and the heads' slopes.

    Args:
        bias: bias of each head, less that of the query's own token.
        slopes: what each head's bias loses per token, on average from distance 0 to the trained length.
        weights: what to know of the weights, such as that they are untrained; None where nothing is.
    """

    kind = "bias"
    caption = (
        "Left: what is added to the score of a key so many tokens back, compared with what the query's own token gets; "
        "a score that is lower by 12 weighs 1/160,000. Where it ripples, the thick line is its mean. Right: the part "
        "of it that each token adds, on average over the trained length."
    )

    trained_length: int
    target_length: int
    distances: Int[Tensor, " distances"]
    bias: Float[Tensor, "head distances"]
    slopes: Float[Tensor, " head"]
    weights: str | None = None

    @classmethod
    def of_slopes(cls, method: BiasMethod, request: PictureRequest) -> BiasPicture:
        """Compute the bias of a method whose heads have a slope each.

        Raises:
            InvalidParameterError: nothing says how many tokens the checkpoint was trained for.
        """
        heads, length = SMALL.num_heads, request.trained_length or SMALL.trained_length
        if request.checkpoint is not None:
            heads = text_of(request.config).num_attention_heads
            length = known_trained_length(request.structure, request.trained_length)
        target = method.target_length(length)
        slopes, distances = method.slopes(AlibiSpec(heads, length), target), distances_to(target)
        return cls(
            method=method,
            model=request.model,
            trained_length=length,
            target_length=target,
            distances=distances,
            bias=-slopes[:, None] * distances.double(),
            slopes=slopes,
        )

    @classmethod
    def of_encoding(cls, method: EncodingMethod, request: PictureRequest) -> BiasPicture:
        """Compute the bias of an encoding whose score depends on positions alone, for the last query of a text."""
        method, encoding, spec, state, layer = request.encoding(method, SMALL.trained_length)
        target = method.target_length(spec.trained_length)
        distances, reach = distances_to(target), min(spec.trained_length, target - 1)
        ends = _bias(encoding, spec, target, torch.tensor([0, reach]))
        return cls(
            method=method,
            model=request.model + layer,
            trained_length=spec.trained_length,
            target_length=target,
            distances=distances,
            bias=_bias(encoding, spec, target, distances) - ends[:, :1],
            slopes=(ends[:, 0] - ends[:, 1]) / reach,
            weights=state or None,
        )

    @property
    def sentence(self) -> str:
        label, heads = self.method.name, len(self.bias)
        begin, end = (f"{self.model}: " if self.model else ""), (f", {self.weights}" if self.weights else "")
        blind = int((self.bias.min(1).values < OUT_OF_SIGHT).sum())
        if float(self.bias.max()) > 1e-6:
            what = "what" if begin else "What"
            return f"{begin}{what} {label} adds to the scores of its {heads} heads for distance{end}"
        count = f"{heads - blind or 'none'} of {heads}" if blind else f"all {heads}"
        return f"{begin}{label} lets {count} heads see {self.target_length:,} tokens back{end}"

    def draw(self, figure: Any) -> None:
        from matplotlib import colormaps

        left, right = figure.subplots(1, 2, width_ratios=(1.6, 1))
        heads = len(self.bias)
        colours = [colormaps[GRADED](0.92 * head / max(heads - 1, 1)) for head in range(heads)]
        shown = self.distances >= 1
        left.axhline(0, color="#BBBBBB", lw=0.8)
        for bias, colour in zip(self.bias[:, shown].double(), colours, strict=True):
            _draw_bias(left, self.distances[shown].double(), bias, colour)
        if float(self.bias.min()) < OUT_OF_SIGHT:
            left.set_ylim(OUT_OF_SIGHT, 0.4)
        tokens_axis(left, self.target_length)
        quiet(left, "Added to the score", x="tokens between query and key", y="bias, relative to distance 0")
        mark_trained(left, self.trained_length, above=False)
        right.bar(range(heads), self.slopes.tolist(), color=colours, width=0.8)
        if bool((self.slopes > 0).all()) and float(self.slopes.max() / self.slopes.min()) > 8:
            right.set_yscale("log", base=2)
            right.yaxis.set_major_formatter(lambda value, _: f"1/{1 / value:,.0f}" if value < 1 else f"{value:g}")
        else:
            right.axhline(0, color="#BBBBBB", lw=0.8)
        right.set_xticks(range(heads), [str(head) for head in range(heads)]) if heads <= 16 else None
        quiet(right, "Slope of each head", x="head", y="lost per token, mean over the trained length")
        right.tick_params(axis="x", colors=INK if heads <= 16 else NOTE)


def pairs_at(spec: EncodingSpec, query: int, distances: Int[Tensor, " distances"], *, seed: int | None = None) -> Pairs:
    """Return one query and a key at each of these distances; all zero, or drawn at random."""
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
def _bias(
    encoding: Encoding, spec: EncodingSpec, target: int, distances: Int[Tensor, " distances"]
) -> Float[Tensor, "head distances"]:
    score = encoding.double().score(pairs_at(spec, target - 1, distances))
    assert score is not None
    return score.rows(slice(0, 1))[0, :, 0].double().cpu()


def _draw_bias(
    axes: Any, distances: Float[Tensor, " distances"], bias: Float[Tensor, " distances"], colour: Any
) -> None:
    """Draw a head's bias; one that ripples as a faint line, with its mean over quarters of an octave on it."""
    turns = bias.diff().sign()
    ripples = int((turns[1:] * turns[:-1] < 0).sum()) > TURNS  # its line would hide those of other heads
    axes.plot(distances.tolist(), bias.tolist(), color=colour, lw=0.6 if ripples else 1.5, alpha=0.3 if ripples else 1)
    if ripples:
        quarter = (4 * distances.log2()).floor().long()
        count = quarter.bincount()
        means = [quarter.bincount(values)[count > 0] / count[count > 0] for values in (distances, bias)]
        axes.plot(*(mean.tolist() for mean in means), color=colour, lw=1.8)
