"""Which distances a bucket holds, as a model was trained and with its buckets stretched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from ctxext.laboratory.pictures.picture import AFTER, BEFORE, Picture, distances_to, quiet, tokens_axis
from ctxext.methods import BucketMethod
from ctxext.methods.formulas import buckets_of
from ctxext.spec import BucketSpec

CAPTION = (
    "Distances that share a bucket share a learned score: no head can tell them apart. Where a line has become flat, "
    "all that lies farther back is one. These are an encoder's buckets for keys before the query; those after it have "
    "as many of their own."
)


@dataclass(frozen=True, eq=False)
class BucketsSeen:
    """Buckets in numbers, of keys before the query, where each direction has its own.

    Args:
        trained_length: tokens that the model was trained for.
        target_length: tokens that the method is for.
        trained_last: tokens from which all distances share the last bucket, as trained.
        last: likewise, with the method.
        distances: tokens between query and key.
        trained: the bucket of each distance, as trained.
        buckets: likewise, with the method.
    """

    trained_length: int
    target_length: int
    trained_last: int
    last: int
    distances: Int[Tensor, " distances"]
    trained: Int[Tensor, " distances"]
    buckets: Int[Tensor, " distances"]


def buckets_seen(method: BucketMethod, spec: BucketSpec) -> BucketsSeen:
    """A method's buckets in numbers."""
    target = method.target_length(spec.trained_length)
    apart, most = distances_to(target), method.max_distance(spec)

    def of(distances: Int[Tensor, " distances"], largest: int) -> Int[Tensor, " distances"]:
        found = buckets_of(-distances.double(), buckets=spec.buckets, max_distance=largest, both_ways=True)
        return (found + 1e-9).floor().long()

    lasts = [int(of(torch.arange(largest + 1), largest).argmax()) for largest in (spec.max_distance, most)]
    before, after = of(apart, spec.max_distance), of(apart, most)
    return BucketsSeen(spec.trained_length, target, lasts[0], lasts[1], apart, before, after)


def picture_of_buckets(method: BucketMethod, spec: BucketSpec, *, label: str, name: str = "") -> Picture:
    """The bucket of each distance, before and after.

    Args:
        method: stretches buckets.
        spec: the model's.
        label: what the method is called.
        name: of the model, for the title.
    """
    found, size = buckets_seen(method, spec), (8.4, 4.2)
    begin = f"{name}: with" if name else "With"
    said = f"{begin} {label} the last bucket begins at {found.last:,} tokens back, not at {found.trained_last:,}"
    return Picture.of(
        found,
        "buckets",
        saved=method.to_dict(),
        said=said,
        caption=CAPTION,
        size=size,
        draw=lambda figure: _draw(figure, found, label),
    )


def _draw(figure: Any, found: BucketsSeen, label: str) -> None:
    axes, shown = figure.subplots(), found.distances >= 1
    apart = found.distances[shown].tolist()
    for buckets, colour, said in ((found.trained, BEFORE, "as trained"), (found.buckets, AFTER, label)):
        axes.plot(apart, buckets[shown].tolist(), color=colour, lw=2, drawstyle="steps-post", label=said)
    tokens_axis(axes, found.target_length)
    quiet(
        axes,
        "Bucket of each distance, of an encoder's keys before the query",
        x="tokens between query and key",
        y="bucket",
        grid="both",
    )
    axes.legend(fontsize=8.5, frameon=False, loc="upper left")
