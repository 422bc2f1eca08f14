"""Additions to a score for its distance: the bias of each head, and the buckets that share a learned bias."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ctxext.core import patching
from ctxext.core.architecture import find_architecture
from ctxext.core.subject import text_of
from ctxext.errors import IncompatibleError
from ctxext.evaluation.report.figures import INK, NOTE, Panel
from ctxext.laboratory.pictures.picture import AFTER, BEFORE, Curve, Picture, bars, distances_to, lines
from ctxext.laboratory.pictures.request import SMALL, PictureRequest
from ctxext.measuring.readings import known_trained_length, name_for
from ctxext.methods import BiasMethod, BucketMethod, EncodingMethod, Method, RopeMethod
from ctxext.methods.encoding import Encoding, EncodingSpec, Pairs
from ctxext.models.alibi import AlibiArchitecture
from ctxext.models.buckets import buckets_of
from ctxext.spec import AlibiSpec, BucketSpec

OUT_OF_SIGHT = -12.0  # a score that is lower by so much weighs less than 1/100,000 of its weight before
TURNS = 32  # of a learned bias, at most: T5 has so many buckets


def bias_asked(method: Method | None, request: PictureRequest) -> Picture | None:
    """Return the picture of a bias or of buckets; None for a method that has neither, or rotates.

    Raises:
        IncompatibleError: if the checkpoint has neither slopes nor a rotation that they can replace.
    """
    if isinstance(method, EncodingMethod):
        return bias_of_encoding(method, request)
    if isinstance(method, BucketMethod):
        return buckets_picture(method, request)
    if isinstance(method, BiasMethod) and (request.positions == "elsewhere" or not isinstance(method, RopeMethod)):
        _require_slopes(method, request)
        return bias_of_slopes(method, request)
    return None


def _require_slopes(method: BiasMethod, request: PictureRequest) -> None:
    """Raise unless a checkpoint has slopes, or a rotation that slopes can replace.

    Raises:
        IncompatibleError: with the way to find what the checkpoint has.
    """
    if request.positions != "elsewhere":
        return
    family = find_architecture(request.structure)
    if not isinstance(family, AlibiArchitecture):
        raise IncompatibleError(
            f"Method {method.name!r} changes nothing in {request.checkpoint}: its heads have no slopes, and nothing "
            f"rotates. `ctxext inspect {request.checkpoint}` names the methods that fit."
        )


def bias_of_slopes(method: BiasMethod, request: PictureRequest) -> Picture:
    """Compute the bias of a method whose heads have a slope each.

    Raises:
        IncompatibleError: the checkpoint cannot be extended by the method.
        InvalidParameterError: nothing says how many tokens the checkpoint was trained for.
    """
    spec = AlibiSpec(SMALL.num_heads, request.trained_length or SMALL.trained_length)
    if request.checkpoint is not None:
        model, length = request.structure, known_trained_length(request.structure, request.trained_length)
        family = find_architecture(model)
        with patching.patched(model.model, method, trained_length=length):  # refuses a model that it cannot extend
            if isinstance(family, AlibiArchitecture):
                spec = family.spec(model, length)
            else:  # slopes instead of its rotation
                spec = AlibiSpec(model.text.num_attention_heads, length)
    length = spec.trained_length
    target = method.target_length(length)
    slopes = method.slopes(spec, target)
    return _picture(method, request.model, length, -slopes[:, None] * distances_to(target).double(), slopes)


def bias_of_encoding(method: EncodingMethod, request: PictureRequest) -> Picture:
    """Compute the bias of an encoding whose score depends on positions alone, for the last query of a text."""
    method, encoding, spec, state, layer = request.encoding(method, SMALL.trained_length)
    target = method.target_length(spec.trained_length)
    reach = min(spec.trained_length, target - 1)
    ends = _bias(encoding, spec, target, torch.tensor([0, reach]))
    bias = _bias(encoding, spec, target, distances_to(target)) - ends[:, :1]
    slopes = (ends[:, 0] - ends[:, 1]) / reach
    return _picture(method, request.model + layer, spec.trained_length, bias, slopes, state or None)


def _picture(
    method: BiasMethod | EncodingMethod,
    model: str,
    trained_length: int,
    bias: Float[Tensor, "head distances"],
    slopes: Float[Tensor, " head"],
    weights: str | None = None,
) -> Picture:
    """Draw each head's bias relative to the query's own token, and its average loss per token."""
    heads, target = len(bias), method.target_length(trained_length)
    begin, end = (f"{model}: " if model else ""), (f", {weights}" if weights else "")
    blind = int((bias.min(1).values < OUT_OF_SIGHT).sum())
    count = f"{heads - blind or 'none'} of {heads}" if blind else f"all {heads}"
    sentence = f"{begin}{method.name} lets {count} heads see {target:,} tokens back{end}"
    # Where a key gets more than the query's own token, no reach can be named: the title says only what is drawn.
    if float(bias.max()) > 1e-6:
        what = "what" if begin else "What"
        sentence = f"{begin}{what} {method.name} adds to the scores of its {heads} heads for distance{end}"
    return Picture(
        kind="bias",
        sentence=sentence,
        caption="Left: what is added to the score of a key so many tokens back, compared with what the query's own "
        "token gets; a score that is lower by 12 weighs 1/160,000. Where it ripples, the thick line is its mean. "
        "Right: the part of it that each token adds, on average over the trained length.",
        values={
            "method": method.to_dict(),
            "trained_length": trained_length,
            "target_length": target,
            "distances": distances_to(target),
            "bias": bias,
            "slopes": slopes,
            "weights": weights,
        },
        panels=[_by_distance(bias, target, trained_length), _slopes(slopes)],
    )


def _colours(heads: int) -> list[float]:
    return [0.92 * head / max(heads - 1, 1) for head in range(heads)]


def _by_distance(bias: Float[Tensor, "head distances"], target: int, trained_length: int) -> Panel:
    """Return the bias of each head; one that ripples is a faint line under its mean over quarters of an octave."""
    distances, curves = distances_to(target)[1:].double(), []
    for colour, line in zip(_colours(len(bias)), bias[:, 1:].double(), strict=True):
        turns = line.diff().sign()
        ripples = int((turns[1:] * turns[:-1] < 0).sum()) > TURNS  # its line would hide the other heads' lines
        curves.append(Curve(distances, line, colour, {"lw": 0.6, "alpha": 0.3} if ripples else {"lw": 1.5}))
        if ripples:
            quarter = (4 * distances.log2()).floor().long()
            count = quarter.bincount()
            x, y = (quarter.bincount(each)[count > 0] / count[count > 0] for each in (distances, line))
            curves.append(Curve(x, y, colour, {"lw": 1.8}))

    def then(axes: Any) -> None:
        axes.axhline(0, color="#BBBBBB", lw=0.8)
        if float(bias.min()) < OUT_OF_SIGHT:
            axes.set_ylim(OUT_OF_SIGHT, 0.4)

    return lines(
        "Added to the score",
        curves,
        size=(5.9, 3.8),
        y="bias, relative to distance 0",
        longest=target,
        trained=trained_length,
        then=then,
    )


def _slopes(slopes: Float[Tensor, " head"]) -> Panel:
    heads = len(slopes)

    def then(axes: Any) -> None:
        if bool((slopes > 0).all()) and float(slopes.max() / slopes.min()) > 8:
            axes.set_yscale("log", base=2)
            axes.yaxis.set_major_formatter(lambda value, _: f"1/{1 / value:,.0f}" if value < 1 else f"{value:g}")
        else:
            axes.axhline(0, color="#BBBBBB", lw=0.8)
        if heads <= 16:
            axes.set_xticks(range(heads), [str(head) for head in range(heads)])
        axes.tick_params(axis="x", colors=INK if heads <= 16 else NOTE)

    return bars(
        "Slope of each head",
        slopes,
        _colours(heads),
        size=(3.7, 3.8),
        x="head",
        y="lost per token, mean over the trained length",
        then=then,
    )


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
        distances.argmin()[None, None],
    )


@torch.no_grad()
def _bias(
    encoding: Encoding, spec: EncodingSpec, target: int, distances: Int[Tensor, " distances"]
) -> Float[Tensor, "head distances"]:
    score = encoding.double().score(pairs_at(spec, target - 1, distances))
    assert score is not None
    return score.seen()[1][0, :, 0].double().cpu()


def buckets_picture(method: BucketMethod, request: PictureRequest) -> Picture:
    """Draw the bucket of each distance of keys before the query, as trained and with the method.

    Raises:
        IncompatibleError: the config of the checkpoint names no buckets.
    """
    spec, label = _buckets(request), name_for(method)
    target = method.target_length(spec.trained_length)
    distances = distances_to(target)

    def bucket(distances: Int[Tensor, " distances"], largest: int) -> Int[Tensor, " distances"]:
        exact = buckets_of(-distances.double(), buckets=spec.buckets, max_distance=largest, both_ways=True)
        return (exact + 1e-9).floor().long()

    # Tokens from which all distances share the last bucket, and the bucket of each distance.
    (trained_last, trained), (last, stretched) = (
        (int(bucket(torch.arange(largest + 1), largest).argmax()), bucket(distances, largest))
        for largest in (spec.max_distance, method.max_distance(spec))
    )
    curves = [
        Curve(distances[1:], each[1:], colour, {"lw": 2, "drawstyle": "steps-post", "label": name})
        for each, colour, name in ((trained, BEFORE, "as trained"), (stretched, AFTER, label))
    ]
    title = "Bucket of each distance, of an encoder's keys before the query"
    return Picture(
        kind="buckets",
        sentence=f"{f'{request.model}: with' if request.model else 'With'} {label} the last bucket begins at {last:,} "
        f"tokens back, not at {trained_last:,}",
        caption="Distances that share a bucket share a learned score: no head can tell them apart. Where a line has "
        "become flat, all that lies farther back is one. These are an encoder's buckets for keys before the query; "
        "those after it have as many of their own.",
        values={
            "method": method.to_dict(),
            "trained_length": spec.trained_length,
            "target_length": target,
            "trained_last": trained_last,
            "last": last,
            "distances": distances,
            "trained": trained,
            "buckets": stretched,
        },
        panels=[lines(title, curves, size=(8.4, 3.9), y="bucket", grid="both", longest=target, legend="upper left")],
    )


def _buckets(request: PictureRequest) -> BucketSpec:
    """Return the buckets of a checkpoint, or T5's."""
    if request.checkpoint is None:
        return BucketSpec(buckets=32, max_distance=128, trained_length=request.trained_length or 512)
    config = text_of(request.config)
    buckets = getattr(config, "relative_attention_num_buckets", None)
    most = getattr(config, "relative_attention_max_distance", None)
    if not isinstance(buckets, int) or not isinstance(most, int):
        raise IncompatibleError(f"The config of {request.checkpoint} names no buckets of relative distances.")
    return BucketSpec(buckets, most, request.trained_length or getattr(config, "n_positions", None) or 512)
